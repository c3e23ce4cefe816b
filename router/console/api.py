"""The console's routes on the admin port.

    GET  /console, /console/{file}   pages, without a key: router/console/pages.py
    GET  /console/data/snapshot      the state now, as JSON
    GET  /console/data/stream        server-sent events: a snapshot, then a delta each second
    GET  /console/data/nodes/{id}    what one node holds: router/console/nodes.py
    POST /console/data/break         kill, stop, slow a node: router/console/nodes.py
    ANY  /console/api/...            the router's public app, with its own keys, not the operators'

All of /console/data needs an operator's key (router/admin/server.py puts the guard around it).
"""

from __future__ import annotations

from collections.abc import Awaitable
from contextlib import aclosing
from typing import Final

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from baton.protocol.errors import BatonError, Cancelled
from router.api.exchange import FrameWriter
from router.api.http.connection import while_connected
from router.api.http.web_errors import error_response
from router.console.stream import StateFeed

DATA_PREFIX: Final = "/console/data/"
API_PREFIX: Final = "/console/api"
NO_STORE: Final = {"cache-control": "no-store", "x-content-type-options": "nosniff"}


class ConsoleApi:
    """The routes with data."""

    def __init__(self, feed: StateFeed) -> None:
        self._feed = feed

    def routes(self) -> list[Route]:
        return [
            Route(f"{DATA_PREFIX}snapshot", self.snapshot, methods=["GET"]),
            Route(f"{DATA_PREFIX}stream", self.stream, methods=["GET"]),
        ]

    async def snapshot(self, _: HttpRequest) -> Response:
        body = msgspec.json.encode(await self._feed.snapshot())
        return Response(body, headers=NO_STORE, media_type="application/json")

    async def stream(self, _: HttpRequest) -> ASGIApp:
        return ConsoleStream(self._feed)


class ConsoleStream:
    """The answer of /console/data/stream. A client that does not read is cut off."""

    def __init__(self, feed: StateFeed) -> None:
        self._feed = feed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writer = FrameWriter(send)
        try:
            await while_connected(receive, self._write(writer), scope)
        except Cancelled:
            pass  # the client went away, or does not read
        except BatonError as error:
            await error_response(error)(scope, receive, send)
        finally:
            writer.close()

    async def _write(self, writer: FrameWriter) -> None:
        async with aclosing(self._feed.watch()) as frames:
            async for data in frames:
                await writer.write(data)
        await writer.write(b"", more=False)


class ConsoleDoors:
    """Sends each request of the admin port to its app: the pages and the public app have no guard
    of operators' keys in front of them, everything else has.

    `app`: with the guard. `public`: the public app; None: /console/api is no route.
    """

    def __init__(self, app: ASGIApp, pages: ASGIApp, public: ASGIApp | None) -> None:
        self._app = app
        self._pages = pages
        self._public = public

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        path: str = scope["path"] if scope["type"] == "http" else ""
        if path.startswith(f"{API_PREFIX}/"):
            if self._public is None:
                return self._pages(scope, receive, send)
            raw: bytes = scope.get("raw_path") or path.encode()
            inner = {
                **scope,
                "path": path.removeprefix(API_PREFIX),
                "raw_path": raw.removeprefix(API_PREFIX.encode()),
            }
            return self._public(inner, receive, send)
        is_page = path == "/console" or path.startswith("/console/")
        if is_page and not path.startswith(DATA_PREFIX):
            return self._pages(scope, receive, send)
        return self._app(scope, receive, send)
