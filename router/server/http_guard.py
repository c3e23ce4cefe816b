"""Limits around the HTTP parser: time for head and body, sizes and counts of headers, framing.

uvicorn's protocol alone keeps an unfinished request open for ever, has no limits for heads and does
not require Host. Three parts add this. They share one HTTP parser, because two parsers that
disagree allow request smuggling:

    BoundedParser     sits between uvicorn's HttpToolsProtocol and httptools (http_parser.py)
    GuardedProtocol   wraps both per connection: deadlines, the size of the send buffer, and the
                      notice of the connection's end (router/api/http/connection.py); a half-closed
                      connection has not ended yet
    HeadGuard         ASGI middleware that checks the parsed head: sizes, counts, framing headers

The three cost some 10 us of the router's 600 us per request (`python -m bench.own_copies --parts
http`, docs/log/2026-11-23-own-copies.md).
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, cast

import httptools
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from baton.runtime.tls import TlsFiles
from router.api.http.connection import HANG_UP, HangUp
from router.api.http.web_errors import http_error_response, raw_error
from router.server.half_close import COMMENT_CHUNK, INTERIM, HalfClosed
from router.server.http_parser import BoundedParser, ParserPhase

_TIMEOUT_REPLY: Final = raw_error(408, "the request did not come whole in time")
SPARE_CONNECTIONS: Final = 64  # so many beyond the limit get 503; further ones are aborted
MAX_METHOD_CHARS: Final = 16
_SINGLE: Final = (
    b"host", b"content-length", b"transfer-encoding", b"content-type", b"authorization",
    b"x-api-key", b"x-request-id",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """The limits of one client: sizes in bytes, counts, times in seconds."""

    head_s: float = 10.0  # first byte of a request (or the connection) to the end of its head
    body_s: float = 60.0  # end of the head to the end of the body
    keep_alive_s: int = 30
    head_bytes: int = 32 << 10
    target_bytes: int = 4 << 10
    header_bytes: int = 8 << 10  # one name and value
    num_headers: int = 100
    send_buffer_bytes: int = (
        256 << 10
    )  # a client that never reads holds no more than this in the kernel
    connections: int = 4096


def uvicorn_settings(limits: HttpLimits, tls: TlsFiles | None = None) -> dict[str, Any]:
    """Return the keyword arguments for uvicorn.Config that install GuardedProtocol, and TLS.

    Raises ConfigError if the TLS files cannot be used."""
    encrypted: dict[str, Any] = {}
    if tls is not None:
        context = tls.server_context(ssl.TLSVersion.TLSv1_2)
        encrypted["ssl_context_factory"] = lambda *_: context
    return encrypted | {
        "http": partial(GuardedProtocol, limits=limits),
        "ws": "none",
        "interface": "asgi3",  # uvicorn's guess wants a coroutine function
        "timeout_keep_alive": limits.keep_alive_s,
        "limit_concurrency": limits.connections,
        "proxy_headers": False,
        "server_header": False,
        "access_log": False,
    }


class GuardedProtocol(asyncio.Protocol):
    """The protocol of one connection. The head of a request must be complete within `head_s`, its
    body within `body_s`; otherwise the client gets 408 and the connection is closed."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        limits: HttpLimits,
    ) -> None:
        self._hang_up = HangUp(self._chunk)
        state = {**app_state, HANG_UP: self._hang_up}
        self._inner = HttpToolsProtocol(config, server_state, state, _loop)
        self._parser = BoundedParser(self._inner, limits.head_bytes)
        self._inner.parser = cast("httptools.HttpRequestParser", self._parser)
        self._loop = _loop if _loop is not None else asyncio.get_running_loop()
        self._limits = limits
        self._others = server_state.connections
        self._transport: asyncio.Transport | None = None
        self._waits_for = ParserPhase.NOTHING  # HEAD or BODY: a deadline for this part runs
        self._deadline: asyncio.TimerHandle | None = None
        self._accepted = False
        self._half_closed: HalfClosed | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports do not inherit from asyncio's: no isinstance here.
        self._transport = raw = cast("asyncio.Transport", transport)
        if len(self._others) >= self._limits.connections + SPARE_CONNECTIONS:
            raw.abort()  # before any work is done for it
            return
        self._accepted = True
        sock = raw.get_extra_info("socket")
        if sock is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, self._limits.send_buffer_bytes)
        self._inner.connection_made(raw)
        self._watch()

    def data_received(self, data: bytes) -> None:
        self._inner.data_received(data)
        self._watch()

    def eof_received(self) -> bool:
        """Handle the client's FIN. Return True to keep our side open if an answer is still to be
        sent to a complete request; False closes the connection."""
        cycle = cast("RequestResponseCycle | None", self._inner.cycle)
        if (
            cycle is None
            or cycle.response_complete
            or self._parser.phase is not ParserPhase.NOTHING
        ):
            return False
        if self._transport is None or self._inner.scheme == "https":
            return False
        cycle.keep_alive = False  # the client can send no further request
        self._half_closed = HalfClosed(self._transport, self._probe)
        return True

    def _chunk(self, frames: Callable[[], bytes]) -> bool:
        """Write a chunk of the present answer past ASGI, unless it is empty; False if the answer is
        no stream under way, or the client is behind."""
        inner, cycle = self._inner, self._inner.cycle
        streams = cycle.chunked_encoding and not cycle.response_complete
        if not streams or inner.flow.write_paused or inner.transport.is_closing():
            return False
        if data := frames():
            inner.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return True

    def _probe(self) -> bytes:
        """Return bytes that a client ignores while it waits for its answer, or b"" for none."""
        inner = self._inner
        if inner.pipeline:
            return b""
        if inner.cycle.response_started:  # of all answers, only event streams are chunked
            return COMMENT_CHUNK if inner.cycle.chunked_encoding else b""
        return INTERIM if inner.cycle.scope["http_version"] == "1.1" else b""

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop()
        if self._half_closed is not None:
            self._half_closed.stop()
        if not self._accepted:
            return
        self._inner.connection_lost(exc)
        self._hang_up.happened()

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()

    def _watch(self) -> None:
        """Start, keep or stop the deadline: it runs while a head or a body is incomplete."""
        phase = self._parser.phase
        if phase is ParserPhase.NOTHING and not self._parser.is_behind:
            phase = (
                ParserPhase.HEAD
            )  # uvicorn stops its idle timer at any bytes, even if they begin no request
        if phase is self._waits_for:
            return
        self._stop()
        if phase is not ParserPhase.NOTHING:
            self._start(phase)

    def _start(self, phase: ParserPhase) -> None:
        self._waits_for = phase
        seconds = self._limits.head_s if phase is ParserPhase.HEAD else self._limits.body_s
        self._deadline = self._loop.call_later(seconds, self._expired)

    def _stop(self) -> None:
        self._waits_for = ParserPhase.NOTHING
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _expired(self) -> None:
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        if self._parser.is_behind:
            # The client could not be read while an earlier request was answered: start anew.
            self._start(self._waits_for)
            return
        if self._parser.may_answer:
            transport.write(_TIMEOUT_REPLY)
        transport.close()


