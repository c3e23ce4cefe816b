"""A node's /metrics endpoint, on threads of its own. What it tells: baton/node/metrics.py.

Beyond loopback it wants `Authorization: Bearer TOKEN`, a token made of the deployment's secret that
does not tell the secret (`metrics_token`), and is encrypted like the rest of the node. It speaks
plain HTTP/1.0, answers GET and HEAD, and gives a client that says nothing a few seconds.
The life: start() -> stop().
"""

from __future__ import annotations

import hashlib
import hmac
import socket
import ssl
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from socketserver import ThreadingMixIn
from threading import BoundedSemaphore, Thread
from typing import Any, Final
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

from prometheus_client import CollectorRegistry, make_wsgi_app

from baton.errors import ConfigError
from baton.tls import TlsFiles

PATIENCE_S: Final = 5.0
MAX_CONNECTIONS: Final = 32  # at once; Prometheus uses one
Around = Callable[[WSGIApplication], WSGIApplication]


def metrics_token(secret: str) -> str:
    """`printf metrics | openssl dgst -sha256 -hmac "$BATON_SECRET"`."""
    return hmac.new(secret.encode(), b"metrics", hashlib.sha256).hexdigest()


@dataclass(frozen=True, slots=True)
class MetricsPlace:
    """Where to listen; `token` "": open to all that reach it."""

    host: str
    port: int
    token: str = ""
    tls: TlsFiles | None = None


class _Handler(WSGIRequestHandler):
    timeout = PATIENCE_S  # of the socket: for the TLS handshake and for each read

    def log_message(self, format: str, *args: Any) -> None:
        """Scrapes are not worth a line."""


class _Server(ThreadingMixIn, WSGIServer):
    """http.server's own way to set any of this is inheritance."""

    daemon_threads = True
    context: ssl.SSLContext | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._room = BoundedSemaphore(MAX_CONNECTIONS)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._room.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            if self.context is not None:  # here: a slow handshake stops nobody else
                request.settimeout(PATIENCE_S)
                request = self.context.wrap_socket(request, server_side=True)
            super().process_request_thread(request, client_address)
        except OSError:  # no TLS, or not for us
            self.shutdown_request(request)
        finally:
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Whoever breaks off is nobody's concern."""


class _Server6(_Server):
    address_family = socket.AF_INET6


def _guarded(app: WSGIApplication, token: str) -> WSGIApplication:
    """`app` for those who present the token; "" = for all."""
    expected = hashlib.sha256(f"Bearer {token}".encode()).digest()

    def guarded(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        given = str(environ.get("HTTP_AUTHORIZATION", "")).encode("latin-1", "replace")
        if token and not hmac.compare_digest(hashlib.sha256(given).digest(), expected):
            start_response("401 Unauthorized", [("WWW-Authenticate", "Bearer")])
            return [b""]
        return app(environ, start_response)

    return guarded


@dataclass(frozen=True, slots=True)
class MetricsServer:
    """The endpoint while it runs."""

    server: _Server
    thread: Thread

    @classmethod
    def start(
        cls, registry: CollectorRegistry, place: MetricsPlace, around: Around | None = None
    ) -> MetricsServer:
        """`around` puts pages before the guard, open to all: a probe's.

        Raises ConfigError if the port cannot be bound or the TLS files cannot be used."""
        context = None if place.tls is None else place.tls.server_context()
        kind = _Server6 if ":" in place.host else _Server
        app = _guarded(make_wsgi_app(registry), place.token)
        app = app if around is None else around(app)
        try:
            server = make_server(place.host, place.port, app, kind, _Handler)
        except OSError as error:
            raise ConfigError(
                f"cannot bind the metrics port {place.host}:{place.port}: {error}",
                field="metrics_port",
            ) from error
        server.context = context
        thread = Thread(target=server.serve_forever, name="metrics", daemon=True)
        thread.start()
        return cls(server, thread)

    @property
    def port(self) -> int:
        return self.server.server_port

    def stop(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()
