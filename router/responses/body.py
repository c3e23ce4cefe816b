"""The body of /v1/responses: a strict struct, and the chat that it asks for. Pure.

Nothing is stored: `store` may be true, as SDKs have it, and the reply says that it was not. What
would need an earlier response is refused by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal

import msgspec

from baton.errors import InvalidRequest, UnsupportedFeature
from router.allowed_tools import KIND
from router.dialect import chat_body, in_own_names
from router.openai import ChatBody, object_of, struct_of
from router.openai_chat import MAX_NAME_CHARS
from router.responses.items import messages_of
from router.unserved import Unserved, refuse

MAX_METADATA: Final = 16
MAX_METADATA_KEY: Final = 64
MAX_METADATA_VALUE: Final = 512
MAX_TOP_LOGPROBS: Final = 20
LOGPROBS: Final = "message.output_text.logprobs"
# A chat's field -> what this API calls it.
NAMES: Final = {
    "max_completion_tokens": "max_output_tokens",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "messages": "input",
    "tool_choice.allowed_tools": "tool_choice",
}
_STATELESS: Final = ": nothing is stored, send the whole conversation as input"
_ONE: Final = ": each call has one response"
UNSERVED: Final[Unserved] = {
    "background": ((False,), ""),
    "context_management": (([],), ""),
    "conversation": ((), _STATELESS),
    "enable_response_messages": ((False,), ""),
    "best_of": ((1,), _ONE),
    "moderation": ((), ""),
    "n": ((1,), _ONE),
    "previous_input_messages": (([],), _STATELESS),
    "previous_response_id": ((), _STATELESS),
    "prompt": ((), ""),
    "truncation": (("disabled",), ""),
}
INCLUDABLE: Final = frozenset(
    {
        LOGPROBS,
        "reasoning.encrypted_content",  # thoughts are told in the clear: send them back so
        # Of tools and inputs that never occur here: there is nothing to include.
        "code_interpreter_call.outputs",
        "computer_call_output.output.image_url",
        "file_search_call.results",
        "message.input_image.image_url",
        "web_search_call.action.sources",
        "web_search_call.results",
    }
)
Length = Literal["auto", "concise", "detailed"]


class ReasoningOptions(msgspec.Struct, kw_only=True):
    effort: str | None = None
    summary: Length | None = None
    generate_summary: Length | None = None  # the older name


class TextOptions(msgspec.Struct, kw_only=True):
    format: dict[str, Any] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ResponsesBody(msgspec.Struct, kw_only=True):
    """What this API spells in its own way; sampling fields are checked as a chat's."""

    input: Any = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    include: list[str] | None = None
    stop: str | list[str] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    user: str | None = None


@dataclass(frozen=True, slots=True)
class ResponsesCall:
    """A checked body: what to ask, and how to tell the answer."""

    body: ResponsesBody
    chat: ChatBody

    @property
    def summarized(self) -> bool:
        """Thoughts are told as their own summary."""
        asked = self.body.reasoning
        return asked is not None and (asked.summary or asked.generate_summary) is not None


def read(raw: bytes) -> ResponsesCall:
    """Check a body. Raises InvalidRequest, naming the field."""
    given = object_of(raw)
    refuse(given, UNSERVED)
    body = struct_of(given, ResponsesBody)
    _check(body)
    logprobs = body.top_logprobs is not None or LOGPROBS in (body.include or ())
    translated: dict[str, Any] = {
        "messages": messages_of(body.input, body.instructions),
        "max_completion_tokens": body.max_output_tokens,
        "tools": _tools(body.tools),
        "tool_choice": _tool_choice(body.tool_choice),
        "parallel_tool_calls": body.parallel_tool_calls,
        "response_format": _response_format(body.text.format if body.text else None),
        "reasoning_effort": body.reasoning.effort if body.reasoning else None,
        "chat_template_kwargs": body.chat_template_kwargs,
        "stop": body.stop,
        "logprobs": logprobs or None,
        "top_logprobs": body.top_logprobs if logprobs else None,
    }
    with in_own_names(NAMES):
        return ResponsesCall(body, chat_body(given, translated))


def _check(body: ResponsesBody) -> None:
    metadata = body.metadata or {}
    if len(metadata) > MAX_METADATA:
        raise InvalidRequest(f"metadata: at most {MAX_METADATA} pairs", field="metadata")
    for key, value in metadata.items():
        if len(key) > MAX_METADATA_KEY or len(value) > MAX_METADATA_VALUE:
            message = (
                f"metadata: keys of at most {MAX_METADATA_KEY} characters,"
                f" values of at most {MAX_METADATA_VALUE}"
            )
            raise InvalidRequest(message, field="metadata")
    if body.top_logprobs is not None and not 0 <= body.top_logprobs <= MAX_TOP_LOGPROBS:
        message = f"top_logprobs must be between 0 and {MAX_TOP_LOGPROBS}"
        raise InvalidRequest(message, field="top_logprobs")
    for index, name in enumerate(body.include or ()):
        if name not in INCLUDABLE:
            where = f"include[{index}]"
            raise InvalidRequest(f"{where}: {name[:64]!r} is not known", field=where)


def _tools(given: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    """A chat's tools. The name stands beside the type here; a chat puts it under `function`."""
    if given is None:
        return None
    tools: list[dict[str, Any]] = []
    for index, tool in enumerate(given):
        kind = tool.get("type")
        if kind != "function":
            message = (
                f"tools[{index}]: only tools of type function are supported, not {str(kind)[:64]!r}"
            )
            raise UnsupportedFeature(message, field=f"tools[{index}].type")
        name = tool.get("name")
        if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_CHARS:
            field = f"tools[{index}].name"
            message = f"{field} must be a string of 1 to {MAX_NAME_CHARS} characters"
            raise InvalidRequest(message, field=field)
        # A null is what an SDK writes for "none"; templates would print it.
        function = {key: v for key, v in tool.items() if key != "type" and v is not None}
        tools.append({"type": "function", "function": function})
    return tools


def _tool_choice(given: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    if not isinstance(given, dict):
        return given
    if given.get("type") == KIND:
        tools = given.get("tools")
        named = [_named(tool) for tool in tools] if isinstance(tools, list) else tools
        return {"type": KIND, KIND: {"mode": given.get("mode"), "tools": named}}
    if given.get("type") != "function" or not isinstance(given.get("name"), str):
        message = "tool_choice must be none, auto, required or a named function"
        raise UnsupportedFeature(message, field="tool_choice")
    return _named(given)


def _named(tool: Any) -> Any:
    """A chat's way to name a function: one level deeper. What is none stays as it is."""
    if not isinstance(tool, dict) or tool.get("type") != "function":
        return tool
    return {"type": "function", "function": {"name": tool.get("name")}}


def _response_format(given: dict[str, Any] | None) -> dict[str, Any] | None:
    """A chat's response_format: a schema and its name lie one level deeper there."""
    if given is None or given.get("type") != "json_schema":
        return given
    schema = {name: value for name, value in given.items() if name != "type" and value is not None}
    return {"type": "json_schema", "json_schema": schema}
