"""The routes beside OpenAI's generation: pooling, tokens in and out, load, the description."""

from __future__ import annotations

import asyncio
from functools import cache

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Route

from router.api.generate_ids import GenerateApi
from router.api.http_api import HttpApi
from router.api.invocations import Handler, Invocations
from router.api.openapi.document import document
from router.api.openapi.page import HEADERS, page
from router.api.pooling.classify import ClassifyApi
from router.api.pooling.cohere import CohereApi
from router.api.pooling.config import PoolingSettings
from router.api.pooling.embeddings import EmbeddingsApi, PoolingParts
from router.api.pooling.rerank import RerankApi
from router.api.tokenizer_info import tokenizer_info
from router.batches.api import BatchesApi
from router.prompts.reader import PromptReader
from router.request.pool import PoolDispatcher
from router.services import RouterServices


class Endpoints:
    """What router/server/app.py adds to HttpApi's routes."""

    def __init__(self, services: RouterServices, prompts: PromptReader, http: HttpApi) -> None:
        config = services.config
        self._services = services
        self.pools = services.pools or PoolDispatcher(
            services.registry, services.clock, config.max_live_requests
        )
        parts = PoolingParts(services, prompts, self.pools, PoolingSettings.of(config))
        self._embeddings = EmbeddingsApi(parts)
        self._cohere = CohereApi(parts)
        self._classify = ClassifyApi(parts)
        self._rerank = RerankApi(parts)
        self._generate = GenerateApi(services, http)
        self._http = http
        self._classifies = bool(parts.settings.labels)
        self._tells_tokenizer = config.enable_tokenizer_info_endpoint

    def routes(self) -> list[Route]:
        post = (
            ("/v1/embeddings", self._embeddings.embeddings),
            ("/v2/embed", self._cohere.embed),
            ("/classify", self._classify.classify),
            ("/pooling", self._classify.pooling),
            ("/v1/rerank", self._rerank.rerank),
            ("/v2/rerank", self._rerank.rerank),
            ("/rerank", self._rerank.rerank),
            ("/v1/score", self._rerank.score),
            ("/score", self._rerank.score),
            ("/inference/v1/generate", self._generate.generate),
        )
        get = [
            ("/load", self.load),
            ("/openapi.json", self.openapi),
            ("/docs", self.docs),
            ("/", self.root),
        ]
        if self._tells_tokenizer:
            get.append(("/tokenizer_info", self.tokenizer_info))
        known: dict[str, Handler] = {
            **dict(post),
            "/v1/chat/completions": self._http.chat_completions,
            "/v1/completions": self._http.completions,
        }
        one_door = Invocations(known, self._classifies)
        runner, origins = self._services.batches, self._services.config.allowed_origins
        batches = [] if runner is None else BatchesApi(runner.store, runner, origins).routes()
        return [
            *batches,
            *(Route(path, handler, methods=["POST"]) for path, handler in post),
            Route("/invocations", one_door.invoke, methods=["POST"]),
            *(Route(path, handler, methods=["GET"]) for path, handler in get),
        ]

    async def tokenizer_info(self, _: HttpRequest) -> Response:
        return _json(tokenizer_info(self._services))

    async def load(self, _: HttpRequest) -> Response:
        """vLLM's: requests under way here, of all kinds."""
        load = self._services.metrics.live + self.pools.num_live
        return _json({"server_load": load})

    async def openapi(self, _: HttpRequest) -> Response:
        prefix = self._services.config.root_path
        content = await asyncio.to_thread(_document, prefix, self._tells_tokenizer)
        return Response(content, media_type="application/json")

    async def docs(self, _: HttpRequest) -> Response:
        prefix = self._services.config.root_path
        content = await asyncio.to_thread(_page, prefix, self._tells_tokenizer)
        return HTMLResponse(content, headers=HEADERS)

    async def root(self, _: HttpRequest) -> Response:
        """Whoever looks in with a browser reads what there is."""
        return RedirectResponse("docs")  # relative: below a prefix, too


@cache
def _document(root_path: str, tells_tokenizer: bool) -> bytes:
    """Made when somebody asks, for that takes a while."""
    return msgspec.json.encode(document(root_path, tells_tokenizer))


@cache
def _page(root_path: str, tells_tokenizer: bool) -> str:
    return page(document(root_path, tells_tokenizer))


def _json(content: object) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")
