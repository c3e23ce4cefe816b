"""DirectRoutes: the busiest routes without the layers in between.

Starlette walks through its middlewares and a list of routes for every request; these paths are
looked up in a dictionary, with the same handlers and the same answers to what they raise.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.types import ASGIApp, Receive, Scope, Send

from baton.protocol.errors import BatonError
from router.api.http.web_errors import on_baton_error, on_http_exception

Handler = Callable[[HttpRequest], Awaitable[ASGIApp]]


class DirectRoutes:
    """Wraps an ASGI app, which gets everything else. `posts`: path -> handler."""

    def __init__(self, app: ASGIApp, posts: Mapping[str, Handler]) -> None:
        self._app = app
        self._posts = dict(posts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        handler = None
        if scope["type"] == "http" and scope["method"] == "POST":
            handler = self._posts.get(scope["path"])
        if handler is None:
            await self._app(scope, receive, send)
            return
        request = HttpRequest(scope, receive, send)
        try:
            reply = await handler(request)
        except HTTPException as error:
            reply = await on_http_exception(request, error)
        except BatonError as error:
            reply = await on_baton_error(request, error)
        except Exception as error:
            await (await on_baton_error(request, error))(scope, receive, send)
            raise  # the server's log wants it, too
        await reply(scope, receive, send)
