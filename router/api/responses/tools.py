"""Translate the tools of /v1/responses to the functions of a chat, and their names back. Pure.

function        becomes a function of the chat
custom          becomes a function with one text, `input`; its calls are custom_tool_call items
namespace       its functions and custom tools become functions with the name NAMESPACE__NAME
any other type  is OpenAI's own tool (web_search, ...): left out with a note, or refused
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn, cast

from baton.protocol.errors import InvalidRequest, UnsupportedFeature
from router.api.openai.chat import MAX_NAME_CHARS
from router.api.openai.chat_rules import ALLOWED
from router.api.responses.custom_input import FIELD

Tool = dict[str, Any]
_INPUT: Final[Tool] = {
    "type": "object",
    "properties": {FIELD: {"type": "string"}},
    "required": [FIELD],
    "additionalProperties": False,
}
_CALLED: Final = ("function", "custom")


@dataclass(frozen=True, slots=True)
class ClientTool:
    """A tool under the client's name. `custom`: its input is a text, not arguments."""

    name: str
    namespace: str | None = None
    custom: bool = False


@dataclass(frozen=True, slots=True)
class Toolbox:
    """The tools of one body. `functions`: the functions that the model is shown. `known`: the
    model's name -> the client's tool. `places`: a place in `functions` -> the tool's place in the
    body, if they differ. `kept`: the client's tools that are served, for the reply. `notes`: which
    tools were left out, and which formats are not enforced."""

    functions: list[Tool] = field(default_factory=list[Tool])
    known: dict[str, ClientTool] = field(default_factory=dict[str, ClientTool])
    places: dict[str, str] = field(default_factory=dict[str, str])
    kept: list[Tool] = field(default_factory=list[Tool])
    notes: list[str] = field(default_factory=list[str])

    def add(self, tool: Tool, where: str, namespace: str | None = None) -> None:
        """Add a function or a custom tool to the box. Raises InvalidRequest, naming `where`."""
        custom = tool["type"] == "custom"
        name = _name_of(tool, where)
        flat = flat_name(namespace, name)
        function = self._custom(tool, where) if custom else _function(tool)
        place = f"tools[{len(self.functions)}]"
        if place != where:
            self.places[place] = where
        self.functions.append({"type": "function", "function": {**function, "name": flat}})
        self.known[flat] = ClientTool(name, namespace, custom)

    def _custom(self, tool: Tool, where: str) -> Tool:
        told = _description_of(tool, where)
        form: Any = tool.get("format")
        form = {"type": "text"} if form is None else form
        if not isinstance(form, dict):
            _refuse(f"{where}.format", "must be an object")
        given = cast("Tool", form)
        match given.get("type"), given.get("definition"):
            case "text", _:
                pass
            case "grammar", str(definition):
                told = f"{told}\n\nIts input follows this grammar:\n{definition}".strip()
                self.notes.append(f"{where}.format: the model is shown the grammar, not held to it")
            case _:
                _refuse(f"{where}.format", "must be text, or a grammar with its definition")
        described = {"description": told} if told else {}
        return {"name": "", **described, "parameters": _INPUT}


def toolbox_of(given: Sequence[Tool], drops_others: bool) -> Toolbox:
    """Return the tools of a body. `drops_others`: leave OpenAI's own tools out instead of refusing
    them. Raises InvalidRequest or UnsupportedFeature, naming the place of the tool at fault."""
    box = Toolbox()
    for index, tool in enumerate(given):
        where = f"tools[{index}]"
        kind = tool.get("type")
        if kind == "namespace":
            _add_namespace(box, tool, where)
        elif kind in _CALLED:
            box.add(tool, where)
        elif drops_others and isinstance(kind, str):
            box.notes.append(f"{where}: {kind[:64]} is not served here and was left out")
            continue
        else:
            _refuse_type(where, kind)
        box.kept.append(_as_told(tool))
    return box


def flat_name(namespace: str | None, name: str) -> str:
    """Return the model's name of a tool."""
    return name if namespace is None else f"{namespace.rstrip('_')}__{name}"


