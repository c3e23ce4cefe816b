"""/inference/v1/generate: token ids in, token ids out, in vLLM's format; streaming or not.

Nothing is rendered or tokenized; text is computed only to find stop strings. `sampling_params` has
the fields of /v1/completions, with the same checks; errors name them `sampling_params.<field>`.
"""

from __future__ import annotations

import re
import time
from collections.abc import Awaitable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any, Final

import msgspec
import orjson
from starlette.requests import Request as HttpRequest
from starlette.types import Receive, Scope, Send

from baton.protocol.adapters import adapter_name
from baton.protocol.errors import BatonError, InvalidRequest, UnsupportedFeature
from baton.protocol.events import TokenLogprob
from router.api.exchange import respond
from router.api.http.reading import read_body
from router.api.http.web_errors import error_object
from router.api.http_api import HttpApi
from router.api.openai.bodies import (
    CompletionBody,
    StreamOptions,
    check_common,
    object_of,
    parse,
    struct_of,
)
from router.api.openai.fields import Name, Priority, RequestId, TokenIds
from router.api.openai.logprobs import FLOOR, name_of, prompt_logprobs
from router.api.openai.replies import DONE, finish_reason_of, sse_frame, told_count
from router.request.completion import CallRunner, Completion, Delta
from router.request.request_ids import engine_id, reply_id
from router.request.terms import terms_of
from router.services import RouterServices

# Fields of /v1/completions that `sampling_params` may not set: they are about the request or text.
_NOT_SAMPLING: Final = ("prompt", "echo", "stream", "stream_options", "model", "add_special_tokens")


Refused = Annotated[Any, msgspec.Meta(extra_json_schema={"type": "null"})]


class GenerateBody(msgspec.Struct, kw_only=True):
    """The body of /inference/v1/generate. `features` and `kv_transfer_params` are refused."""

    token_ids: TokenIds
    sampling_params: dict[str, Any]
    request_id: RequestId | None = None
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: Name | None = None
    priority: Priority | None = None
    features: Refused = None
    kv_transfer_params: Refused = None


class GenerateUsage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class GenerateChoice(msgspec.Struct):
    """One choice. `logprobs` are like those of chats, but name tokens `token_id:<number>`."""

    index: int
    token_ids: list[int]
    finish_reason: str | None = None
    logprobs: dict[str, Any] | None = None


class GenerateReply(msgspec.Struct):
    request_id: str
    created: int
    model: str
    choices: list[GenerateChoice]
    usage: GenerateUsage
    prompt_logprobs: Any = None
    kv_transfer_params: None = None


@dataclass(slots=True)
class _Output:
    """What has come of one choice of a non-streaming answer: token ids, log-probabilities, and the
    last delta."""

    ids: list[int] = field(default_factory=list[int])
    told: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    last: Delta | None = None


@dataclass(frozen=True, slots=True)
class TokensExchange:
    """The Exchange (router/api/exchange.py) of /inference/v1/generate: a checked request and its
    answer."""

    id: str
    body: GenerateBody
    completion: Completion
    runner: CallRunner
    timeout_s: float

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        return respond(self, self.runner, scope, receive, send)

    @property
    def stream(self) -> bool:
        return bool(self.body.stream)

    @property
    def completions(self) -> tuple[Completion, ...]:
        return (self.completion,)

    def frames(self, prompt: int) -> list[TokensFrames]:
        return [TokensFrames(self) for _ in range(self.completion.num_choices)]

    async def tail(self) -> bytes:
        """Return the end of a stream: the usage, if the client asked for it, and [DONE]."""
        told = self.body.stream_options
        usage = told is not None and told.include_usage
        return (self.frame([], self.usage) if usage else b"") + DONE

    def broken(self, error: BatonError) -> bytes:
        """Return the end of a stream that failed: an error event and [DONE]."""
        return sse_frame(error_object(error)) + DONE

    async def whole(self, runner: CallRunner) -> bytes:
        """Run the completion; return the JSON of the non-streaming answer."""
        outputs = [_Output() for _ in range(self.completion.num_choices)]
        async with aclosing(self.completion.deltas(runner)) as deltas:
            async for delta in deltas:
                output = outputs[delta.sample]
                output.ids += delta.token_ids
                output.told += self.told(delta)
                output.last = delta
        choices = [self.choice(i, each.ids, each.told, each.last) for i, each in enumerate(outputs)]
        it, told = self.completion, None
        count = it.request.params.prompt_logprobs
        if count is not None:
            told = prompt_logprobs(it.prompt_logprobs, count, it.tokenizer)
        model = adapter_name(it.request.adapter) or it.model
        created = int(time.time())
        reply = GenerateReply(self.id, created, model, choices, self.usage, prompt_logprobs=told)
        return msgspec.json.encode(reply)

    def frame(self, choices: list[GenerateChoice], usage: GenerateUsage | None) -> bytes:
        told = msgspec.to_builtins({"choices": choices, "usage": usage})
        return sse_frame({"request_id": self.id, **told})

    def choice(
        self, index: int, ids: Sequence[int], logprobs: list[dict[str, Any]], last: Delta | None
    ) -> GenerateChoice:
        return GenerateChoice(
            index,
            list(ids),
            None if last is None else finish_reason_of(last),
            None if told_count(self.completion.request.params) is None else {"content": logprobs},
        )

    def told(self, delta: Delta) -> list[dict[str, Any]]:
        """Return the log-probabilities of a delta's tokens; [] if the client did not ask."""
        count = told_count(self.completion.request.params)
        return [] if count is None else [spelled(row, count) for row in delta.logprobs]

    @property
    def usage(self) -> GenerateUsage:
        """The tokens of the prompt and of all choices so far."""
        return self.usage_of(self.completion.completion_tokens)

    def usage_of(self, output: int) -> GenerateUsage:
        prompt = self.completion.prompt_tokens
        return GenerateUsage(prompt, output, prompt + output)


