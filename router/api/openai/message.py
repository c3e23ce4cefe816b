"""An assistant's message from its parts: whole, or as the deltas of a stream.

A call's first delta has index, id, type and name with empty arguments, those that follow only the
index and more arguments: the form in which OpenAI's SDK puts them together again.
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal

import msgspec

from baton.parsers.parts import CallArguments, CallStart, Content, Part, Reasoning

DrawId = Callable[[], str]
_SHORT: Final = string.ascii_letters + string.digits


def draw_call_id(prefix: str = "call_") -> str:
    return prefix + secrets.token_hex(12)


def draw_short_call_id() -> str:
    """Nine letters and digits: all that Mistral's chat templates accept."""
    return "".join(secrets.choice(_SHORT) for _ in range(9))


class Function(msgspec.Struct):
    name: str
    arguments: str = ""


class ToolCallMade(msgspec.Struct):
    id: str
    function: Function
    type: Literal["function"] = "function"


class AssistantMessage(msgspec.Struct):
    """`reasoning` and `reasoning_content` are the same text: vLLM's names for it, new and old."""

    content: str | None
    role: str = "assistant"
    refusal: str | None = None
    tool_calls: list[ToolCallMade] | msgspec.UnsetType = msgspec.UNSET
    reasoning: str | None = None
    reasoning_content: str | None = None


def message_of(
    parts: Sequence[Part], draw_id: DrawId, role: str = "assistant", lead: str = ""
) -> AssistantMessage:
    """The whole message, `lead` before its content, which is null where there are calls or
    reasoning and no more."""
    content = lead + "".join(part.text for part in parts if isinstance(part, Content))
    reasoning = "".join(part.text for part in parts if isinstance(part, Reasoning))
    calls: dict[int, ToolCallMade] = {}
    arguments: dict[int, list[str]] = {}
    for part in parts:
        if isinstance(part, CallStart):
            calls[part.index] = ToolCallMade(draw_id(), Function(part.name))
            arguments[part.index] = []
        elif isinstance(part, CallArguments):
            arguments[part.index].append(part.text)
    for index, call in calls.items():
        call.function.arguments = "".join(arguments[index])
    return AssistantMessage(
        content or (None if calls or reasoning else ""),
        role,
        tool_calls=list(calls.values()) or msgspec.UNSET,
        reasoning=reasoning or None,
        reasoning_content=reasoning or None,
    )


def delta_of(part: Part, draw_id: DrawId) -> dict[str, Any]:
    """The `delta` of a stream's chunk."""
    match part:
        case Content(text):
            return {"content": text}
        case Reasoning(text):
            return {"reasoning": text, "reasoning_content": text}
        case CallStart(index, name):
            function = {"name": name, "arguments": ""}
            call = {"index": index, "id": draw_id(), "type": "function", "function": function}
            return {"tool_calls": [call]}
        case CallArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
