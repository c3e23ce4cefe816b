"""Exchanges: middleware that gives every HTTP request an id and a line in the log, and counts it.

It also ends the timelines of an answer, when the answer's last byte has gone to the transport.

The id is the client's `x-request-id` if that is valid, else a random one; a `request_id` in the
body replaces it (router/request/request_ids.py). The answer repeats the id, and every line that is
logged for the request has it. While the router drains, every answer says `connection: close`, so a
client opens its next connection, to another router. When the listener closes later, hardly any
connection is left on which a request could still arrive.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Awaitable, Iterable, Mapping
from types import MappingProxyType
from typing import Final

from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from baton.protocol.clock import SystemClock
from baton.runtime.log import request_context
from router.request.request_ids import known_id, note_request_id
from router.request.terms import ARRIVAL_KEY
from router.request.trace import TRACES_KEY
from router.server.auth import OPEN_PATHS
from router.services import Lifecycle
from router.tallies import Count, Counter, Distribution, Histogram

log = logging.getLogger(__name__)
CLIENT_LEFT: Final = 499  # logged if the client went away before an answer began
METHODS: Final = frozenset({"DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT"})
OTHER: Final = "other"  # any other method, and a path that is no route's
_CONVERTER: Final = re.compile(r":\w+}")
_NO_DIALECTS: Final[Mapping[str, ASGIApp]] = MappingProxyType({})


class HttpMeter:
    """Counts answers into two instruments. `routes`: all that the port has.

    A label is the template of the route that answered, never a path that a client made up.
    """

    def __init__(self, requests: Counter, seconds: Histogram, routes: Iterable[Route]) -> None:
        self._requests = requests
        self._seconds = seconds
        self._paths = set[str]()
        self._templates = dict[object, str]()  # by endpoint, of the other routes
        for route in routes:
            if route.param_convertors:
                self._templates[route.endpoint] = _CONVERTER.sub("}", route.path)
            else:
                self._paths.add(route.path)
        # Of known methods and routes without parameters, so there is a bounded number.
        self.known = dict[tuple[str, str, int], tuple[Count, Distribution]]()

    def tally(self, scope: Scope, status: int) -> tuple[Count, Distribution]:
        """Return where an answer to the request of `scope` counts, and its seconds."""
        method, path = scope["method"], scope["path"]
        # Starlette notes which endpoint it has called.
        route = path if path in self._paths else self._templates.get(scope.get("endpoint"), OTHER)
        if method not in METHODS:
            method = OTHER
        found = (
            self._requests.labels(method, route, str(status)),
            self._seconds.labels(method, route),
        )
        if route == path and method != OTHER:
            self.known[method, path, status] = found
        return found


class Exchanges:
    """The middleware around the whole app. `dialects`: path prefix -> the app that gets requests
    below that prefix instead. `meter`: None = the answers are not counted."""

    def __init__(
        self,
        app: ASGIApp,
        lifecycle: Lifecycle,
        dialects: Mapping[str, ASGIApp] = _NO_DIALECTS,
        meter: HttpMeter | None = None,
    ) -> None:
        self._app = app
        self._meter = meter
        self._lifecycle = lifecycle
        self._dialects = tuple(dialects.items())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status, began = CLIENT_LEFT, scope.get(ARRIVAL_KEY) or SystemClock.monotonic()
        path: str = scope["path"]

        def send_with_id(message: Message) -> Awaitable[None]:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                # Looked up only now: the body may have replaced the id.
                headers = [*message.get("headers", ()), (b"x-request-id", known_id(scope).encode())]
                if self._lifecycle.draining:
                    headers = [pair for pair in headers if pair[0] != b"connection"]
                    headers.append((b"connection", b"close"))
                message = {**message, "headers": headers}
            return send(message)

        app = self._app
        for prefix, dialect in self._dialects:
            if path == prefix or path.startswith(f"{prefix}/"):
                app = dialect
        with request_context(note_request_id(scope)):
            try:
                await app(scope, receive, send_with_id)
            finally:
                ended = SystemClock.monotonic()
                for trace in scope.get(TRACES_KEY, ()):
                    trace.answered_at = ended
                if self._meter is not None:
                    key = (scope["method"], path, status)
                    tally = self._meter.known.get(key) or self._meter.tally(scope, status)
                    tally[0].value += 1.0
                    tally[1].observe(ended - began)
                level = logging.DEBUG if path in OPEN_PATHS else logging.INFO
                took_ms = (ended - began) * 1000
                log.log(level, "%s %s %s in %.1f ms", scope["method"], path, status, took_ms)
