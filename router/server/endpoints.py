"""The routes that do not generate text in OpenAI's API: embeddings, classes, reranking, batches,
token-id generation, load, and the API's own documentation."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final, cast

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import Message

from baton.protocol.errors import InvalidRequest
from baton.text.tokenizer import read_json
from router.api.generate_ids import GenerateApi
from router.api.http.reading import read_body
from router.api.http_api import HttpApi
from router.api.openai.bodies import object_of
from router.api.openapi.document import document
from router.api.openapi.page import HEADERS, page
from router.api.pooling.classify import ClassifyApi
from router.api.pooling.cohere import CohereApi
from router.api.pooling.embeddings import EmbeddingsApi, PoolingApis
from router.api.pooling.rerank import SIDES, RerankApi
from router.api.served import served_model
from router.batches.api import BatchesApi
from router.models import PromptReaders, ServedModel
from router.request.pool import PoolDispatcher
from router.services import RouterServices

Handler = Callable[[HttpRequest], Awaitable[Any]]
# (fields, endpoint): a body with all of these fields is for this endpoint. The first match counts.
_BEHIND_ONE_DOOR: Final[Sequence[tuple[Sequence[str], str]]] = (
    (("messages",), "/v1/chat/completions"),
    (("prompt",), "/v1/completions"),
    (("input",), "/v1/embeddings"),
    (("query", "documents"), "/v1/rerank"),
    *((pair, "/v1/score") for pair in SIDES),
)
# Fields of tokenizer_config.json that hold paths on this machine.
_PLACES: Final = ("vocab_file", "merges_file", "tokenizer_file", "name_or_path")


class Endpoints:
    """The routes that router/server/app.py adds to those of HttpApi."""

    def __init__(self, services: RouterServices, prompts: PromptReaders, http: HttpApi) -> None:
        config = services.config
        self._services = services
        self.pools = services.pools or PoolDispatcher(
            services.registry, services.clock, config.max_live_requests
        )
        parts = PoolingApis(services, prompts, self.pools)
        self._embeddings = EmbeddingsApi(parts)
        self._cohere = CohereApi(parts)
        self._classify = ClassifyApi(parts)
        self._rerank = RerankApi(parts)
        self._generate = GenerateApi(services, http)
        self._http = http
        self._pooling = parts
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
        get: list[tuple[str, Handler]] = [
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
        one_door = Invocations(known, self._pooling)
        runner, origins = self._services.batches, self._services.config.allowed_origins
        batches = [] if runner is None else BatchesApi(runner.store, runner, origins).routes()
        return [
            *batches,
            *(Route(path, handler, methods=["POST"]) for path, handler in post),
            Route("/invocations", one_door.invoke, methods=["POST"]),
            *(Route(path, handler, methods=["GET"]) for path, handler in get),
        ]

    async def tokenizer_info(self, request: HttpRequest) -> Response:
        """Of several models, the query's `model` names the one that is meant."""
        asked = request.query_params.get("model")
        only = self._services.models.only
        model = only if asked is None else served_model(self._services, asked).model
        return _json(tokenizer_info(model or served_model(self._services, None).model))

    async def load(self, _: HttpRequest) -> Response:
        """vLLM's /load: the number of requests of all kinds that this router works on."""
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
        """Redirect a browser to the API's documentation."""
        return RedirectResponse("docs")  # relative: it also works below a prefix


class Invocations:
    """SageMaker's only route, /invocations. The fields of a body say which endpoint it is for: with
    `input` it is /classify if its model is a classifier, else /v1/embeddings.

    `handlers`: path -> handler."""

    def __init__(self, handlers: Mapping[str, Handler], pooling: PoolingApis) -> None:
        self._handlers = handlers
        self._pooling = pooling

    async def invoke(self, request: HttpRequest) -> Any:
        """Return the reply of the endpoint that the body is for.

        Raises InvalidRequest if the body is for no endpoint."""
        raw = await read_body(request)
        given = object_of(raw)
        meant = (
            path
            for names, path in _BEHIND_ONE_DOOR
            if all(given.get(name) is not None for name in names)
        )
        path = next(meant, None)
        if path is None:
            wanted = ", ".join(" and ".join(names) for names, _ in _BEHIND_ONE_DOOR)
            raise InvalidRequest(f"the body has none of: {wanted}")
        if path == "/v1/embeddings" and self._pooling.classifies(given.get("model")):
            path = "/classify"
        bodies: list[Message] = [{"type": "http.request", "body": raw, "more_body": False}]

        async def receive() -> Message:
            return bodies.pop() if bodies else await request.receive()

        return await self._handlers[path](HttpRequest(request.scope, receive))


def tokenizer_info(model: ServedModel) -> dict[str, Any]:
    """Return vLLM's /tokenizer_info: tokenizer_config.json without paths, each token as its text,
    and the chat template in use."""
    told = read_json(Path(model.config.model) / "tokenizer_config.json")
    info = {name: _plain(value) for name, value in told.items() if name not in _PLACES}
    info.setdefault("tokenizer_class", "PreTrainedTokenizerFast")
    if model.chat_template is not None:
        info["chat_template"] = model.chat_template.source
    return info


def _plain(value: Any) -> Any:
    """Return `value` with every token object (a dict with `content`) replaced by its text."""
    if isinstance(value, list):
        return [_plain(item) for item in cast("list[Any]", value)]
    if not isinstance(value, dict):
        return value
    fields = cast("dict[str, Any]", value)
    if isinstance(fields.get("content"), str):
        return fields["content"]
    return {name: _plain(item) for name, item in fields.items()}


@cache
def _document(root_path: str, tells_tokenizer: bool) -> bytes:
    """Return /openapi.json. Building it takes a while, so that happens at the first request."""
    return msgspec.json.encode(document(root_path, tells_tokenizer))


@cache
def _page(root_path: str, tells_tokenizer: bool) -> str:
    return page(document(root_path, tells_tokenizer))


def _json(content: object) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")
