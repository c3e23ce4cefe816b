"""The answers of /v1/responses and /v1/messages as structs, which only /openapi.json uses.

The answers themselves are built as plain dicts, event by event (router/api/responses/events.py,
router/api/anthropic/events.py); tests compare them with these structs.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class ResponseItem(msgspec.Struct):
    """One item of the output. Its type says which of the optional fields it has."""

    id: str
    type: Literal["message", "reasoning", "function_call", "custom_tool_call"]
    status: Literal["in_progress", "completed", "incomplete"]
    role: Literal["assistant"] | msgspec.UnsetType = msgspec.UNSET
    content: list[dict[str, Any]] | msgspec.UnsetType = msgspec.UNSET
    summary: list[dict[str, Any]] | msgspec.UnsetType = msgspec.UNSET
    namespace: str | msgspec.UnsetType = msgspec.UNSET
    name: str | msgspec.UnsetType = msgspec.UNSET
    call_id: str | msgspec.UnsetType = msgspec.UNSET
    arguments: str | msgspec.UnsetType = msgspec.UNSET
    input: str | msgspec.UnsetType = msgspec.UNSET


class ResponseInputDetails(msgspec.Struct):
    cached_tokens: int
    cache_write_tokens: int


class ResponseOutputDetails(msgspec.Struct):
    reasoning_tokens: int


class ResponseUsage(msgspec.Struct):
    input_tokens: int
    input_tokens_details: ResponseInputDetails
    output_tokens: int
    output_tokens_details: ResponseOutputDetails
    total_tokens: int


class ResponseIncomplete(msgspec.Struct):
    reason: Literal["max_output_tokens"]


class ResponseError(msgspec.Struct):
    code: Literal["server_error", "rate_limit_exceeded"]
    message: str


class ResponsesReply(msgspec.Struct):
    """A response. It repeats the request's parameters, with the defaults that were used. `usage` is
    there once the response has ended."""

    id: str
    object: Literal["response"]
    status: Literal["completed", "incomplete", "queued", "in_progress", "failed", "cancelled"]
    created_at: int
    completed_at: int | None
    model: str
    output: list[ResponseItem]
    incomplete_details: ResponseIncomplete | None
    error: ResponseError | None
    background: bool
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, str | None]
    service_tier: Literal["default"]
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"]
    usage: ResponseUsage | msgspec.UnsetType = msgspec.UNSET
    user: str | msgspec.UnsetType = msgspec.UNSET
    prompt_cache_key: str | msgspec.UnsetType = msgspec.UNSET
    safety_identifier: str | msgspec.UnsetType = msgspec.UNSET
    # Which tools were left out, and which formats are not enforced.
    baton_notes: list[str] | msgspec.UnsetType = msgspec.UNSET


class ResponseItemList(msgspec.Struct):
    """A page of input items; the newest first unless the request asks for another order."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str
    last_id: str
    has_more: bool


class ResponseDeleted(msgspec.Struct):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


class ContentBlock(msgspec.Struct):
    """One block of a message. Its type says which of the optional fields it has."""

    type: Literal["text", "thinking", "tool_use"]
    text: str | msgspec.UnsetType = msgspec.UNSET
    thinking: str | msgspec.UnsetType = msgspec.UNSET
    signature: str | msgspec.UnsetType = msgspec.UNSET
    id: str | msgspec.UnsetType = msgspec.UNSET
    name: str | msgspec.UnsetType = msgspec.UNSET
    input: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET


class MessageOutputDetails(msgspec.Struct):
    thinking_tokens: int


class MessageUsage(msgspec.Struct):
    """Token counts of a message. `input_tokens` leaves out cached tokens."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: MessageOutputDetails
    service_tier: Literal["standard"]


class MessageReply(msgspec.Struct):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[ContentBlock]
    stop_reason: Literal[
        "end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"
    ]
    stop_sequence: str | None
    usage: MessageUsage


class CountReply(msgspec.Struct):
    input_tokens: int


class InputTokensReply(msgspec.Struct):
    object: Literal["response.input_tokens"]
    input_tokens: int


class AnthropicError(msgspec.Struct):
    message: str
    type: str


class AnthropicErrorReply(msgspec.Struct):
    """The answer to any request below /v1/messages that fails (router/api/anthropic/errors.py)."""

    error: AnthropicError
    type: Literal["error"]
    request_id: str | None = None
