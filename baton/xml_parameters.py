"""Tool parameters as tags, Qwen3-Coder's way, as a Lark grammar of their schema.

    <parameter=city>
    Oslo
    </parameter>
    <parameter=days>
    3
    </parameter>

A value of type `string` is plain text, any other JSON. Parameters come in the order of the schema;
what is not required may be left out. Text with a bound on its length has no `<`, so that the bound
and the closing tag can both be seen. Source: Qwen3-Coder's chat template.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Protocol, cast

BEGIN: Final = "<parameter="
END: Final = "\n</parameter>"


class Parts(Protocol):
    """What structural_tags offers to those who write rules."""

    def rule(self, expression: str) -> str: ...
    def json(self, schema: Any) -> str: ...
    def match(self, pattern: str, end: str) -> str: ...
    def literal(self, text: str) -> str: ...
    def until(self, end: str) -> str: ...


def parameters(parts: Parts, schema: Mapping[str, Any]) -> str:
    """The expression of all parameters, each with the line break after it."""
    properties = cast("Mapping[str, Any]", schema.get("properties") or {})
    required = cast("list[str]", schema.get("required") or [])
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    written: list[str] = []
    for name, spec in properties.items():
        begin, value = parts.literal(f"{BEGIN}{name}>\n"), _value(parts, spec, shared)
        rule = parts.rule(f"{begin} {value} {parts.literal(chr(10))}")
        written.append(rule if name in required else f"({rule})?")
    return f"({' '.join(written)})" if written else '""'


def _value(parts: Parts, spec: Any, shared: Mapping[str, Any]) -> str:
    """One value and its closing tag."""
    if not isinstance(spec, Mapping):
        return parts.until(END)
    plain = cast("Mapping[str, Any]", spec)
    if plain.get("type") != "string":
        return f"{parts.json({**plain, **shared})} {parts.literal(END)}"
    if "const" in plain or "enum" in plain:
        choices = [plain["const"]] if "const" in plain else plain["enum"]
        texts = [parts.literal(choice) for choice in choices if isinstance(choice, str)]
        return f"({' | '.join(texts)}) {parts.literal(END)}" if texts else parts.until(END)
    if isinstance(plain.get("pattern"), str):
        return parts.match(_whole(plain["pattern"]), END)
    least, most = plain.get("minLength"), plain.get("maxLength")
    if least or most is not None:
        bounds = f"{{{least or 0},{'' if most is None else most}}}"
        return parts.match(f"[^<]{bounds}", END)
    return parts.until(END)


def _whole(pattern: str) -> str:
    """A schema's pattern may match anywhere; where it has no anchor, text may stand around it."""
    before = "" if pattern.startswith("^") else "[^<]*"
    after = "" if pattern.endswith("$") and not pattern.endswith("\\$") else "[^<]*"
    bare = pattern.removeprefix("^")
    return f"{before}({bare[:-1] if not after else bare}){after}"
