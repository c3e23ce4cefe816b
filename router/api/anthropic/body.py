"""The bodies of /v1/messages and its count_tokens: strict structs, and their translation to a chat.

As in Anthropic's API, thinking is off unless the body asks for it. Then the chat template is told
so, if it has a switch; reasoning that the model writes all the same is not shown. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal, TypeVar

import msgspec

from baton.protocol.errors import InvalidRequest, UnsupportedFeature
from router.api.anthropic.blocks import messages_of
from router.api.dialect import chat_body, in_own_names
from router.api.openai.bodies import ChatBody, object_of, struct_of
from router.api.openai.chat import MAX_NAME_CHARS, Effort, Tools
from router.api.openai.fields import AtLeastOne, Stops, ThinkingBudget
from router.api.unserved import Unserved, refuse

# A chat's field -> what this API calls it.
NAMES: Final = {
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "thinking_token_budget": "thinking.budget_tokens",
}
_ONE: Final = ": each call has one message"
UNSERVED: Final[Unserved] = {
    "best_of": ((1,), _ONE),
    "container": ((), ""),
    "logprob_token_ids": (([],), ": no logprobs are told here"),
    "mcp_servers": (([],), ""),
    "n": ((1,), _ONE),
}


class ThinkingBody(msgspec.Struct, kw_only=True):
    """Options of thinking. `budget_tokens` limits the reasoning, if this server knows how the
    model's reasoning ends."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: ThinkingBudget | None = None
    display: Literal["summarized", "omitted"] | None = None


class ToolChoice(msgspec.Struct, kw_only=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class OutputConfig(msgspec.Struct, kw_only=True):
    effort: Effort | None = None
    format: dict[str, Any] | None = None


class AnthropicTool(msgspec.Struct, kw_only=True):
    """A tool that the client runs: its `type` is absent or `custom`."""

    name: str
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class CountBody(msgspec.Struct, kw_only=True):
    """The body of /v1/messages/count_tokens: the fields that make up the prompt."""

    messages: Any = None
    system: Any = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingBody | None = None
    output_config: OutputConfig | None = None
    output_format: dict[str, Any] | None = None  # the older name of output_config.format
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def thinks(self) -> bool:
        return self.thinking is not None and self.thinking.type != "disabled"


class MessagesBody(CountBody, kw_only=True):
    """The body of /v1/messages. Its sampling fields are those of a chat."""

    max_tokens: AtLeastOne  # lowered to the room in the model's context
    stop_sequences: Stops | None = None
    metadata: dict[str, Any] | None = None


Body = TypeVar("Body", MessagesBody, CountBody)


def read(raw: bytes) -> ChatBody:
    """Check a body of /v1/messages; return the chat that it asks for.

    Raises InvalidRequest, naming the field."""
    given = object_of(raw)
    body = _converted(given, MessagesBody)
    thinking = body.thinking if body.thinks else None
    shown = thinking is not None and thinking.display != "omitted"
    translated = _translated(body) | {
        "max_tokens": body.max_tokens,
        "stop": body.stop_sequences,
        "include_reasoning": shown,
        "thinking_token_budget": thinking.budget_tokens if thinking else None,
    }
    with in_own_names(NAMES):
        return chat_body(given, translated)


def read_count(raw: bytes) -> ChatBody:
    """Check a body of count_tokens; return the chat whose prompt is to be counted.

    Raises InvalidRequest, naming the field."""
    given = object_of(raw)
    body = _converted(given, CountBody)
    asked = {"model": given["model"]} if "model" in given else {}
    with in_own_names(NAMES):
        return chat_body(asked, _translated(body))


def _converted(given: dict[str, Any], kind: type[Body]) -> Body:
    refuse(given, UNSERVED)
    return struct_of(given, kind)


def _translated(body: CountBody) -> dict[str, Any]:
    """Return the chat's fields for the prompt and for the allowed answers."""
    messages = messages_of(body.system, body.messages)
    last = messages[-1]
    # If the last message is the assistant's, the client has begun the answer: continue it.
    continues = last["role"] == "assistant" and bool(last["content"]) and "tool_calls" not in last
    config = body.output_config
    own_format = config.format if config else None
    choice = body.tool_choice
    return {
        "messages": messages,
        "continue_final_message": continues or None,
        "tools": _tools(body.tools),
        "tool_choice": _tool_choice(choice),
        "parallel_tool_calls": False if choice and choice.disable_parallel_tool_use else None,
        "chat_template_kwargs": _template_kwargs(body),
        "reasoning_effort": config.effort if config else None,
        "response_format": _response_format(
            body.output_format if own_format is None else own_format
        ),
    }


def _tools(given: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    if given is None:
        return None
    tools: list[dict[str, Any]] = []
    for index, item in enumerate(given):
        where = f"tools[{index}]"
        kind = item.get("type")
        if kind not in (None, "custom"):  # a tool that runs at Anthropic has another type
            message = f"{where}: tools of type {str(kind)[:64]!r} are not supported by this server"
            raise UnsupportedFeature(message, field=f"{where}.type")
        try:
            tool = msgspec.convert(item, AnthropicTool, strict=True)
        except msgspec.ValidationError as error:
            raise InvalidRequest(f"{where}: {error}", field=where) from error
        if not 0 < len(tool.name) <= MAX_NAME_CHARS:
            message = f"{where}: a name has 1 to {MAX_NAME_CHARS} characters"
            raise InvalidRequest(message, field=f"{where}.name")
        function: dict[str, Any] = {"name": tool.name}
        if tool.description is not None:
            function["description"] = tool.description
        function["parameters"] = tool.input_schema or {"type": "object", "properties": {}}
        if tool.strict is not None:
            function["strict"] = tool.strict
        tools.append({"type": "function", "function": function})
    return tools


def _tool_choice(given: ToolChoice | None) -> str | dict[str, Any] | None:
    if given is None:
        return None
    if given.type != "tool":
        return "required" if given.type == "any" else given.type
    if given.name is None:
        raise InvalidRequest("tool_choice.name is missing", field="tool_choice.name")
    return {"type": "function", "function": {"name": given.name}}


def _template_kwargs(body: CountBody) -> Mapping[str, Any]:
    """Return chat_template_kwargs with thinking on or off, under the names that templates read."""
    thinks = body.thinks
    return {"enable_thinking": thinks, "thinking": thinks, **(body.chat_template_kwargs or {})}


def _response_format(given: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the chat's response_format, where the schema has a name and is one level deeper."""
    if given is None or given.get("type") != "json_schema":
        return given
    schema = {"name": "output", "schema": given.get("schema"), "strict": True}
    return {"type": "json_schema", "json_schema": schema}
