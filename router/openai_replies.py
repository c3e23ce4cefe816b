"""The bodies of OpenAI's replies: whole objects as structs, stream chunks as pre-encoded frames.

A stream sends thousands of chunks that differ in one string, so a frame is head + text + tail with
head and tail encoded once per choice. Tests decode every frame with the OpenAI SDK.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol

import msgspec
import orjson

from baton import __version__

DONE: Final = b"data: [DONE]\n\n"
FINGERPRINT: Final = f"baton-{__version__}"


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int = 0


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


def usage_of(prompt: int, completion: int, cached: int) -> Usage:
    return Usage(prompt, completion, prompt + completion, PromptTokensDetails(cached))


class CompletionChoice(msgspec.Struct):
    index: int
    text: str
    finish_reason: str | None
    logprobs: None = None
    stop_reason: int | str | None = None  # vLLM's: the stop string or token id that ended it


class AssistantMessage(msgspec.Struct):
    content: str
    role: Literal["assistant"] = "assistant"
    refusal: None = None


class ChatChoice(msgspec.Struct):
    index: int
    message: AssistantMessage
    finish_reason: str | None
    logprobs: None = None
    stop_reason: int | str | None = None


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


class Frames(Protocol):
    """SSE frames of one choice, in the order opening, text*, finish."""

    def opening(self) -> bytes: ...
    def text(self, text: str) -> bytes: ...
    def finish(self, reason: str, stop_reason: int | str | None) -> bytes: ...


class CompletionFrames:
    """Chunks of /v1/completions: `text` in each, `finish_reason` in the last."""

    def __init__(self, head: ReplyHead, index: int, with_usage: bool) -> None:
        self._chunk = _Chunk(head, "text_completion", with_usage)
        choice = {"index": index, "text": 0, "logprobs": None, "finish_reason": None}
        self._head, self._tail = self._chunk.around({**choice, "stop_reason": None}, b'"text":0')
        self._choice = choice

    def opening(self) -> bytes:
        return b""

    def text(self, text: str) -> bytes:
        return self._head + b'"text":' + orjson.dumps(text) + self._tail

    def finish(self, reason: str, stop_reason: int | str | None) -> bytes:
        last = {"text": "", "finish_reason": reason, "stop_reason": stop_reason}
        return self._chunk.frame({**self._choice, **last})


class ChatFrames:
    """Chunks of /v1/chat/completions: the role, then `content`, then an empty delta and why."""

    def __init__(self, head: ReplyHead, index: int, with_usage: bool) -> None:
        self._chunk = _Chunk(head, "chat.completion.chunk", with_usage)
        choice: dict[str, Any] = {
            "index": index, "delta": {"content": 0}, "logprobs": None, "finish_reason": None
        }  # fmt: skip
        self._head, self._tail = self._chunk.around(choice, b'"content":0')
        self._choice = choice

    def opening(self) -> bytes:
        return self._chunk.frame({**self._choice, "delta": {"role": "assistant", "content": ""}})

    def text(self, text: str) -> bytes:
        return self._head + b'"content":' + orjson.dumps(text) + self._tail

    def finish(self, reason: str, stop_reason: int | str | None) -> bytes:
        last = {"delta": {}, "finish_reason": reason, "stop_reason": stop_reason}
        return self._chunk.frame({**self._choice, **last})


class _Chunk:
    def __init__(self, head: ReplyHead, kind: str, with_usage: bool) -> None:
        self._base: dict[str, Any] = {
            "id": head.id,
            "object": kind,
            "created": head.created,
            "model": head.model,
            "system_fingerprint": FINGERPRINT,
        }
        # With include_usage every chunk but the last carries `usage: null`.
        self._end: dict[str, Any] = {"usage": None} if with_usage else {}

    def frame(self, choice: dict[str, Any]) -> bytes:
        return sse_frame({**self._base, "choices": [choice], **self._end})

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
