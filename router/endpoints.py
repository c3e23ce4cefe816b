"""The routes beside OpenAI's generation: pooling, tokens in and out, load, the description."""

from __future__ import annotations

import asyncio
from functools import cache

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Route

from router.generate_ids import GenerateApi
from router.http_api import HttpApi
from router.openapi.document import document
from router.openapi.page import HEADERS, page
from router.pooling.config import PoolingSettings
from router.pooling.embeddings import EmbeddingsApi, PoolingParts
from router.pooling.pool import PoolDispatcher
from router.pooling.rerank import RerankApi
from router.prompts import PromptReader
from router.services import RouterServices


class Endpoints:
    """What router/app.py adds to HttpApi's routes."""

    def __init__(self, services: RouterServices, prompts: PromptReader, http: HttpApi) -> None:
        config = services.config
        self._services = services
        self.pools = services.pools or PoolDispatcher(
            services.registry, services.clock, config.max_live_requests
        )
        parts = PoolingParts(services, prompts, self.pools, PoolingSettings.of(config))
        self._embeddings = EmbeddingsApi(parts)
        self._rerank = RerankApi(parts)
        self._generate = GenerateApi(services, http)

    def routes(self) -> list[Route]:
        post = (
            ("/v1/embeddings", self._embeddings.embeddings),
            ("/v1/rerank", self._rerank.rerank),
            ("/v2/rerank", self._rerank.rerank),
            ("/rerank", self._rerank.rerank),
            ("/v1/score", self._rerank.score),
            ("/score", self._rerank.score),
            ("/inference/v1/generate", self._generate.generate),
        )
        get = (
            ("/load", self.load),
            ("/openapi.json", self.openapi),
            ("/docs", self.docs),
            ("/", self.root),
        )
        return [Route(path, handler, methods=["POST"]) for path, handler in post] + [
            Route(path, handler, methods=["GET"]) for path, handler in get
        ]

    async def load(self, _: HttpRequest) -> Response:
        """vLLM's: requests under way here, of all kinds."""
        load = self._services.metrics.live + self.pools.num_live
        return _json({"server_load": load})

    async def openapi(self, _: HttpRequest) -> Response:
        return Response(await asyncio.to_thread(_document), media_type="application/json")

    async def docs(self, _: HttpRequest) -> Response:
        return HTMLResponse(await asyncio.to_thread(_page), headers=HEADERS)

    async def root(self, _: HttpRequest) -> Response:
        """Whoever looks in with a browser reads what there is."""
        return RedirectResponse("docs")  # relative: below a prefix, too


@cache
def _document() -> bytes:
    """The same for every router; made when somebody asks, for that takes a while."""
    return msgspec.json.encode(document())


@cache
def _page() -> str:
    return page(document())


def _json(content: object) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")
