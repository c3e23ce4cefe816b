"""One API call with its completions (one per prompt), and the whole (not streamed) answer to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Final, Literal

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from baton.clock import Clock
from baton.errors import BatonError, Cancelled
from router.completion import Completion, Delta, Dispatch
from router.connection import together, while_connected
from router.metrics import RouterMetrics
from router.openai_logprobs import CompletionLogprobs
from router.openai_message import message_of
from router.openai_replies import (
    DONE,
    ChatChoice,
    ChatFrames,
    ChatReply,
    Chunk,
    CompletionChoice,
    CompletionFrames,
    CompletionReply,
    CompletionText,
    CompletionTokensDetails,
    Frames,
    PromptTokensDetails,
    ReplyHead,
    ReplyRules,
    Usage,
    finish_reason_of,
    sse_frame,
    usage_frame,
)
from router.parsers.parts import Part
from router.receipt import receipt_frame, with_receipt
from router.token_ids import TokenIds
from router.web_errors import as_baton_error, error_object, error_response, log_failure

Api = Literal["completion", "chat"]
GRACE_S: Final = 5.0  # the dispatcher keeps the deadline itself; this one catches its failure to


@dataclass(frozen=True, slots=True)
class Runner:
    """What runs completions: parts of RouterServices."""

    dispatch: Dispatch
    metrics: RouterMetrics
    clock: Clock

    def deltas(self, completion: Completion) -> AsyncGenerator[Delta, None]:
        """Run one completion, measured from its request's arrival."""
        head = completion.request
        meter = self.metrics.begin(completion.model, head.arrival)
        return completion.deltas(self.dispatch, meter, self.clock)


@dataclass(frozen=True, slots=True)
class Call:
    """A parsed, admissible call. `completions[i]` becomes choice i."""

    api: Api
    head: ReplyHead
    completions: tuple[Completion, ...]
    rules: ReplyRules
    include_usage: bool
    timeout_s: float

    @property
    def chunk_kind(self) -> str:
        return "chat.completion.chunk" if self.api == "chat" else "text_completion"

    def frames(self, index: int) -> Frames:
        chunk = Chunk(self.head, self.chunk_kind, index, self.include_usage)
        if self.api == "chat":
            return ChatFrames(chunk, self.rules, self.completions[index].request.prompt_ids)
        return CompletionFrames(chunk, CompletionText(self.completions[index], self.rules))

    def receipt_frame(self) -> bytes:
        """A stream's chunk with its receipt; empty if nobody asked for one."""
        base = {"id": self.head.id, "object": self.chunk_kind, "created": self.head.created}
        return receipt_frame(self.completions, {**base, "model": self.head.model})

    @property
    def usage(self) -> Usage:
        """Sums over all completions; final when they have ended."""
        prompt = sum(c.prompt_tokens for c in self.completions)
        completion = sum(c.completion_tokens for c in self.completions)
        return Usage(
            prompt,
            completion,
            prompt + completion,
            PromptTokensDetails(sum(c.cached_tokens for c in self.completions)),
            CompletionTokensDetails(sum(c.reasoning_tokens for c in self.completions)),
        )

    def tail(self) -> bytes:
        """What a stream ends with."""
        usage = b""
        if self.include_usage:
            usage = usage_frame(self.head, self.chunk_kind, self.usage)
        return self.receipt_frame() + usage + DONE

    def broken(self, error: BatonError) -> bytes:
        """How a stream ends that failed in the middle."""
        return sse_frame(error_object(error)) + DONE


class WholeReply:
    """ASGI answer that waits for all completions; the client's leaving aborts them."""

    def __init__(self, call: Call, runner: Runner) -> None:
        self._call = call
        self._runner = runner

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reply = await whole_answer(
            receive, self._run(), self._call.completions, self._call.timeout_s
        )
        if reply is not None:
            await reply(scope, receive, send)

    async def _run(self) -> bytes:
        choice = self._chat if self._call.api == "chat" else self._completion
        outputs = enumerate(self._call.completions)
        choices = await together([choice(index, it) for index, it in outputs])
        return msgspec.json.encode(self._reply(choices))

    async def _chat(self, index: int, completion: Completion) -> ChatChoice:
        rules = self._call.rules
        parts: list[Part] = []
        ids = TokenIds(rules.token_ids)
        told: list[dict[str, Any]] = []
        last: Delta | None = None
        async with aclosing(self._runner.deltas(completion)) as deltas:
            async for delta in deltas:
                parts += rules.parts_of(delta)
                told += rules.chat_logprobs(delta)
                ids.take(delta)
                last = delta
        assert last is not None, "a completion ends with a delta or an exception"
        return ChatChoice(
            index,
            message_of(parts, rules.draw_id),
            finish_reason_of(last),
            logprobs=None if rules.logprobs is None else {"content": told},
            stop_reason=last.stop_reason,
            token_ids=ids.whole,
        )

    async def _completion(self, index: int, completion: Completion) -> CompletionChoice:
        text = CompletionText(completion, self._call.rules)
        texts: list[str] = []
        told: CompletionLogprobs | None = None
        last: Delta | None = None
        async with aclosing(self._runner.deltas(completion)) as deltas:
            async for delta in deltas:
                more, rows = text.take(delta)
                texts.append(more)
                if told is None:
                    told = rows
                elif rows is not None:
                    told.extend(rows)
                last = delta
        assert last is not None, "a completion ends with a delta or an exception"
        return CompletionChoice(
            index,
            "".join(texts),
            finish_reason_of(last),
            logprobs=told,
            stop_reason=last.stop_reason,
            prompt_logprobs=self._call.rules.told_of_prompt(completion),
            token_ids=text.ids.whole,
            prompt_token_ids=text.ids.prompt,
        )

    def _reply(self, choices: list[Any]) -> CompletionReply | ChatReply:
        call = self._call
        head, usage = call.head, call.usage
        if call.api == "chat":
            first = call.completions[0]
            return ChatReply(
                head.id,
                head.created,
                head.model,
                choices,
                usage,
                prompt_logprobs=call.rules.told_of_prompt(first),
                prompt_token_ids=TokenIds(call.rules.token_ids, first.request.prompt_ids).prompt,
            )
        return CompletionReply(head.id, head.created, head.model, choices, usage)


async def whole_answer(
    receive: Receive,
    work: Coroutine[Any, Any, bytes],
    completions: Sequence[Completion],
    timeout_s: float,
) -> Response | None:
    """The JSON that `work` makes (with the receipt of its completions, if that is asked for), or
    its failure; None if nobody is left to read an answer."""
    try:
        async with asyncio.timeout(timeout_s + GRACE_S):
            body = await while_connected(receive, work)
    except Cancelled as error:
        log_failure(error, error)
        return None
    except Exception as error:  # noqa: BLE001  every failure becomes the one answer
        found = as_baton_error(error)
        log_failure(found, error)
        return error_response(found)
    body, headers = with_receipt(body, completions)
    return Response(body, headers=headers, media_type="application/json")
