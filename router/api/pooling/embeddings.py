"""/v1/embeddings: vectors made of the served model's hidden states, in OpenAI's protocol. Also
what all pooling endpoints share.

The model's files or --pooling-type say which hidden states are used: the last token's, or the mean
of all. Vectors have length 1 unless the client asks for raw ones. router/request/pool.py sends the
work to nodes.
"""

from __future__ import annotations

import asyncio
import base64
import secrets
import struct
import sys
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, TypeVar, cast

import msgspec
import orjson
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from baton.protocol.errors import ContextLengthExceeded, InvalidRequest
from router.api.http.connection import while_connected
from router.api.http.preparing import end_preparing
from router.api.http.reading import read_body
from router.api.openai.bodies import object_of, struct_of, token_ids_below
from router.api.openai.fields import Dimensions, Priority, RequestId, Truncation
from router.api.openai.prompt_options import truncated, useful_length
from router.api.pooling.config import PoolingSettings
from router.api.served import ServedCall, served_model
from router.api.unserved import POOLING, Unserved, refuse
from router.models import PromptReaders
from router.nodes.slo import ANY
from router.prompts.reader import PromptReader, TextInputs
from router.request.failures import as_baton_error
from router.request.pool import PoolAsk, Pools
from router.request.request_ids import note_body_id, reply_id
from router.request.terms import terms_of
from router.request.trace import TRACES_KEY, RequestTrace
from router.services import RouterServices
from router.tenants.keys import Grant

MAX_INPUTS: Final = 2048
MAX_INPUT_TOKENS: Final = 1 << 20  # of all inputs of one call
_TURN: Final = 16  # vectors encoded before the event loop gets its turn


class PoolingBody(msgspec.Struct, kw_only=True):
    """The fields of the bodies of all pooling endpoints."""

    model: str | None = None
    user: str | None = None
    request_id: RequestId | None = None
    priority: Priority | None = None


B = TypeVar("B", bound=PoolingBody)


class InputBody(PoolingBody, kw_only=True):
    """The fields of bodies with inputs. `input` is text, texts, token ids or lists of token ids."""

    input: Any = None
    add_special_tokens: bool | None = None
    use_activation: bool | None = None
    truncate_prompt_tokens: Truncation | None = None
    truncation_side: Literal["left", "right"] | None = None


class EmbeddingBody(InputBody, kw_only=True):
    """The body of /v1/embeddings. `normalize` is the older name of `use_activation`.
    `prompt_name`: which of an encoder's prompts is written before each text."""

    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Dimensions | None = None
    normalize: bool | None = None
    prompt_name: str | None = None


class PoolingUsage(msgspec.Struct):
    prompt_tokens: int
    total_tokens: int


class Embedding(msgspec.Struct):
    """The vector of one input: numbers, or base64 of float32 numbers, little-endian."""

    index: int
    embedding: list[float] | str
    object: Literal["embedding"] = "embedding"


class EmbeddingReply(msgspec.Struct):
    id: str
    created: int
    model: str
    data: list[Embedding]
    usage: PoolingUsage
    object: Literal["list"] = "list"


class PoolingApis:
    """What all pooling endpoints use: for each request `of` finds the parts of its model."""

    def __init__(self, services: RouterServices, prompts: PromptReaders, pools: Pools) -> None:
        self._services, self._prompts, self._pools = services, prompts, pools
        self._settings = {it.key: PoolingSettings.of(it.config) for it in services.models.all}

    def of(self, asked: str | None) -> PoolingParts:
        """Return the parts of the model that a body names. Raises the errors of served_model."""
        served = served_model(self._services, asked)
        key = served.model.key
        prompts, settings = self._prompts.of[key], self._settings[key]
        return PoolingParts(self._services, prompts, self._pools, settings, served)

    def classifies(self, asked: object) -> bool:
        """Whether the model that a body names is a classifier; False if there is no such model."""
        for model in self._services.models.all:
            mine = model.names(self._services.registry.model(model.key))
            if asked in mine or self._services.models.only is not None:
                return bool(self._settings[model.key].labels)
        return False


