"""The routes beside OpenAI's generation: pooling, tokens in and out, load, the description."""

from __future__ import annotations

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from router.generate_ids import GenerateApi
from router.http_api import HttpApi
from router.openapi.document import document
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
        self._document = msgspec.json.encode(document(config.root_path))

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
        get = (("/load", self.load), ("/openapi.json", self.openapi))
        return [Route(path, handler, methods=["POST"]) for path, handler in post] + [
            Route(path, handler, methods=["GET"]) for path, handler in get
        ]

    async def load(self, _: HttpRequest) -> Response:
        """vLLM's: requests under way here, of all kinds."""
        load = self._services.metrics.live + self.pools.num_live
        return _json({"server_load": load})

    async def openapi(self, _: HttpRequest) -> Response:
        return Response(self._document, media_type="application/json")


def _json(content: object) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")
