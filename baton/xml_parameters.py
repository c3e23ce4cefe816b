"""Tool parameters as tags, Qwen3-Coder's way, as a Lark grammar of their schema.

    <parameter=city>
    Oslo
    </parameter>
    <parameter=days>
    3
    </parameter>

A value of type `string`, or of a schema that names no type, is plain text, any other JSON (also of
`["string", "null"]`: the text `null` could be either). Parameters come in the order of the schema;
what is not required may be left out. Text with a bound on its length has no `<`, so that the bound
and the closing tag can both be seen. Source: Qwen3-Coder's chat template.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Protocol, cast

from baton.schema_kinds import says_nothing

BEGIN: Final = "<parameter="
PARAMETER_END: Final = "</parameter>"
END: Final = f"\n{PARAMETER_END}"


class Parts(Protocol):
    """What structural_tags offers to those who write rules."""

    def rule(self, expression: str) -> str: ...
    def json(self, schema: Any) -> str: ...
    def match(self, pattern: str, end: str, without: str = "") -> str: ...
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


def is_text(spec: object) -> bool:
    """Whether a value of this schema is written as plain text, not as JSON: choices that hold the
    closing tag could not be told from their end."""
    if says_nothing(spec):
        return True
    plain = cast("Mapping[str, Any]", spec)
    if plain.get("type") != "string":
        return False
    return not any(
        isinstance(choice, str) and PARAMETER_END in choice for choice in _choices(plain)
    )


def _choices(spec: Mapping[str, Any]) -> list[object]:
    """The values that a schema lists."""
    if "const" in spec:
        return [spec["const"]]
    listed: object = spec.get("enum")
    return cast("list[object]", listed) if isinstance(listed, list) else []


def _value(parts: Parts, spec: Any, shared: Mapping[str, Any]) -> str:
    """One value and its closing tag."""
    if not isinstance(spec, Mapping):
        return parts.until(END)
    plain = cast("Mapping[str, Any]", spec)
    if not is_text(plain):
        return f"{parts.json({**plain, **shared})} {parts.literal(END)}"
    if "const" in plain or "enum" in plain:
        texts = [parts.literal(choice) for choice in _choices(plain) if isinstance(choice, str)]
        return f"({' | '.join(texts)}) {parts.literal(END)}" if texts else parts.until(END)
    if isinstance(plain.get("pattern"), str):
        return parts.match(_whole(plain["pattern"]), END, without=PARAMETER_END)
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