@dataclass(frozen=True, slots=True)
class PoolingParts:
    """The parts that serve one pooling request."""

    services: RouterServices
    prompts: PromptReader
    pools: Pools
    settings: PoolingSettings
    served: ServedCall

    async def run(self, request: HttpRequest, ask: PoolAsk) -> list[bytes]:
        """Compute the vectors of a call; end the work if the client leaves.

        The tokens count for the model in the metrics. The call passes the gate like any request of
        its key (router/request/gate/gate.py). Raises BatonError."""
        end_preparing(request.scope)
        trace = RequestTrace(model=ask.model, pooled=ask.field)
        request.scope[TRACES_KEY] = [trace]
        # Service levels are about generated tokens, and no tokens are generated here.
        terms = msgspec.structs.replace(terms_of(request), slo=ANY)
        if ask.priority is not None:
            terms = msgspec.structs.replace(terms, priority=ask.priority)
        outcome, tokens = "ok", ask.tokens
        try:
            trace.terms = terms
            return await while_connected(request.receive, self._vectors(ask, trace))
        except BaseException as error:
            outcome, tokens = as_baton_error(error).code, 0
            raise
        finally:
            self.services.metrics.pooled(self.served.name, tokens, outcome, trace.retries)

    async def _vectors(self, ask: PoolAsk, trace: RequestTrace) -> list[bytes]:
        terms, arrival = trace.terms, trace.terms.arrival
        if arrival is None:
            arrival = self.services.clock.monotonic()
        call = terms.applied(replace(ask.counted(), arrival=arrival))
        ask = replace(
            ask,
            deadline=ask.deadline if call.deadline is None else call.deadline,
            priority=call.priority,
            traceparent=terms.traceparent,
            grant=terms.grant,
        )
        return await self.pools.vectors(ask, trace, self.services.dispatcher.passage(call, trace))

    def deadline(self) -> float:
        return self.services.clock.monotonic() + self.services.config.request_timeout_s

    async def of_inputs(
        self, request: HttpRequest, body: InputBody, prefix: str, wanted: PoolAsk
    ) -> PooledInputs:
        """Compute the vector `wanted` of each input of a body. `prefix`: of the reply's id.

        Raises BatonError."""
        served = self.served
        model, grant = served.info, terms_of(request).grant
        prompts = await self._prompts(body, model.max_model_len, model.vocab_size, grant)
        id_ = reply_id(prefix, request)
        ask = replace(
            wanted,
            id=pool_id(id_),
            prompts=prompts,
            deadline=self.deadline(),
            adapter=served.adapter,
            model=served.model.key,
            priority=body.priority,
        )
        vectors = await self.run(request, ask)
        return PooledInputs(id_, served.shown, vectors, tuple(map(len, prompts)))

    def embedding_of(self, body: InputBody, dimensions: int | None) -> PoolAsk:
        """Return the order for an embedding, still without inputs.

        Raises InvalidRequest or UnsupportedFeature for `dimensions`."""
        asked = body.use_activation
        return PoolAsk(
            kind=self.settings.kind,
            normalize=self.settings.normalizes if asked is None else asked,
            dimensions=self.settings.check_dimensions(dimensions),
        )

    async def _prompts(
        self, body: InputBody, max_model_len: int, vocab_size: int, grant: Grant
    ) -> list[tuple[int, ...]]:
        """Return the token ids of each input. Raises InvalidRequest, ContextLengthExceeded."""
        found: list[tuple[int, ...]] = []
        count, side = body.truncate_prompt_tokens, body.truncation_side or "right"
        special = body.add_special_tokens is not False
        length = useful_length(count, max_model_len, side)
        asked = TextInputs(inputs_of(body.input), "input", length, grant, special)
        read = zip(await self.prompts.read(asked), asked.items, asked.fields, strict=True)
        for all_ids, item, field in read:
            if not isinstance(item, str):
                token_ids_below(item, vocab_size, field)
            framed = special and isinstance(item, str)
            frame = self.served.model.tokenizer.frame if framed else None
            ids = truncated(all_ids, count, max_model_len, side, frame)
            found.append(checked_length(ids, max_model_len, field))
        if sum(map(len, found)) > MAX_INPUT_TOKENS:
            message = f"input: at most {MAX_INPUT_TOKENS} tokens in one call"
            raise InvalidRequest(message, field="input")
        return found


@dataclass(frozen=True, slots=True)
class PooledInputs:
    """The vectors of a call's inputs, with the id and model of its reply. `lengths`: the number of
    tokens of each input."""

    id: str
    model: str
    vectors: list[bytes]
    lengths: tuple[int, ...]

    @property
    def usage(self) -> PoolingUsage:
        return PoolingUsage(sum(self.lengths), sum(self.lengths))


