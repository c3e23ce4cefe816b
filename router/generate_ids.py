"""/inference/v1/generate: token ids in, token ids out, in vLLM's format; whole or streamed.

Nothing is rendered or tokenized; text exists only to find stop strings. `sampling_params` are the
completion API's fields, checked by the same table; errors name them `sampling_params.<field>`.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
import orjson
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from baton.errors import Cancelled, InvalidRequest, UnsupportedFeature
from baton.events import TokenLogprob
from router.calls import GRACE_S, Runner
from router.completion import Completion, Delta
from router.connection import while_connected
from router.http_api import HttpApi
from router.openai import (
    CompletionBody,
    StreamOptions,
    check_common,
    object_of,
    parse,
    struct_of,
)
from router.openai_logprobs import FLOOR
from router.openai_replies import DONE, ReplyRules, finish_reason_of, sse_frame
from router.reading import read_body
from router.request_ids import engine_id, reply_id
from router.services import RouterServices
from router.sse import FrameWriter
from router.terms import terms_of
from router.web_errors import as_baton_error, error_object, error_response, log_failure

MAX_TOKEN_ID: Final = 2**31 - 1
_ID: Final = re.compile(r"[A-Za-z0-9._:-]{1,128}")
# Of the whole request, or of text: not what samples.
_NOT_SAMPLING: Final = ("prompt", "echo", "stream", "stream_options", "model", "add_special_tokens")


class GenerateBody(msgspec.Struct, kw_only=True):
    """The request. `features` (media) and `kv_transfer_params` are refused by name."""

    token_ids: list[int]
    sampling_params: dict[str, Any]
    request_id: str | None = None
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    priority: int | None = None
    features: Any = None
    kv_transfer_params: Any = None


class GenerateUsage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class GenerateChoice(msgspec.Struct):
    """`logprobs`: as in chats, but tokens are spelled `token_id:<number>`."""

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
    """One choice, as it comes."""

    ids: list[int] = field(default_factory=list[int])
    told: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    last: Delta | None = None


@dataclass(frozen=True, slots=True)
class TokensCall:
    """A checked request on its way to its reply."""

    id: str
    model: str
    completion: Completion
    rules: ReplyRules
    stream: bool
    include_usage: bool
    continuous_usage: bool
    timeout_s: float

    def choice(
        self, index: int, ids: Sequence[int], logprobs: list[dict[str, Any]], last: Delta | None
    ) -> GenerateChoice:
        return GenerateChoice(
            index,
            list(ids),
            None if last is None else finish_reason_of(last),
            None if self.rules.logprobs is None else {"content": logprobs},
        )

    def told(self, delta: Delta) -> list[dict[str, Any]]:
        """Log-probabilities of one delta's tokens."""
        count = self.rules.logprobs
        return [] if count is None else [spelled(row, count) for row in delta.logprobs]

    @property
    def usage(self) -> GenerateUsage:
        """Of all choices; final when they have ended."""
        return self.usage_of(self.completion.completion_tokens)

    def usage_of(self, output: int) -> GenerateUsage:
        prompt = self.completion.prompt_tokens
        return GenerateUsage(prompt, output, prompt + output)


class GenerateApi:
    """The endpoint. Keeps no state."""

    def __init__(self, services: RouterServices, http: HttpApi) -> None:
        self._services = services
        self._http = http
        self._runner = Runner(services.dispatcher, services.metrics, services.clock)

    async def generate(self, request: HttpRequest) -> TokensReply:
        body = struct_of(object_of(await read_body(request)), GenerateBody)
        for name in ("features", "kv_transfer_params"):
            if getattr(body, name) is not None:
                raise UnsupportedFeature(f"{name} is not supported by this server", field=name)
        ids = tuple(body.token_ids)
        if not ids or min(ids) < 0 or max(ids) > MAX_TOKEN_ID:
            raise InvalidRequest("token_ids: at least one, from 0 on", field="token_ids")
        if body.request_id is not None and not _ID.fullmatch(body.request_id):
            message = "request_id: 1 to 128 letters, digits, dots, colons, dashes, underscores"
            raise InvalidRequest(message, field="request_id")
        id_ = body.request_id or reply_id("generate", request)
        terms = terms_of(request)
        with _named(body):
            asked = completion_body(body)
            completion = await self._http.of_tokens(asked, ids, engine_id(id_), terms)
        completion.guided_field = _own_name(body, completion.guided_field)
        told = body.stream_options or StreamOptions()
        call = TokensCall(
            id_,
            completion.request.adapter or completion.model,
            completion,
            ReplyRules(self._services.tokenizer, asked.logprobs, asked.prompt_logprobs),
            bool(body.stream),
            bool(told.include_usage),
            bool(told.include_usage and told.continuous_usage_stats),
            self._services.config.request_timeout_s,
        )
        return TokensReply(call, self._runner)