class TokensFrames:
    """Writes the SSE frames of one choice (exchange.Frames)."""

    def __init__(self, call: TokensExchange) -> None:
        self._call = call
        told = call.body.stream_options
        self._counts = told is not None and told.include_usage and told.continuous_usage_stats
        self._count = 0

    def opening(self) -> bytes:
        return b""

    def delta(self, delta: Delta) -> bytes:
        call, last = self._call, None if delta.finish_reason is None else delta
        choice = call.choice(delta.sample, delta.token_ids, call.told(delta), last)
        self._count += len(delta.token_ids)
        usage = call.usage_of(self._count) if self._counts else None
        return call.frame([choice], usage)


class GenerateApi:
    """The endpoint /inference/v1/generate. It keeps no state."""

    def __init__(self, services: RouterServices, http: HttpApi) -> None:
        self._services = services
        self._http = http
        self._runner = CallRunner(
            services.dispatcher, services.metrics, services.clock, direct=True
        )

    async def generate(self, request: HttpRequest) -> TokensExchange:
        body = struct_of(object_of(await read_body(request)), GenerateBody)
        for name in ("features", "kv_transfer_params"):
            if getattr(body, name) is not None:
                raise UnsupportedFeature(f"{name} is not supported by this server", field=name)
        ids = tuple(body.token_ids)
        reply = reply_id("generate-", request, body.request_id)
        id_, terms = body.request_id or reply, terms_of(request)
        with _named(body):
            asked = completion_body(body)
            completion = await self._http.of_tokens(asked, ids, engine_id(id_), terms)
        completion.guided_field = _own_name(body, completion.guided_field)
        timeout_s = self._services.config.request_timeout_s
        return TokensExchange(id_, body, completion, self._runner, timeout_s)


def completion_body(body: GenerateBody) -> CompletionBody:
    """Return the request as a body of /v1/completions without a prompt. Raises InvalidRequest."""
    params = {k: v for k, v in body.sampling_params.items() if k not in _NOT_SAMPLING}
    common = {"cache_salt": body.cache_salt, "priority": body.priority, "model": body.model}
    more = {
        "stream": body.stream,
        "stream_options": None if body.stream_options is None else {"include_usage": False},
    }
    asked = parse(orjson.dumps({**params, **common, **more}), CompletionBody)
    check_common(asked)
    return asked


@contextmanager
def _named(body: GenerateBody) -> Iterator[None]:
    """Make errors in the `with` block name a sampling field as `sampling_params.<field>`."""
    try:
        yield
    except InvalidRequest as error:
        own = _own_name(body, error.field or "")
        if own == (error.field or ""):
            raise
        raise type(error)(error.message, field=own) from error


def _own_name(body: GenerateBody, name: str) -> str:
    """Return the client's name of a field of /v1/completions: `sampling_params.<name>` if the
    client set it there, else `name`."""
    head = re.split(r"[.\[]", name, maxsplit=1)[0]
    known = head in body.sampling_params and head not in _NOT_SAMPLING
    return f"sampling_params.{name}" if known else name


def spelled(row: Sequence[TokenLogprob], count: int) -> dict[str, Any]:
    """Return the log-probability of a token and of the `count` most probable tokens at its place,
    each named by its id. `row`: the token itself first."""
    ranked = sorted((each for each in row if each.rank <= count), key=lambda told: told.rank)
    return {**_entry(row[0]), "top_logprobs": [_entry(each) for each in ranked]}


def _entry(told: TokenLogprob) -> dict[str, Any]:
    return {
        "token": name_of(told.token_id),
        "logprob": max(told.logprob, FLOOR),
        "bytes": None,
    }
