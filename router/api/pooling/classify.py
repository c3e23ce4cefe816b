"""vLLM's /classify, for classifiers and rerankers, and vLLM's /pooling, for any model.

Nodes return a classifier's logits. As in transformers, `problem_type` of config.json says what is
made of them: probabilities of which one class is right, a probability of each class by itself, or
the logits themselves (regression). A reranker's one class is the probability of its yes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final, Literal

import msgspec
import orjson
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from baton.protocol.errors import UnsupportedFeature
from baton.text.reranking import answer_tokens
from baton.text.sentence_files import class_numbers
from router.api.pooling.config import PoolingSettings
from router.api.pooling.embeddings import (
    EmbeddingBody,
    InputBody,
    PooledInputs,
    PoolingApis,
    PoolingParts,
    PoolingUsage,
    bytes_of,
    encoded,
    numbers_of,
    read_pooling,
)
from router.api.unserved import POOLING
from router.request.pool import PoolAsk

Task = Literal["embed", "classify", "encode", "score", "token_embed", "token_classify", "plugin"]
REFUSED: Final = ("score", "token_embed", "token_classify", "plugin")


class ClassifyBody(InputBody, kw_only=True):
    """The body of /classify. If `use_activation` is false, the answer has the logits themselves."""


class PoolBody(EmbeddingBody, kw_only=True):
    """The body of /pooling. The default `task` is `classify` for a classifier, else `embed`."""

    task: Task | None = None


class Classified(msgspec.Struct):
    index: int
    label: str | None
    probs: list[float]
    num_classes: int


class ClassifyReply(msgspec.Struct):
    id: str
    created: int
    model: str
    data: list[Classified]
    usage: PoolingUsage
    object: Literal["list"] = "list"


class PooledInput(msgspec.Struct):
    index: int
    data: list[float] | str
    object: Literal["pooling"] = "pooling"


class PoolReply(msgspec.Struct):
    id: str
    created: int
    model: str
    data: list[PooledInput]
    usage: PoolingUsage
    object: Literal["list"] = "list"


class ClassifyApi:
    """The endpoints /classify and /pooling. They keep no state."""

    def __init__(self, models: PoolingApis) -> None:
        self._models = models

    async def classify(self, request: HttpRequest) -> Response:
        body = await read_pooling(request, ClassifyBody, POOLING)
        parts = self._models.of(body.model)
        told = await self._classes(request, body, "classify-", parts)
        data = [
            Classified(index, label, probs, len(probs))
            for index, (label, probs) in enumerate(_named(told, body, parts.settings))
        ]
        reply = ClassifyReply(told.id, int(time.time()), told.model, data, told.usage)
        return Response(msgspec.json.encode(reply), media_type="application/json")

    async def pooling(self, request: HttpRequest) -> Response:
        body = await read_pooling(request, PoolBody, POOLING)
        parts = self._models.of(body.model)
        task = body.task or ("classify" if parts.settings.labels else "embed")
        if task in REFUSED:
            message = f"task: {task} is not supported by this server, embed and classify are"
            raise UnsupportedFeature(message, field="task")
        if task == "classify":
            told = await self._classes(request, body, "pool-", parts)
            vectors = [bytes_of(probs) for _, probs in _named(told, body, parts.settings)]
        else:
            wanted = parts.embedding_of(body, body.dimensions)
            body.input = parts.settings.prompted(body.input, body.prompt_name)
            told = await parts.of_inputs(request, body, "pool-", wanted)
            vectors = told.vectors
        content = msgspec.to_builtins(
            PoolReply(told.id, int(time.time()), told.model, [], told.usage)
        )
        as_base64 = body.encoding_format == "base64"
        content["data"] = await encoded(vectors, as_base64, "pooling", "data")
        return Response(orjson.dumps(content), media_type="application/json")

    async def _classes(
        self, request: HttpRequest, body: InputBody, prefix: str, parts: PoolingParts
    ) -> PooledInputs:
        """Compute the logits of each input's classes; with a reranker, the probability of a yes.

        Raises BatonError."""
        settings = parts.settings
        if settings.labels:
            wanted = PoolAsk(kind="classify")
        elif settings.reranker:
            wanted = PoolAsk(kind="yes_no", answers=answer_tokens(parts.served.model.tokenizer))
        else:
            message = "the served model is no classifier (ForSequenceClassification), no reranker"
            raise UnsupportedFeature(message, field="model")
        return await parts.of_inputs(request, body, prefix, wanted)


def _named(
    told: PooledInputs, body: InputBody, settings: PoolingSettings
) -> list[tuple[str | None, list[float]]]:
    """Return, for each input, its most probable label (None if unknown) and the numbers of all
    classes."""
    labels = settings.labels or ("LABEL_0",)
    found: list[tuple[str | None, list[float]]] = []
    for vector in told.vectors:
        numbers = numbers_of(vector)
        if settings.labels and body.use_activation is not False:
            numbers = activated(numbers, settings)
        best = max(range(len(numbers)), key=numbers.__getitem__)
        found.append((labels[best] if best < len(labels) else None, numbers))
    return found


def activated(logits: Sequence[float], settings: PoolingSettings) -> list[float]:
    """Return what a classifier's logits stand for."""
    if settings.encoder is not None:
        return settings.encoder.activated(logits)
    return class_numbers(logits, settings.problem)
