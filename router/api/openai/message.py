"""Make an assistant's message from its parts: complete, or as the deltas of a stream.

The first delta of a call has its index, id, type and name, and empty arguments. The deltas that
follow have the index and more of the arguments. OpenAI's SDK joins deltas of this form.
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
    """Return an id of nine letters and digits, the only form that Mistral's templates accept."""
    return "".join(secrets.choice(_SHORT) for _ in range(9))


class Function(msgspec.Struct):
    name: str
    arguments: str = ""


class ToolCallMade(msgspec.Struct):
    id: str
    function: Function
    type: Literal["function"] = "function"


class AssistantMessage(msgspec.Struct):
    """An assistant's message. `reasoning` and `reasoning_content` hold the same text, under vLLM's
    new and old name."""

    content: str | None
    role: str = "assistant"
    refusal: str | None = None
    tool_calls: list[ToolCallMade] | msgspec.UnsetType = msgspec.UNSET
    reasoning: str | None = None
    reasoning_content: str | None = None


def message_of(
    parts: Sequence[Part], draw_id: DrawId, role: str = "assistant", lead: str = ""
) -> AssistantMessage:
    """Return the complete message. `lead`: text before its content. The content is null if it is
    empty and the message has calls or reasoning."""
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
    """Return the field `delta` of the chunk that streams `part`, a piece of the answer."""
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
