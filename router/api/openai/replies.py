"""OpenAI's non-streaming replies as structs, and helpers for the chunks of streams."""

from __future__ import annotations

import sys
from typing import Any, Final, Literal

import msgspec
import orjson

from baton import __version__
from baton.protocol.request import FinishReason
from baton.protocol.sampling import SamplingParams
from router.api.openai.logprobs import CompletionLogprobs
from router.api.openai.message import AssistantMessage
from router.request.completion import Delta

DONE: Final = b"data: [DONE]\n\n"
FINGERPRINT: Final = f"baton-{__version__}"


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int = 0
    image_tokens: int | msgspec.UnsetType = msgspec.UNSET  # told of prompts with images


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
    task: Literal["embed", "score", "classify"] | msgspec.UnsetType = msgspec.UNSET


class ModelList(msgspec.Struct):
    data: list[Model]
    object: Literal["list"] = "list"


def told_count(params: SamplingParams) -> int | None:
    """Return up to which rank a token's log-probabilities are sent; None: none are sent. With
    `logprob_token_ids` there is no limit."""
    return sys.maxsize if params.logprob_token_ids else params.logprobs


def finish_reason_of(delta: Delta) -> str | None:
    """Return OpenAI's finish_reason: `tool_calls` if an answer with calls was complete; None if the
    delta is not the last one."""
    if delta.finish_reason is FinishReason.STOP and delta.num_calls:
        return "tool_calls"
    return None if delta.finish_reason is None else delta.finish_reason.value


def sse_frame(content: dict[str, Any]) -> bytes:
    """Return one SSE event. JSON has no raw line breaks, so one data line is enough."""
    return b"data: " + orjson.dumps(content) + b"\n\n"