class HeadGuard:
    """ASGI middleware that checks the parsed head of a request. It answers a bad head with an
    error and closes the connection."""

    def __init__(self, app: ASGIApp, limits: HttpLimits) -> None:
        self._app = app
        self._limits = limits

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        fault = self._fault(scope) if scope["type"] == "http" else None
        if fault is None:
            return self._app(scope, receive, send)
        response = http_error_response(*fault)
        response.headers["connection"] = "close"
        return response(scope, receive, send)

    def _fault(self, scope: Scope) -> tuple[int, str] | None:
        """Return (status, message) for the first fault of the head, or None for a good head."""
        limits = self._limits
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        sizes = [len(name) + len(value) for name, value in headers]
        if scope["http_version"] not in ("1.0", "1.1"):
            return 505, "only HTTP/1.0 and HTTP/1.1 are spoken here"
        if len(scope["method"]) > MAX_METHOD_CHARS:
            return 400, "the method is too long"
        target = len(scope.get("raw_path") or b"") + len(scope["query_string"])
        if target > limits.target_bytes:
            return 414, "the request target is too long"
        if len(headers) > limits.num_headers:
            return 431, "too many headers"
        if sum(sizes) > limits.head_bytes or max(sizes, default=0) > limits.header_bytes:
            return 431, "the headers are too large"
        return _framing_fault(scope["http_version"], headers)


def _framing_fault(version: str, headers: Sequence[tuple[bytes, bytes]]) -> tuple[int, str] | None:
    """Return (status, message) for framing that HTTP parsers read differently, else None."""
    names = {name for name, _ in headers}
    if version == "1.1" and b"host" not in names:
        return 400, "no host header"
    if b"transfer-encoding" in names:
        if b"content-length" in names:
            return 400, "content-length together with transfer-encoding"
        codings = {value.lower() for name, value in headers if name == b"transfer-encoding"}
        if codings != {b"chunked"}:
            return 400, "no transfer-encoding but chunked is spoken here"
    if len(names) == len(headers):
        return None
    every = [name for name, _ in headers]
    for name in _SINGLE:
        if every.count(name) > 1:
            return 400, f"more than one {name.decode()} header"
    return None
