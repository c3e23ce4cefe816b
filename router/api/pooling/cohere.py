"""/v2/embed: the vectors of /v1/embeddings in Cohere's protocol, with its number formats.

`input_type` names one of the model's own prompts in config_sentence_transformers.json. The server
writes that prompt before each text. If a model has no such prompts, `input_type` has no effect.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from baton.protocol.errors import InvalidRequest, UnsupportedFeature
from router.api.dialect import in_own_names
from router.api.openai.fields import AtLeastOne, Dimensions, NotEmpty
from router.api.pooling.config import PoolingSettings
from router.api.pooling.embeddings import (
    MAX_INPUT_TOKENS,
    MAX_INPUTS,
    InputBody,
    PoolingApis,
    PoolingBody,
    base64_of,
    numbers_of,
    read_pooling,
)
from router.api.unserved import COHERE

Kind = Literal["float", "base64", "binary", "ubinary"]
# Name of a field in all pooling endpoints -> Cohere's name.
NAMES: Final = {"truncate_prompt_tokens": "max_tokens", "dimensions": "output_dimension"}
# Cohere's input types -> sentence-transformers' names of the prompts.
INPUT_TYPES: Final = {
    "search_query": "query",
    "search_document": "document",
    "classification": "classification",
    "clustering": "clustering",
}


_COUNT: Final = Meta(min_length=1, max_length=MAX_INPUTS)


class EmbedInput(msgspec.Struct, kw_only=True):
    """One input of several parts, which are joined to one text."""

    content: Annotated[list[dict[str, Any]], Meta(extra_json_schema={"minItems": 1})]


class EmbedBody(PoolingBody, kw_only=True):
    """The body of /v2/embed, with either `texts` or `inputs`. `truncate`: which end of an input
    that is too long is cut off; NONE: such an input is refused."""

    texts: Annotated[list[NotEmpty], _COUNT] | None = None
    inputs: Annotated[list[EmbedInput], _COUNT] | None = None
    input_type: str | None = None
    embedding_types: list[Kind] | None = None
    output_dimension: Dimensions | None = None
    truncate: Literal["NONE", "START", "END"] | None = None
    max_tokens: AtLeastOne | None = None


class BilledUnits(msgspec.Struct):
    input_tokens: int


class ApiVersion(msgspec.Struct):
    version: str = "2"


class EmbedMeta(msgspec.Struct):
    billed_units: BilledUnits
    api_version: ApiVersion


class EmbedReply(msgspec.Struct):
    """The answer of /v2/embed. `embeddings`: number format -> vectors, in the inputs' order."""

    id: str
    embeddings: dict[str, list[Any]]
    meta: EmbedMeta
    texts: list[str] | msgspec.UnsetType = msgspec.UNSET
    response_type: Literal["embeddings_by_type"] = "embeddings_by_type"


class CohereApi:
    """The endpoint /v2/embed. It keeps no state."""

    def __init__(self, models: PoolingApis) -> None:
        self._models = models

    async def embed(self, request: HttpRequest) -> Response:
        body = await read_pooling(request, EmbedBody, COHERE)
        parts = self._models.of(body.model)
        asked = _inputs_of(body, _prompt_of(body.input_type, parts.settings))
        given = "inputs" if body.texts is None else "texts"
        with in_own_names({**NAMES, "input": given}):
            wanted = parts.embedding_of(asked, body.output_dimension)
            told = await parts.of_inputs(request, asked, "embd-", wanted)
        if body.truncate == "NONE" and max(told.lengths) > (body.max_tokens or MAX_INPUT_TOKENS):
            message = f"{given}: {max(told.lengths)} tokens are more than max_tokens"
            raise InvalidRequest(message, field="max_tokens")
        kinds = dict.fromkeys(body.embedding_types or ("float",))
        reply = EmbedReply(
            told.id,
            {kind: [SPELLED[kind](vector) for vector in told.vectors] for kind in kinds},
            EmbedMeta(BilledUnits(told.usage.total_tokens), ApiVersion()),
            msgspec.UNSET if body.texts is None else body.texts,
        )
        return Response(msgspec.json.encode(reply), media_type="application/json")


def _prompt_of(given: str | None, settings: PoolingSettings) -> str:
    """Return the model's prompt for an input type, "" for none.

    Raises InvalidRequest for an unknown type."""
    tasks, encoder = settings.tasks, settings.encoder
    if given is None:
        return "" if encoder is None else encoder.prompt(None)
    known = [name for name in (given, INPUT_TYPES.get(given, given)) if name in tasks]
    if known:
        return tasks[known[0]] if encoder is None else encoder.prompt(known[0])
    if not tasks and given in INPUT_TYPES:
        return ""
    there = ", ".join(sorted(tasks) or INPUT_TYPES)
    raise InvalidRequest(f"input_type must be one of {there}", field="input_type")


def _inputs_of(body: EmbedBody, prefix: str) -> InputBody:
    """Translate the body into one of /v1/embeddings. `prefix`: written before each text.

    Raises InvalidRequest, naming the field."""
    if (body.texts is None) == (body.inputs is None):
        raise InvalidRequest("give either texts or inputs", field="texts")
    texts = body.texts
    if texts is None:
        texts = [_text_of(it, f"inputs[{i}]") for i, it in enumerate(body.inputs or ())]
    cut: dict[str, Any] = {}
    if body.truncate != "NONE":
        side = "left" if body.truncate == "START" else "right"
        cut = {"truncate_prompt_tokens": body.max_tokens or -1, "truncation_side": side}
    return InputBody(
        model=body.model, priority=body.priority, input=[prefix + text for text in texts], **cut
    )


def _text_of(given: EmbedInput, field: str) -> str:
    texts: list[str] = []
    for index, part in enumerate(given.content):
        text = part.get("text")
        if part.get("type") != "text" or not isinstance(text, str):
            where = f"{field}.content[{index}]"
            raise UnsupportedFeature(f"{where}: only text parts are supported", field=where)
        texts.append(text)
    return "\n".join(texts)


def _bits(vector: bytes, lowest: int) -> list[int]:
    """Return the signs of a vector as bits, eight in a number, the first sign in the highest bit.
    `lowest`: the number that stands for eight zero bits."""
    numbers = numbers_of(vector)
    if len(numbers) % 8:
        message = "embedding_types: bits need a number of dimensions that eight divides"
        raise InvalidRequest(message, field="embedding_types")
    return [lowest + _byte(numbers[at : at + 8]) for at in range(0, len(numbers), 8)]


def _byte(numbers: Sequence[float]) -> int:
    return sum(1 << 7 - place for place, number in enumerate(numbers) if number >= 0)


SPELLED: Final[dict[Kind, Callable[[bytes], Any]]] = {
    "float": numbers_of,
    "base64": base64_of,
    "binary": lambda vector: _bits(vector, -128),
    "ubinary": lambda vector: _bits(vector, 0),
}
