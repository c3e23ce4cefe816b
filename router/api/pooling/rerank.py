"""/v1/rerank and /v1/score: how well documents answer a query.

/v1/rerank has the format of Cohere and Jina, /v1/score that of vLLM. What the served model is says
how a score comes about (judges.py); a model that cannot score is refused.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from baton.protocol.errors import InvalidRequest, UnsupportedFeature
from router.api.pooling.embeddings import (
    MAX_INPUT_TOKENS,
    MAX_INPUTS,
    PoolingApis,
    PoolingBody,
    PoolingUsage,
    checked_length,
    pool_id,
    read_pooling,
)
from router.api.pooling.judges import PairsAsked, judge_of
from router.api.unserved import RERANKING
from router.prompts.reader import Length
from router.request.request_ids import reply_id
from router.request.terms import terms_of

Instruction = Annotated[str, Meta(max_length=4096)]
# vLLM's names of the fields with the two sides of a score; the first pair in a body counts.
SIDES: Final = (
    ("queries", "documents"),
    ("queries", "items"),
    ("data_1", "data_2"),
    ("text_1", "text_2"),
)

_TEXTS: Final = {name for pair in SIDES for name in pair}
_COUNT: Final = Meta(min_length=1, max_length=MAX_INPUTS)


class RerankBody(PoolingBody, kw_only=True):
    """The body of /v1/rerank. `documents` are texts or objects with a `text`. `top_n`: how many
    results to return; 0 = all."""

    query: str
    documents: Annotated[list[str | dict[str, Any]], _COUNT]
    top_n: Annotated[int, Meta(ge=0)] | None = None
    return_documents: bool | None = None
    instruction: Instruction | None = None


class ScoreBody(PoolingBody, kw_only=True):
    """The body of /v1/score: one text or several on either side. The two sides have one of these
    pairs of names: queries and documents, queries and items, data_1 and data_2, text_1 and text_2.
    """

    text_1: str | list[str] | None = None
    text_2: str | list[str] | None = None
    data_1: str | list[str] | None = None
    data_2: str | list[str] | None = None
    queries: str | list[str] | None = None
    documents: str | list[str] | None = None
    items: str | list[str] | None = None
    instruction: Instruction | None = None


class RerankDocument(msgspec.Struct):
    text: str


class RerankResult(msgspec.Struct):
    index: int
    relevance_score: float
    document: RerankDocument | msgspec.UnsetType = msgspec.UNSET


class RerankReply(msgspec.Struct):
    """The answer of /v1/rerank. `results`: the best document first."""

    id: str
    model: str
    usage: PoolingUsage
    results: list[RerankResult]


class Score(msgspec.Struct):
    index: int
    score: float
    object: Literal["score"] = "score"


class ScoreReply(msgspec.Struct):
    id: str
    created: int
    model: str
    data: list[Score]
    usage: PoolingUsage
    object: Literal["list"] = "list"


@dataclass(frozen=True, slots=True)
class _Scored:
    """The scores of a call, with the id, model and usage of its reply."""

    id: str
    model: str
    scores: list[float]
    usage: PoolingUsage


class RerankApi:
    """The endpoints /v1/rerank and /v1/score. They keep no state."""

    def __init__(self, models: PoolingApis) -> None:
        self._models = models

    async def rerank(self, request: HttpRequest) -> Response:
        body = await read_pooling(request, RerankBody, RERANKING)
        texts = [_text_of(it, f"documents[{i}]") for i, it in enumerate(body.documents)]
        pairs = [(body.query, text) for text in texts]
        scored = await self._scored(request, body, pairs, "documents")
        order = sorted(range(len(texts)), key=lambda index: -scored.scores[index])  # stable
        shown = body.return_documents is not False
        results = [
            RerankResult(
                index,
                scored.scores[index],
                RerankDocument(texts[index]) if shown else msgspec.UNSET,
            )
            for index in order[: body.top_n or None]
        ]
        return _json(RerankReply(scored.id, scored.model, scored.usage, results))

    async def score(self, request: HttpRequest) -> Response:
        body = await read_pooling(request, ScoreBody, RERANKING)
        pairs, field = pairs_of(body)
        scored = await self._scored(request, body, pairs, field)
        data = [Score(index, score) for index, score in enumerate(scored.scores)]
        return _json(ScoreReply(scored.id, int(time.time()), scored.model, data, scored.usage))

    async def _scored(
        self,
        request: HttpRequest,
        body: RerankBody | ScoreBody,
        pairs: Sequence[tuple[str, str]],
        field: str,
    ) -> _Scored:
        """Compute the score of each (query, document). `field`: the name of the documents in
        errors. Raises BatonError."""
        parts = self._models.of(body.model)
        served, model, name = parts.served, parts.served.info, parts.served.shown
        judge = judge_of(parts, name)
        if not 0 < len(pairs) <= MAX_INPUTS:
            raise InvalidRequest(f"{field}: 1 to {MAX_INPUTS} documents", field=field)
        grant, length = terms_of(request).grant, Length(model.max_model_len)
        asked = PairsAsked(pairs, field, length, grant, body.instruction)
        order = await judge.order(asked)
        for prompt, named in zip(order.ask.prompts, order.names, strict=True):
            checked_length(prompt, model.max_model_len, named)
        tokens = order.ask.tokens
        if tokens > MAX_INPUT_TOKENS:
            message = f"{field}: at most {MAX_INPUT_TOKENS} tokens in one call"
            raise InvalidRequest(message, field=field)
        id_ = reply_id("score-" if isinstance(body, ScoreBody) else "rerank-", request)
        ask = replace(
            order.ask,
            id=pool_id(id_),
            deadline=parts.deadline(),
            adapter=served.adapter,
            model=served.model.key,
            field=field,
            priority=body.priority,
        )
        vectors = await parts.run(request, ask)
        scores = await judge.scores(asked, vectors)
        return _Scored(id_, name, scores, PoolingUsage(tokens, tokens))


def pairs_of(body: ScoreBody) -> tuple[list[tuple[str, str]], str]:
    """Return the (query, document) pairs of a body, and the name of the field with the documents.

    One query is paired with every document; several queries need as many documents, one for each.
    Raises InvalidRequest.
    """
    given: dict[str, list[str]] = {
        name: [value] if isinstance(value, str) else value
        for name, value in msgspec.structs.asdict(body).items()
        if value is not None and name in _TEXTS
    }
    for first, second in SIDES:
        if first in given and second in given:
            break
    else:
        raise InvalidRequest("text_1 and text_2 are both needed", field="text_1")
    queries, documents = given[first], given[second]
    if len(queries) == 1:
        queries = queries * len(documents)
    if not queries or len(queries) != len(documents):
        message = f"{first}: one text, or as many as there are in {second}"
        raise InvalidRequest(message, field=first)
    return list(zip(queries, documents, strict=True)), second


def _text_of(document: str | dict[str, Any], field: str) -> str:
    text = document if isinstance(document, str) else document.get("text")
    if not isinstance(text, str):
        raise UnsupportedFeature(f"{field}: only documents of text are supported", field=field)
    return text


def _json(content: object) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")
