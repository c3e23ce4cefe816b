"""The router's ASGI app of injected parts: head guard > request id > API keys > routes.

Around it all, failures on Anthropic's routes are put into Anthropic's words, a draining router
ends its connections, and web pages of other origins are answered if they may.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Awaitable
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from baton.protocol.errors import BatonError
from baton.runtime.log import request_context
from router.api.anthropic.errors import AnthropicErrors
from router.api.http.parting import Parting
from router.api.http.preparing import counted
from router.api.http.web_errors import on_baton_error, on_http_exception
from router.api.http_api import BUSIEST, HttpApi
from router.api.responses.stored_api import StoredApi
from router.api.resumable.http import ResumableApi
from router.api.strict_fields import strict
from router.metrics.vllm import watch
from router.prompts.reader import PromptReader
from router.request.request_ids import known_id, note_request_id
from router.server.auth import OPEN_PATHS, ApiKeyGuard
from router.server.direct import DirectRoutes
from router.server.endpoints import Endpoints
from router.server.http_guard import HeadGuard, HttpLimits
from router.server.root_path import RootPath
from router.services import RouterServices

log = logging.getLogger(__name__)


def create_app(services: RouterServices, limits: HttpLimits | None = None) -> ASGIApp:
    """The whole HTTP front door. Its threads end with the app's lifespan."""
    trusts = services.config.trust_request_chat_template
    prompts = PromptReader(services.tokenizer, services.chat_template, trusts)

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
    # Slashes mean what they say: a redirect would tell the unauthenticated which routes exist.
    routes.router.redirect_slashes = False
    direct = DirectRoutes(routes, {it.path: it.endpoint for it in every if it.path in BUSIEST})
    if services.batches is not None:
        services.batches.serve(RequestIds(direct))
    guarded = ApiKeyGuard(direct, services.config.key_ring())
    limited = HeadGuard(RequestIds(guarded), limits if limits is not None else HttpLimits())
    app: ASGIApp = Parting(AnthropicErrors(limited), services.lifecycle)
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


def all_routes(services: RouterServices, prompts: PromptReader) -> list[Route]:
    """Everything that the public port serves; /openapi.json describes the same."""
    http = HttpApi(services, prompts)
    plain = [*http.routes(), *Endpoints(services, prompts, http).routes()]
    resumable = ResumableApi(services, plain)
    every = StoredApi(services, resumable).routes(resumable.routes())
    if services.config.strict_fields:
        every = [strict(route) for route in every]
    return [counted(route, lambda: services.dispatcher.gate) for route in every]


class RequestIds:
    """Gives each HTTP request an id: the client's `x-request-id` if it is a plain one, else drawn,
    until its body says another.

    It is echoed in the answer and stands on every line logged meanwhile, one of them for the
    request itself; the reply's own id is made of it (router/request/request_ids.py).
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        noted = note_request_id(scope)
        status = 499  # nothing was sent: the client went away

        def send_with_id(message: Message) -> Awaitable[None]:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                known = known_id(scope).encode()  # a body may have named it by now
                headers = [*message.get("headers", ()), (b"x-request-id", known)]
                message = {**message, "headers": headers}
            return send(message)

        with request_context(noted):
            try:
                await self._app(scope, receive, send_with_id)
            finally:
                level = logging.DEBUG if scope["path"] in OPEN_PATHS else logging.INFO
                log.log(level, "%s %s %s", scope["method"], scope["path"], status)