class EmbeddingsApi:
    """The endpoint /v1/embeddings. It keeps no state."""

    def __init__(self, models: PoolingApis) -> None:
        self._models = models

    async def embeddings(self, request: HttpRequest) -> Response:
        body = await read_pooling(request, EmbeddingBody, POOLING)
        parts = self._models.of(body.model)
        wanted = parts.embedding_of(body, body.dimensions)
        if body.normalize is not None and body.use_activation is not False:
            wanted = replace(wanted, normalize=body.normalize)
        body.input = parts.settings.prompted(body.input, body.prompt_name)
        told = await parts.of_inputs(request, body, "embd-", wanted)
        reply = EmbeddingReply(told.id, int(time.time()), told.model, [], told.usage)
        content = msgspec.to_builtins(reply)
        as_base64 = body.encoding_format == "base64"
        content["data"] = await encoded(told.vectors, as_base64, "embedding")
        return Response(orjson.dumps(content), media_type="application/json")


async def read_pooling(request: HttpRequest, kind: type[B], unserved: Unserved) -> B:
    """Read the body of a pooling endpoint. Its `request_id` becomes the id of the HTTP request.

    Raises InvalidRequest.
    """
    given = object_of(await read_body(request))
    refuse(given, unserved)
    body = struct_of(given, kind)
    note_body_id(request, body.request_id)
    return body


def pool_id(reply: str) -> str:
    """Return a new id for the computation of a reply; two calls may have the same reply id."""
    return f"{reply}-{secrets.token_hex(4)}"


def inputs_of(given: object) -> list[str | tuple[int, ...]]:
    """Return the inputs, each as text or token ids, none empty.

    Raises InvalidRequest, naming the field."""
    if isinstance(given, str):
        return [_one(given, "input")]
    if not isinstance(given, list) or not given:
        message = "input must be a string, a list of strings, token ids or a list of such lists"
        raise InvalidRequest(message, field="input")
    items = cast("list[object]", given)
    if not isinstance(items[0], str | list):
        return [_one(items, "input")]
    if len(items) > MAX_INPUTS:
        raise InvalidRequest(f"input: at most {MAX_INPUTS} inputs in one call", field="input")
    return [_one(item, f"input[{index}]") for index, item in enumerate(items)]


def checked_length(ids: tuple[int, ...], max_model_len: int, field: str) -> tuple[int, ...]:
    """Return the ids. Raises ContextLengthExceeded, naming `field`, if they exceed the context."""
    if len(ids) > max_model_len:
        raise ContextLengthExceeded(
            f"{field}: {len(ids)} tokens exceed the model's maximum context length of"
            f" {max_model_len} tokens",
            field=field,
        )
    return ids


async def encoded(
    vectors: Sequence[bytes], as_base64: bool, kind: str, name: str = ""
) -> list[orjson.Fragment]:
    """Return the encoded objects of the reply's `data`. The event loop gets its turn in between,
    because many vectors take a while. `kind`: the `object` of each, and the name of the field with
    its vector unless `name` is given."""
    found: list[orjson.Fragment] = []
    for index, vector in enumerate(vectors):
        if index % _TURN == _TURN - 1:
            await asyncio.sleep(0)
        numbers = base64_of(vector) if as_base64 else numbers_of(vector)
        item = {"object": kind, "index": index, name or kind: numbers}
        found.append(orjson.Fragment(orjson.dumps(item)))
    return found


def numbers_of(vector: bytes) -> list[float]:
    """Return the numbers in a vector of float32, little-endian."""
    found = array("f")
    found.frombytes(vector)
    if sys.byteorder == "big":
        found.byteswap()
    return found.tolist()


def bytes_of(numbers: Sequence[float]) -> bytes:
    """Return numbers as a vector of float32, little-endian."""
    return struct.pack(f"<{len(numbers)}f", *numbers)


def base64_of(vector: bytes) -> str:
    return base64.b64encode(vector).decode()


def _one(item: object, field: str) -> str | tuple[int, ...]:
    if isinstance(item, str) and item:
        return item
    if isinstance(item, list) and item:
        for token in cast("list[object]", item):
            # type() and not isinstance: true is an int to Python, never to a client.
            if type(token) is not int or not 0 <= token < 2**31:
                raise InvalidRequest(f"{field}: token ids are integers from 0 on", field=field)
        return tuple(cast("list[int]", item))
    raise InvalidRequest(f"{field} must be text or token ids, not empty", field=field)
