"""Exchanges: middleware that gives every HTTP request an id and a line in the log.

The id is the client's `x-request-id` if that is valid, else a random one; a `request_id` in the
body replaces it (router/request/request_ids.py). The answer repeats the id, and every line that is
logged for the request has it. While the router drains, every answer says `connection: close`, so a
client opens its next connection, to another router. When the listener closes later, hardly any
connection is left on which a request could still arrive.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Mapping
from types import MappingProxyType
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from baton.runtime.log import request_context
from router.request.request_ids import known_id, note_request_id
from router.server.auth import OPEN_PATHS
from router.services import Lifecycle

log = logging.getLogger(__name__)
CLIENT_LEFT: Final = 499  # logged if the client went away before an answer began
_NO_DIALECTS: Final[Mapping[str, ASGIApp]] = MappingProxyType({})


class Exchanges:
    """The middleware around the whole app. `dialects`: path prefix -> the app that gets requests
    below that prefix instead."""

    def __init__(
        self, app: ASGIApp, lifecycle: Lifecycle, dialects: Mapping[str, ASGIApp] = _NO_DIALECTS
    ) -> None:
        self._app = app
        self._lifecycle = lifecycle
        self._dialects = tuple(dialects.items())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = CLIENT_LEFT
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
                level = logging.DEBUG if path in OPEN_PATHS else logging.INFO
                log.log(level, "%s %s %s", scope["method"], path, status)
