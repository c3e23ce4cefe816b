"""A small HTTP server on threads of its own, for pages that must not hold up an event loop.

It serves a node's /metrics and every process's health port. It speaks plain HTTP/1.0, has a bounded
number of connections, and closes the connection of a client that sends nothing for a few seconds.
Life: start() -> stop().
"""

from __future__ import annotations

import socket
import ssl
from dataclasses import dataclass
from socketserver import TCPServer, ThreadingMixIn
from threading import BoundedSemaphore, Thread
from typing import Any, Final
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server
from wsgiref.types import WSGIApplication

PATIENCE_S: Final = 5.0
MAX_CONNECTIONS: Final = 32  # at once; Prometheus uses one, and so does each probe


class _Handler(WSGIRequestHandler):
    timeout = PATIENCE_S  # of the socket: for the TLS handshake and for each read

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: scrapes and probes are not worth a line."""


class _Server(ThreadingMixIn, WSGIServer):
    """The server's settings. Inheritance is http.server's way to set them."""

    daemon_threads = True
    request_queue_size = 128  # http.server's 5 would keep a probe waiting for a second in a burst
    context: ssl.SSLContext | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._room = BoundedSemaphore(MAX_CONNECTIONS)

    def server_bind(self) -> None:
        """Bind without http.server's look-up of the own name.

        Without a resolver that look-up takes seconds.
        """
        TCPServer.server_bind(self)
        self.server_name, self.server_port = self.socket.getsockname()[:2]
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._room.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            if self.context is not None:  # TLS on this thread: a slow handshake stops nobody else
                request.settimeout(PATIENCE_S)
                request = self.context.wrap_socket(request, server_side=True)
            super().process_request_thread(request, client_address)
        except OSError:  # not TLS, or no valid certificate
            self.shutdown_request(request)
        finally:
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore the error: a client may break off."""


class _Server6(_Server):
    address_family = socket.AF_INET6


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A server that runs, and its thread."""

    server: _Server
    thread: Thread

    @classmethod
    def start(
        cls, app: WSGIApplication, host: str, port: int, context: ssl.SSLContext | None = None
    ) -> RunningServer:
        """Start to serve `app`; `port` 0: any free one. Raises OSError if it cannot be bound."""
        server = make_server(host, port, app, _Server6 if ":" in host else _Server, _Handler)
        server.context = context
        thread = Thread(target=server.serve_forever, name=f"http-{port}", daemon=True)
        thread.start()
        return cls(server, thread)

    @property
    def port(self) -> int:
        return self.server.server_port

    def stop(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()