def completion_body(body: GenerateBody) -> CompletionBody:
    """The same request as a completion's. Raises InvalidRequest."""
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
    """Errors name a sampling field as the client wrote it."""
    try:
        yield
    except InvalidRequest as error:
        own = _own_name(body, error.field or "")
        if own == (error.field or ""):
            raise
        raise type(error)(error.message, field=own) from error


def _own_name(body: GenerateBody, name: str) -> str:
    """A completion's field as it stands in this body."""
    head = re.split(r"[.\[]", name, maxsplit=1)[0]
    known = head in body.sampling_params and head not in _NOT_SAMPLING
    return f"sampling_params.{name}" if known else name


def spelled(row: Sequence[TokenLogprob], count: int) -> dict[str, Any]:
    """One token and its `count` most probable ones, by number."""
    ranked = sorted((each for each in row if each.rank <= count), key=lambda told: told.rank)
    return {**_entry(row[0]), "top_logprobs": [_entry(each) for each in ranked]}


def _entry(told: TokenLogprob) -> dict[str, Any]:
    return {
        "token": f"token_id:{told.token_id}",
        "logprob": max(told.logprob, FLOOR),
        "bytes": None,
    }


class TokensReply:
    """ASGI answer, whole or streamed; the client's leaving aborts the request."""

    def __init__(self, call: TokensCall, runner: Runner) -> None:
        self._call = call
        self._runner = runner

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writer = FrameWriter(send)
        work = self._stream(writer) if self._call.stream else self._whole(scope, receive, send)
        try:
            async with asyncio.timeout(self._call.timeout_s + GRACE_S):
                await while_connected(receive, work)
        except Cancelled as error:
            log_failure(error, error)  # nobody is left to read an answer
        except Exception as error:  # noqa: BLE001  every failure becomes the one answer
            found = as_baton_error(error)
            log_failure(found, error)
            if writer.started:
                with suppress(Cancelled):  # gone by now: the failure is in the log
                    await writer.end(sse_frame(error_object(found)) + DONE)
            else:
                await error_response(found)(scope, receive, send)
        finally:
            writer.close()

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = self._call
        outputs = [_Output() for _ in range(call.completion.num_choices)]
        async with aclosing(self._runner.deltas(call.completion)) as deltas:
            async for delta in deltas:
                output = outputs[delta.sample]
                output.ids += delta.token_ids
                output.told += call.told(delta)
                output.last = delta
        reply = GenerateReply(
            call.id,
            int(time.time()),
            call.model,
            [
                call.choice(index, each.ids, each.told, each.last)
                for index, each in enumerate(outputs)
            ],
            call.usage,
            prompt_logprobs=call.rules.told_of_prompt(call.completion),
        )
        response = Response(msgspec.json.encode(reply), media_type="application/json")
        await response(scope, receive, send)

    async def _stream(self, writer: FrameWriter) -> None:
        call = self._call
        counts = [0] * call.completion.num_choices
        async with aclosing(self._runner.deltas(call.completion)) as deltas:
            async for delta in deltas:
                last = delta if delta.finish_reason is not None else None
                choice = call.choice(delta.sample, delta.token_ids, call.told(delta), last)
                counts[delta.sample] += len(delta.token_ids)
                usage = None
                if call.continuous_usage:
                    usage = msgspec.to_builtins(call.usage_of(counts[delta.sample]))
                await writer.write(self._frame([msgspec.to_builtins(choice)], usage))
        tail = b""
        if call.include_usage:
            tail = self._frame([], msgspec.to_builtins(call.usage))
        await writer.end(tail + DONE)

    def _frame(self, choices: list[Any], usage: Any) -> bytes:
        return sse_frame({"request_id": self._call.id, "choices": choices, "usage": usage})
