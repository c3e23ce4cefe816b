"""Parting: while the router drains, every answer says `connection: close`.

A client that keeps its connection learns so, between two requests, that the next one belongs to
another router; when the listener closes, hardly any connection is left that a request could be on
its way on.
"""

from __future__ import annotations

from collections.abc import Awaitable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.services import Lifecycle


class Parting:
    """The outermost middleware; does nothing before the router drains."""

    def __init__(self, app: ASGIApp, lifecycle: Lifecycle) -> None:
        self._app = app
        self._lifecycle = lifecycle

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        def send_with_farewell(message: Message) -> Awaitable[None]:
            if message["type"] == "http.response.start" and self._lifecycle.draining:
                headers = [it for it in message.get("headers", ()) if it[0] != b"connection"]
                message = {**message, "headers": [*headers, (b"connection", b"close")]}
            return send(message)

        return self._app(scope, receive, send_with_farewell if scope["type"] == "http" else send)