def choice_of(given: str | Tool | None, box: Toolbox) -> str | Tool | None:
    """Return the chat's tool_choice. Raises InvalidRequest if the chosen tool is not there."""
    if not isinstance(given, dict):
        return given
    kind = given.get("type")
    if kind == ALLOWED:
        some: Any = given.get("tools")
        if isinstance(some, list):
            listed = cast("list[Any]", some)
            some = [
                one for tool in listed if not _other(tool) for one in _named(tool, box) or [tool]
            ]
        return {"type": ALLOWED, ALLOWED: {"mode": given.get("mode"), "tools": some}}
    if kind not in _CALLED or not isinstance(given.get("name"), str):
        message = "tool_choice must be none, auto, required, a named function or custom tool"
        raise UnsupportedFeature(message, field="tool_choice")
    found = _named(given, box)
    if not found:
        message = f"tool_choice: there is no tool {given['name'][:80]!r} of type {kind}"
        raise InvalidRequest(message, field="tool_choice.name")
    return found[0]


def _other(tool: Any) -> bool:
    """Whether an entry of `allowed_tools` is one of OpenAI's own tools; it is ignored then."""
    kind: Any = tool.get("type") if isinstance(tool, dict) else None
    return isinstance(kind, str) and kind not in (*_CALLED, "namespace")


def _named(tool: Any, box: Toolbox) -> list[Tool]:
    """Return the functions of the chat that a choice names: one tool, all tools of a namespace, or
    none."""
    given: Tool = tool if isinstance(tool, dict) else {}
    kind, name, namespace = given.get("type"), given.get("name"), given.get("namespace")
    tools = box.known.items()
    if kind == "namespace":
        found = [flat for flat, known in tools if known.namespace == name]
    else:
        alike = [(flat, known) for flat, known in tools if known.name == name]
        custom = {"function": False, "custom": True}.get(cast("str", kind))
        found = [
            flat
            for flat, known in alike
            if known.custom is custom and namespace in (None, known.namespace)
        ][:1]
    return [{"type": "function", "function": {"name": flat}} for flat in found]


def _add_namespace(box: Toolbox, tool: Tool, where: str) -> None:
    namespace, members = _name_of(tool, where), tool.get("tools")
    _description_of(tool, where)
    if not isinstance(members, list):
        _refuse(f"{where}.tools", "must be a list of tools")
    for number, member in enumerate(cast("list[object]", members)):
        place = f"{where}.tools[{number}]"
        if not isinstance(member, dict):
            _refuse(place, "must be an object")
        one = cast("Tool", member)
        if one.get("type") not in _CALLED:
            _refuse_type(place, one.get("type"))
        box.add(one, place, namespace)


def _function(tool: Tool) -> Tool:
    """Return a tool without its `type` and without nulls. SDKs write null for an absent field, and
    chat templates would print it."""
    return {key: value for key, value in tool.items() if key != "type" and value is not None}


def _as_told(tool: Tool) -> Tool:
    """Return a tool as replies have it: a function always has `parameters` and `strict`."""
    return {"parameters": None, "strict": None, **tool} if tool["type"] == "function" else tool


def _name_of(tool: Tool, where: str) -> str:
    name = tool.get("name")
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_CHARS:
        _refuse(f"{where}.name", f"must be a string of 1 to {MAX_NAME_CHARS} characters")
    return name


def _description_of(tool: Tool, where: str) -> str:
    told: Any = tool.get("description")
    if not isinstance(told, str | None):
        _refuse(f"{where}.description", "must be a string")
    return told or ""


def _refuse(where: str, what: str) -> NoReturn:
    raise InvalidRequest(f"{where} {what}", field=where)


def _refuse_type(where: str, kind: object) -> NoReturn:
    message = (
        f"{where}: only tools of type function, custom and namespace are supported, not"
        f" {str(kind)[:64]!r}"
    )
    raise UnsupportedFeature(message, field=f"{where}.type")
