"""The bodies of OpenAI's replies: whole objects as structs, stream chunks as pre-encoded frames.

A stream sends thousands of chunks that differ in one string, so a frame is head + text + tail with
head and tail encoded once per choice; chunks with more in them are encoded whole. Tests decode
every frame with the OpenAI SDK.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, Protocol

import msgspec
import orjson

from baton import __version__
from baton.protocol.request import FinishReason
from baton.text.tokenizer import Tokenizer
from router.api.openai.logprobs import (
    CompletionLogprobs,
    CompletionWriter,
    chat_choice_logprobs,
    chat_logprobs,
    prompt_logprobs,
)
from router.api.openai.message import AssistantMessage, delta_of, draw_call_id
from router.api.openai.reply_ids import of_choice
from router.api.openai.token_ids import TokenIds
from router.parsers.parts import Content, Part
from router.request.completion import Completion, Delta

DONE: Final = b"data: [DONE]\n\n"
FINGERPRINT: Final = f"baton-{__version__}"


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int = 0


class CompletionTokensDetails(msgspec.Struct):
    reasoning_tokens: int = 0


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class CompletionChoice(msgspec.Struct):
    index: int
    text: str
    finish_reason: str | None
    logprobs: CompletionLogprobs | None = None
    stop_reason: int | str | None = None  # vLLM's: the stop string or token id that ended it
    prompt_logprobs: Any = None  # vLLM's
    token_ids: list[int] | None = None  # vLLM's
    prompt_token_ids: list[int] | None = None


class ChatChoice(msgspec.Struct):
    index: int
    message: AssistantMessage
    finish_reason: str | None
    logprobs: dict[str, Any] | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None  # vLLM's


class CompletionReply(msgspec.Struct):
    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    object: Literal["text_completion"] = "text_completion"
    system_fingerprint: str = FINGERPRINT


class ChatReply(msgspec.Struct):
    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    object: Literal["chat.completion"] = "chat.completion"
    system_fingerprint: str = FINGERPRINT
    prompt_logprobs: Any = None  # vLLM's
    prompt_token_ids: list[int] | None = None


class Model(msgspec.Struct):
    id: str
    created: int
    root: str
    max_model_len: int
    object: Literal["model"] = "model"
    owned_by: str = "baton"
    parent: str | None = None


class ModelList(msgspec.Struct):
    data: list[Model]
    object: Literal["list"] = "list"


@dataclass(frozen=True, slots=True)
class ReplyHead:
    """What all objects of one reply repeat. `created` is seconds since the epoch."""

    id: str
    model: str
    created: int


@dataclass(frozen=True, slots=True)
class ReplyRules:
    """What a client wants told of each choice, and how. Counts: None = nothing.

    `parsed`: the completions take their text apart. `echo`: prompts come before the text.
    `token_ids`: those of prompt and answer are told beside the text; `named_by_id`: they stand for
    the tokens of log-probabilities. `role` answers a chat; `lead` is told before its content.
    """

    tokenizer: Tokenizer
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    echo: bool = False
    parsed: bool = False
    token_ids: bool = False
    named_by_id: bool = False
    role: str = "assistant"
    lead: str = ""
    draw_id: Callable[[], str] = draw_call_id

    def of_choice(self, index: int) -> ReplyRules:
        """For one choice of several."""
        draw_id = of_choice(self.draw_id, index)
        return self if draw_id is self.draw_id else replace(self, draw_id=draw_id)

    @property
    def plain(self) -> bool:
        """A delta is its text, nothing more."""
        return not self.parsed and self.logprobs is None and not self.token_ids

    def told_of_prompt(self, completion: Completion) -> Any:
        """vLLM's `prompt_logprobs`, None if nobody asked."""
        if self.prompt_logprobs is None:
            return None
        return prompt_logprobs(completion.prompt_logprobs, self.prompt_logprobs, self.tokenizer)

    def parts_of(self, delta: Delta) -> tuple[Part, ...]:
        if self.parsed:
            return delta.parts
        return (Content(delta.text),) if delta.text else ()

    def chat_logprobs(self, delta: Delta) -> list[dict[str, Any]]:
        if self.logprobs is None:
            return []
        return chat_logprobs(delta.logprobs, self.logprobs, self.tokenizer, self.named_by_id)


def finish_reason_of(delta: Delta) -> str | None:
    """OpenAI's word for the end; an answer that was cut short says so, calls or not."""
    if delta.finish_reason is FinishReason.STOP and delta.num_calls:
        return "tool_calls"
    return None if delta.finish_reason is None else delta.finish_reason.value


class CompletionText:
    """Text and log-probabilities of one choice, delta by delta; an echoed prompt comes first."""

    def __init__(self, completion: Completion, rules: ReplyRules) -> None:
        self._completion = completion
        self.ids = TokenIds(rules.token_ids, completion.request.prompt_ids)
        self._echo = rules.echo
        self._writer: CompletionWriter | None = None
        if rules.logprobs is not None:
            self._writer = CompletionWriter(rules.tokenizer, rules.logprobs, rules.named_by_id)

    def take(self, delta: Delta) -> tuple[str, CompletionLogprobs | None]:
        """What `delta` adds; None where there are no log-probabilities to tell."""
        self.ids.take(delta)
        text, told = "", None
        if self._echo:
            self._echo = False
            text, told = self._prompt()
        if self._writer is not None:
            rows = self._writer.rows(delta.logprobs)
            if told is None:
                told = rows
            else:
                told.extend(rows)
        return text + delta.text, told

    def _prompt(self) -> tuple[str, CompletionLogprobs | None]:
        it = self._completion
        if self._writer is None:
            return it.prompt_text, None
        first = it.request.prompt_ids[0]
        return it.prompt_text, self._writer.prompt(first, it.prompt_logprobs)


