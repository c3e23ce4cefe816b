"""Three ways to score how well a document answers a query, by what the served model is.

    YesOrNo        a language model that answers yes or no (baton/text/reranking.py)
    CrossEncoder   an encoder that reads both in one prompt and has one class
    Cosine         an encoder of vectors: the cosine of the query's vector and the document's

A judge says which prompts are computed, and makes scores of what the nodes answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from operator import mul
from typing import Final, Protocol

from baton.protocol.errors import UnsupportedFeature
from baton.text.reranking import answer_tokens
from baton.text.sentence_files import DOCUMENT_PROMPT, QUERY_PROMPT, SentenceFiles
from router.api.pooling.embeddings import PoolingParts, numbers_of
from router.prompts.reader import Length, TextInputs
from router.request.pool import PoolAsk
from router.tenants.keys import Grant

Pairs = Sequence[tuple[str, str]]
_TURN: Final = 64  # scores computed before the event loop gets its turn


@dataclass(frozen=True, slots=True)
class PairsAsked:
    """What a call's pairs are and who asks: `field`: the name of the documents in errors.
    `instruction`: of the client, for a model that takes one."""

    pairs: Pairs
    field: str
    length: Length
    grant: Grant
    instruction: str | None = None

    def name(self, index: int) -> str:
        """Return the name of a document in errors."""
        return f"{self.field}[{index}]"


@dataclass(frozen=True, slots=True)
class Order:
    """What nodes are to compute, and the name of each prompt in errors."""

    ask: PoolAsk
    names: Sequence[str]


class Judge(Protocol):
    """See the module's text."""

    async def order(self, asked: PairsAsked) -> Order:
        """Return the prompts to compute. Raises BatonError."""
        ...

    async def scores(self, asked: PairsAsked, vectors: Sequence[bytes]) -> list[float]:
        """Return a score per pair. `vectors`: the nodes' answers to the order's prompts."""
        ...


def judge_of(parts: PoolingParts, name: str) -> Judge:
    """Return the judge of the served model. Raises UnsupportedFeature, naming the model, if it
    cannot score."""
    encoder = parts.settings.encoder
    if encoder is None:
        parts.settings.check_reranker(name)
        return YesOrNo(parts)
    parts.settings.check_scores(name)
    return CrossEncoder(parts, encoder) if encoder.labels else Cosine(parts, encoder)


@dataclass(frozen=True, slots=True)
class YesOrNo:
    parts: PoolingParts

    async def order(self, asked: PairsAsked) -> Order:
        """See Judge.order."""
        answers, prompts = answer_tokens(self.parts.served.model.tokenizer), self.parts.prompts
        _check_chars(self.parts, asked)
        read = await prompts.rerank(asked.pairs, asked.instruction, asked.grant)
        ask = PoolAsk(prompts=read, kind="yes_no", answers=answers)
        return Order(ask, [asked.name(index) for index in range(len(read))])

    async def scores(self, asked: PairsAsked, vectors: Sequence[bytes]) -> list[float]:
        """See Judge.scores."""
        return [numbers_of(vector)[0] for vector in vectors]


@dataclass(frozen=True, slots=True)
class CrossEncoder:
    parts: PoolingParts
    encoder: SentenceFiles

    async def order(self, asked: PairsAsked) -> Order:
        """See Judge.order."""
        _refuse_instruction(asked)
        _check_chars(self.parts, asked)
        read = await self.parts.prompts.pairs(asked.pairs, asked.grant)
        seconds = [second for _, second in read] if self.encoder.tells_texts else ()
        ask = PoolAsk(prompts=[ids for ids, _ in read], kind="classify", second_from=seconds)
        return Order(ask, [asked.name(index) for index in range(len(read))])

    async def scores(self, asked: PairsAsked, vectors: Sequence[bytes]) -> list[float]:
        """See Judge.scores."""
        return [self.encoder.activated(numbers_of(vector))[0] for vector in vectors]


@dataclass(frozen=True, slots=True)
class Cosine:
    parts: PoolingParts
    encoder: SentenceFiles

    async def order(self, asked: PairsAsked) -> Order:
        """See Judge.order. A query that several pairs have is computed once."""
        _refuse_instruction(asked)
        before, behind = (self.encoder.prompt(name) for name in (QUERY_PROMPT, DOCUMENT_PROMPT))
        queries = [before + query for query in _queries(asked)]
        documents = [behind + document for _, document in asked.pairs]
        texts = TextInputs([*queries, *documents], asked.field, asked.length, asked.grant)
        ask = PoolAsk(prompts=await self.parts.prompts.read(texts), kind=self.parts.settings.kind)
        names = ["query"] * len(queries) + [asked.name(it) for it in range(len(documents))]
        return Order(ask, names)

    async def scores(self, asked: PairsAsked, vectors: Sequence[bytes]) -> list[float]:
        """See Judge.scores."""
        places = {query: place for place, query in enumerate(_queries(asked))}
        queries = [numbers_of(vector) for vector in vectors[: len(places)]]
        found: list[float] = []
        for index, (query, _) in enumerate(asked.pairs):
            if index % _TURN == _TURN - 1:
                await asyncio.sleep(0)
            document = numbers_of(vectors[len(places) + index])
            found.append(sum(map(mul, queries[places[query]], document)))
        return found


def _queries(asked: PairsAsked) -> list[str]:
    """Return the queries, each once, in the order in which they come."""
    return list(dict.fromkeys(query for query, _ in asked.pairs))


def _check_chars(parts: PoolingParts, asked: PairsAsked) -> None:
    """Raise ContextLengthExceeded for a pair that is certainly too long, before it is read."""
    for index, pair in enumerate(asked.pairs):
        parts.prompts.fitting("".join(pair), asked.length, asked.name(index))


def _refuse_instruction(asked: PairsAsked) -> None:
    if asked.instruction is not None:
        message = "instruction: an encoder takes none"
        raise UnsupportedFeature(message, field="instruction")
