"""One API call with its completions (one per prompt), and the whole (not streamed) answer to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final, Literal

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from baton.clock import Clock
from baton.errors import Cancelled
from baton.request import FinishReason
from router.completion import Completion, Delta, Dispatch
from router.connection import together, while_connected
from router.metrics import RouterMetrics
from router.openai_replies import (
    AssistantMessage,
    ChatChoice,
    ChatFrames,
    ChatReply,
    CompletionChoice,
    CompletionFrames,
    CompletionReply,
    Frames,
    ReplyHead,
    Usage,
    usage_of,
)
from router.web_errors import as_baton_error, error_response, log_failure

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
    include_usage: bool
    timeout_s: float

    def frames(self, index: int) -> Frames:
        kind = ChatFrames if self.api == "chat" else CompletionFrames
        return kind(self.head, index, self.include_usage)

    @property
    def usage(self) -> Usage:
        """Sums over all completions; final when they have ended."""
        return usage_of(
            sum(c.prompt_tokens for c in self.completions),
            sum(c.completion_tokens for c in self.completions),
            sum(c.cached_tokens for c in self.completions),
        )


class WholeReply:
    """ASGI answer that waits for all completions; the client's leaving aborts them."""

    def __init__(self, call: Call, runner: Runner) -> None:
        self._call = call
        self._runner = runner

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with asyncio.timeout(self._call.timeout_s + GRACE_S):
                body = await while_connected(receive, self._run())
        except Cancelled as error:
            log_failure(error, error)  # nobody is left to read an answer
            return
        except Exception as error:  # noqa: BLE001  every failure becomes the one answer
            found = as_baton_error(error)
            log_failure(found, error)
            await error_response(found)(scope, receive, send)
            return
        await Response(body, media_type="application/json")(scope, receive, send)

    async def _run(self) -> bytes:
        outputs = await together([self._output(c) for c in self._call.completions])
        return msgspec.json.encode(self._reply(outputs))

    async def _output(self, completion: Completion) -> _Output:
        texts: list[str] = []
        last: Delta | None = None
        async with aclosing(self._runner.deltas(completion)) as deltas:
            async for delta in deltas:
                texts.append(delta.text)
                last = delta
        assert last is not None, "a completion ends with a delta or an exception"
        return _Output("".join(texts), last.finish_reason, last.stop_reason)

    def _reply(self, outputs: list[_Output]) -> CompletionReply | ChatReply:
        head, usage = self._call.head, self._call.usage
        if self._call.api == "chat":
            chat = [
                ChatChoice(i, AssistantMessage(o.text), o.finish_reason, stop_reason=o.stop_reason)
                for i, o in enumerate(outputs)
            ]
            return ChatReply(head.id, head.created, head.model, chat, usage)
        texts = [
            CompletionChoice(i, o.text, o.finish_reason, stop_reason=o.stop_reason)
            for i, o in enumerate(outputs)
        ]
        return CompletionReply(head.id, head.created, head.model, texts, usage)


@dataclass(frozen=True, slots=True)
class _Output:
    text: str
    finish_reason: FinishReason | None
    stop_reason: int | str | None
