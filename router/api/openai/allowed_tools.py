"""tool_choice `allowed_tools`: OpenAI's way to offer some of the tools, or have one called. Pure.

    {"type": "allowed_tools", "allowed_tools": {"mode": "auto" | "required", "tools": [
        {"type": "function", "function": {"name": "get_weather"}}]}}

The others are not shown to the model, so it cannot call them; the rest is the plain choice `mode`.
"""

from __future__ import annotations

from typing import Any, Final, cast

from baton.protocol.errors import InvalidRequest
from router.api.openai.bodies import ChatBody

KIND: Final = "allowed_tools"
FIELD: Final = "tool_choice.allowed_tools"
_MODES: Final = ("auto", "required")


def apply_allowed(body: ChatBody) -> None:
    """Mutates the tools and the choice of a body that allows some of them; no other.

    Raises InvalidRequest, naming the field.
    """
    choice = body.tool_choice
    if not isinstance(choice, dict) or choice.get("type") != KIND:
        return
    allowed = choice.get(KIND)
    if not isinstance(allowed, dict):
        raise InvalidRequest(f"{FIELD} must be an object", field=FIELD)
    mode, given = (cast("dict[str, Any]", allowed).get(name) for name in ("mode", "tools"))
    if mode not in _MODES:
        raise InvalidRequest(f"{FIELD}.mode must be auto or required", field=f"{FIELD}.mode")
    if not isinstance(given, list) or not given:
        message = f"{FIELD}.tools must be a list of functions, not empty"
        raise InvalidRequest(message, field=f"{FIELD}.tools")
    offered = {_name_of(tool): tool for tool in body.tools or ()}
    names: set[str] = set()
    for index, tool in enumerate(cast("list[object]", given)):
        name = _name_of(tool)
        if name is None or name not in offered:
            field = f"{FIELD}.tools[{index}]"
            message = f"{field} must be {{type: function, function: {{name: ...}}}} of one of tools"
            raise InvalidRequest(message, field=field)
        names.add(name)
    body.tools = [tool for name, tool in offered.items() if name in names]
    body.tool_choice = mode


def _name_of(tool: object) -> str | None:
    """None for what is no function with a name."""
    found = cast("dict[str, Any]", tool) if isinstance(tool, dict) else {}
    function = found.get("function")
    name = cast("dict[str, Any]", function).get("name") if isinstance(function, dict) else None
    return name if found.get("type") == "function" and isinstance(name, str) else None
