"""The router's public ASGI app: Exchanges > HeadGuard > ApiKeyGuard > routes.

On Anthropic's routes, failures become Anthropic's error objects. With --allowed-origins, a CORS
middleware is around all of it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Final

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request as HttpRequest
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from baton.protocol.errors import BatonError
from router.api.anthropic.errors import PREFIX, AnthropicErrors
from router.api.http.preparing import counted
from router.api.http.reading import with_body_limit
from router.api.http.web_errors import on_baton_error, on_http_exception
from router.api.http_api import BUSIEST, HttpApi
from router.api.responses.stored_api import StoredApi
from router.api.resumable.http import ResumableApi
from router.api.strict_fields import strict
from router.api.timelines import TimelinesApi
from router.images.limits import MAX_BODY_BYTES
from router.metrics.vllm import watch
from router.models import PromptReaders
from router.server.auth import ApiKeyGuard
from router.server.endpoints import Endpoints
from router.server.exchanges import Exchanges, HttpMeter
from router.server.http_guard import HeadGuard, HttpLimits
from router.services import RouterServices

Handler = Callable[[HttpRequest], Awaitable[ASGIApp]]
# Routes whose bodies may hold images.
WITH_IMAGES: Final = frozenset(
    {
        "/v1/chat/completions", "/v1/responses", "/v1/responses/input_tokens", "/v1/messages",
        "/v1/messages/count_tokens", "/tokenize", "/invocations",
    }
)  # fmt: skip


def create_app(services: RouterServices, limits: HttpLimits | None = None) -> ASGIApp:
    """Return the app of the public HTTP port. Its threads end with the app's lifespan."""
    prompts = PromptReaders(services.config, services.models)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncGenerator[None, None]:
        try:
            yield
        finally:
            prompts.close()

    watch(services)
    every = all_routes(services, prompts)
    routes = Starlette(
        routes=every,
        lifespan=lifespan,
        exception_handlers={
            BatonError: on_baton_error,
            HTTPException: on_http_exception,
            Exception: on_baton_error,
        },
    )
    # A path with a slash too many is no route. A redirect would tell which routes exist.
    routes.router.redirect_slashes = False
    direct = DirectRoutes(routes, {it.path: it.endpoint for it in every if it.path in BUSIEST})
    if services.batches is not None:
        services.batches.serve(Exchanges(direct, services.lifecycle))
    guarded = ApiKeyGuard(direct, services.config.key_ring(), services.events)
    limited = HeadGuard(guarded, limits if limits is not None else HttpLimits())
    asked = services.metrics.instruments
    meter = HttpMeter(asked.http_requests, asked.http_seconds, every)
    dialects = {PREFIX: AnthropicErrors(limited)}
    app: ASGIApp = Exchanges(limited, services.lifecycle, dialects, meter)
    origins = services.config.allowed_origins
    if origins:
        everything = ("*",)
        app = CORSMiddleware(
            app,
            allow_origins=origins,
            allow_methods=everything,
            allow_headers=everything,
            expose_headers=everything,
        )
    prefix = services.config.root_path
    return RootPath(app, prefix) if prefix else app


def all_routes(services: RouterServices, prompts: PromptReaders) -> list[Route]:
    """Return all routes of the public port; /openapi.json describes them."""
    http = HttpApi(services, prompts)
    timelines = TimelinesApi(services, everyone=False)
    plain = [*http.routes(), *Endpoints(services, prompts, http).routes(), *timelines.routes()]
    resumable = ResumableApi(services, plain)
    every = StoredApi(services, resumable).routes(resumable.routes())
    if services.config.strict_fields:
        every = [strict(route) for route in every]
    if any(model.images is not None for model in services.models.all):
        every = [
            with_body_limit(route, MAX_BODY_BYTES) if route.path in WITH_IMAGES else route
            for route in every
        ]
    return [counted(route, lambda: services.dispatcher.gate) for route in every]


class DirectRoutes:
    """Calls the handlers of the busiest routes without Starlette's layers. `posts`: path -> handler
    of a POST. All other requests go to `app`.

    For every request Starlette walks through its middlewares and a list of routes. Here one
    look-up in a dictionary finds the handler; errors get the same answers as in Starlette.
    """

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
            raise  # uvicorn logs it, too
        await reply(scope, receive, send)


class RootPath:
    """Serves every route also below a prefix, for a proxy that leaves the prefix on. It is the
    outermost middleware: everything inside it, such as the API-key guard, sees paths without the
    prefix."""

    def __init__(self, app: ASGIApp, prefix: str) -> None:
        self._app = app
        self._prefix = prefix

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        if scope["type"] == "http" and scope["path"].startswith(f"{self._prefix}/"):
            scope = {**scope, "path": scope["path"].removeprefix(self._prefix)}
        return self._app(scope, receive, send)