class Frames(Protocol):
    """SSE frames of one choice: the opening, then what each delta adds; the last has the finish."""

    def opening(self) -> bytes: ...
    def delta(self, delta: Delta) -> bytes: ...


class CompletionFrames:
    """Chunks of /v1/completions: each has what a delta adds, the last why it ended, too."""

    def __init__(self, chunk: Chunk, text: CompletionText) -> None:
        self._chunk = chunk
        self._text = text
        choice = {"index": chunk.index, "text": 0, "logprobs": None, "finish_reason": None}
        self._head, self._tail = self._chunk.around({**choice, "stop_reason": None}, b'"text":0')
        self._choice = choice

    def opening(self) -> bytes:
        return b""

    def delta(self, delta: Delta) -> bytes:
        text, told = self._text.take(delta)
        ids = self._text.ids
        reason = finish_reason_of(delta)
        if reason is None and not (told and told.tokens) and not ids.waiting:
            return self._head + b'"text":' + orjson.dumps(text) + self._tail if text else b""
        rows = None if told is None else msgspec.to_builtins(told)
        more = {"text": text, "logprobs": rows, **ids.prompt_fields(), **ids.fields()}
        end = {"finish_reason": reason, "stop_reason": delta.stop_reason}
        return self._chunk.frame({**self._choice, **more, **end})


class ChatFrames:
    """Chunks of /v1/chat/completions: the role, then a part in each, then why it ended."""

    def __init__(self, chunk: Chunk, rules: ReplyRules, prompt_ids: tuple[int, ...] = ()) -> None:
        self._chunk = chunk
        self._rules = rules
        self._ids = TokenIds(rules.token_ids, prompt_ids)
        choice: dict[str, Any] = {
            "index": chunk.index, "delta": {"content": 0}, "logprobs": None, "finish_reason": None
        }  # fmt: skip
        self._head, self._tail = self._chunk.around(choice, b'"content":0')
        self._choice = choice
        self._told: list[dict[str, Any]] = []  # of tokens whose part is still to come

    def opening(self) -> bytes:
        first = {**self._choice, "delta": {"role": self._rules.role, "content": ""}}
        opening = self._chunk.frame(first, self._ids.prompt_fields())
        return opening + self._text(self._rules.lead) if self._rules.lead else opening

    def delta(self, delta: Delta) -> bytes:
        if delta.finish_reason is None and self._rules.plain:
            return self._text(delta.text) if delta.text else b""
        self._ids.take(delta)
        self._told += self._rules.chat_logprobs(delta)
        data = b"".join(self._part(part) for part in self._rules.parts_of(delta))
        reason = finish_reason_of(delta)
        if reason is not None:
            last = {"delta": {}, "finish_reason": reason, "stop_reason": delta.stop_reason}
            told = {"logprobs": self._take_told(), **self._ids.fields()}
            data += self._chunk.frame({**self._choice, **told, **last})
        return data

    def _part(self, part: Part) -> bytes:
        if isinstance(part, Content) and not self._told and not self._ids.wanted:
            return self._text(part.text)
        told = {"delta": delta_of(part, self._rules.draw_id), "logprobs": self._take_told()}
        return self._chunk.frame({**self._choice, **told, **self._ids.fields()})

    def _text(self, text: str) -> bytes:
        return self._head + b'"content":' + orjson.dumps(text) + self._tail

    def _take_told(self) -> dict[str, Any] | None:
        told, self._told = self._told, []
        return chat_choice_logprobs(told) if told else None


class Chunk:
    """The chunks of choice `index` of a stream."""

    def __init__(self, head: ReplyHead, kind: str, index: int, with_usage: bool) -> None:
        self.index = index
        self._base: dict[str, Any] = {
            "id": head.id,
            "object": kind,
            "created": head.created,
            "model": head.model,
            "system_fingerprint": FINGERPRINT,
        }
        # With include_usage every chunk but the last carries `usage: null`.
        self._end: dict[str, Any] = {"usage": None} if with_usage else {}

    def frame(self, choice: dict[str, Any], more: Mapping[str, Any] | None = None) -> bytes:
        return sse_frame({**self._base, "choices": [choice], **self._end, **(more or {})})

    def around(self, choice: dict[str, Any], mark: bytes) -> tuple[bytes, bytes]:
        """The frame before and after its last `mark`; nothing a client chose comes after that."""
        head, _, tail = self.frame(choice).rpartition(mark)
        assert head, "the mark is part of the choice"
        return head, tail


def usage_frame(head: ReplyHead, kind: str, usage: Usage) -> bytes:
    """The chunk with no choices that ends a stream with include_usage."""
    base = {"id": head.id, "object": kind, "created": head.created, "model": head.model}
    content = {**base, "system_fingerprint": FINGERPRINT, "choices": []}
    return sse_frame({**content, "usage": msgspec.to_builtins(usage)})


def sse_frame(content: dict[str, Any]) -> bytes:
    """One SSE event. JSON has no raw line breaks, so one data line is enough."""
    return b"data: " + orjson.dumps(content) + b"\n\n"
