"""One API call with its completions (one per prompt, each with its choices), and what its answer
says, streamed (router/api/sse.py) or whole (router/api/whole.py).

Choices are numbered prompt by prompt: choice i is sample i % n of prompt i // n.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Final, Literal

import msgspec

from baton.protocol.clock import Clock
from baton.protocol.errors import BatonError
from router.api.http.web_errors import error_object
from router.api.openai.logprobs import CompletionLogprobs, chat_choice_logprobs
from router.api.openai.message import message_of
from router.api.openai.replies import (
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
from router.api.openai.token_ids import TokenIds
from router.api.openai.usage_stats import CountedFrames
from router.api.receipt import receipt_frame
from router.metrics.router import RouterMetrics
from router.parsers.parts import Part
from router.request.completion import Completion, Delta, Dispatch
from router.request.together import together

Api = Literal["completion", "chat"]
GRACE_S: Final = 5.0  # the dispatcher keeps the deadline itself; this one catches its failure to


@dataclass(frozen=True, slots=True)
class CallRunner:
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
    """A parsed, admissible call."""

    api: Api
    head: ReplyHead
    completions: tuple[Completion, ...]
    rules: ReplyRules
    include_usage: bool
    timeout_s: float
    continuous_usage: bool = False

    @property
    def chunk_kind(self) -> str:
        return "chat.completion.chunk" if self.api == "chat" else "text_completion"

    def indices(self, prompt: int) -> range:
        """The choices of a prompt, in the order of its samples."""
        count = self.completions[prompt].num_choices
        return range(prompt * count, (prompt + 1) * count)

    def frames(self, prompt: int) -> list[Frames]:
        """SSE frames of a prompt's choices."""
        completion = self.completions[prompt]
        frames = [self._frames(index, completion) for index in self.indices(prompt)]
        if not self.continuous_usage:
            return frames
        return [CountedFrames(each, completion.prompt_tokens) for each in frames]

    def _frames(self, index: int, completion: Completion) -> Frames:
        chunk = Chunk(self.head, self.chunk_kind, index, self.include_usage)
        if self.api == "chat":
            rules = self.rules.of_choice(index)
            return ChatFrames(chunk, rules, completion.request.prompt_ids)
        return CompletionFrames(chunk, CompletionText(completion, self.rules))

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

    async def tail(self) -> bytes:
        """What a stream ends with."""
        usage = b""
        if self.include_usage:
            usage = usage_frame(self.head, self.chunk_kind, self.usage)
        return self.receipt_frame() + usage + DONE

    def broken(self, error: BatonError) -> bytes:
        """How a stream ends that failed in the middle."""
        return sse_frame(error_object(error)) + DONE

    async def whole(self, runner: CallRunner) -> bytes:
        """The JSON of the whole answer."""
        prompts = range(len(self.completions))
        choices = await together([self._choices(prompt, runner) for prompt in prompts])
        return msgspec.json.encode(self._reply([one for some in choices for one in some]))

    async def _choices(
        self, prompt: int, runner: CallRunner
    ) -> list[ChatChoice] | list[CompletionChoice]:
        """The whole choices of one prompt."""
        completion, indices = self.completions[prompt], self.indices(prompt)
        if self.api == "chat":
            chats = [_WholeChat(index, self.rules.of_choice(index)) for index in indices]
            await _read(runner, completion, chats)
            return [chat.choice() for chat in chats]
        texts = [_WholeText(index, completion, self.rules) for index in indices]
        await _read(runner, completion, texts)
        return [text.choice() for text in texts]

    def _reply(self, choices: list[Any]) -> CompletionReply | ChatReply:
        head, usage = self.head, self.usage
        if self.api == "chat":
            first = self.completions[0]
            return ChatReply(
                head.id,
                head.created,
                head.model,
                choices,
                usage,
                prompt_logprobs=self.rules.told_of_prompt(first),
                prompt_token_ids=TokenIds(self.rules.token_ids, first.request.prompt_ids).prompt,
            )
        return CompletionReply(head.id, head.created, head.model, choices, usage)


async def _read(
    runner: CallRunner, completion: Completion, into: Sequence[_WholeChat | _WholeText]
) -> None:
    async with aclosing(runner.deltas(completion)) as deltas:
        async for delta in deltas:
            into[delta.sample].take(delta)


class _WholeChat:
    """One choice of a chat, from its deltas."""

    def __init__(self, index: int, rules: ReplyRules) -> None:
        self._index = index
        self._rules = rules
        self._parts: list[Part] = []
        self._ids = TokenIds(rules.token_ids)
        self._told: list[dict[str, Any]] = []
        self._last: Delta | None = None

    def take(self, delta: Delta) -> None:
        self._parts += self._rules.parts_of(delta)
        self._told += self._rules.chat_logprobs(delta)
        self._ids.take(delta)
        self._last = delta

    def choice(self) -> ChatChoice:
        assert self._last is not None, "a sample ends with a delta or an exception"
        return ChatChoice(
            self._index,
            message_of(self._parts, self._rules.draw_id, self._rules.role, self._rules.lead),
            finish_reason_of(self._last),
            logprobs=None if self._rules.logprobs is None else chat_choice_logprobs(self._told),
            stop_reason=self._last.stop_reason,
            token_ids=self._ids.whole,
        )


class _WholeText:
    """One choice of a text completion, from its deltas."""

    def __init__(self, index: int, completion: Completion, rules: ReplyRules) -> None:
        self._index = index
        self._completion = completion
        self._rules = rules
        self._text = CompletionText(completion, rules)
        self._texts: list[str] = []
        self._told: CompletionLogprobs | None = None
        self._last: Delta | None = None

    def take(self, delta: Delta) -> None:
        more, rows = self._text.take(delta)
        self._texts.append(more)
        if self._told is None:
            self._told = rows
        elif rows is not None:
            self._told.extend(rows)
        self._last = delta

    def choice(self) -> CompletionChoice:
        assert self._last is not None, "a sample ends with a delta or an exception"
        return CompletionChoice(
            self._index,
            "".join(self._texts),
            finish_reason_of(self._last),
            logprobs=self._told,
            stop_reason=self._last.stop_reason,
            prompt_logprobs=self._rules.told_of_prompt(self._completion),
            token_ids=self._text.ids.whole,
            prompt_token_ids=self._text.ids.prompt,
        )
