"""Grammars of tool calls: what a model must write so that this router's parsers read a valid call.

Each format of router/parsers writes its calls as structural tags, which both backends follow; here
is what of a client's tools they must follow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

from baton.guided.grammars import lenient
from router.parsers.grammar import Form, Tool, ToolFormat

# A function without any takes none, says OpenAI.
_NO_PARAMETERS: Final = {"type": "object", "properties": {}, "additionalProperties": False}


def forced(form: ToolFormat, tools: Sequence[Mapping[str, Any]], several: bool) -> Form:
    """Calls of `tools`, at least one, and no text: tool_choice required, or a function."""
    return form.writer.forced([_tool(tool) for tool in tools], several)


def offered(form: ToolFormat, tools: Sequence[Mapping[str, Any]], several: bool) -> Form:
    """Text or calls, each a valid one: tools that are strict, where the model may choose."""
    return form.writer.offered([_tool(tool) for tool in tools], several)


def _tool(tool: Mapping[str, Any]) -> Tool:
    function = cast("Mapping[str, Any]", tool["function"])
    given = cast("Mapping[str, Any] | None", function.get("parameters"))
    schema = dict(_NO_PARAMETERS) if given is None else {"type": "object", **given}
    if function.get("strict") is not True:
        schema = lenient(schema)
    return Tool(str(function["name"]), schema)
