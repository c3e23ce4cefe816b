"""Tool parameters as tags, each value between its own marks, as the format of a structural tag.

    <parameter=city>
    Oslo
    </parameter>
    <parameter=days>
    3
    </parameter>

A value of type `string`, or of a schema without a type, is plain text. Any other value is JSON;
this includes the type `["string", "null"]`, for which the text `null` would be ambiguous.
Parameters come in the order of the schema, and those that are not required may be left out. Text
with a limit on its length contains no `<`, so that both the limit and the closing tag can be seen.
Pure. Source: Qwen3-Coder's chat template.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, cast

from baton.guided.schema_kinds import says_nothing
from baton.guided.spec import OPTIONS, Format

_DEFINITIONS: Final = ("$defs", "definitions")


@dataclass(frozen=True, slots=True)
class ParameterMarks:
    """What stands around one parameter: `key` NAME `key_end` `value` VALUE `value_end`.

    The marks include the white space that models write. `json_key_end` ends the name instead of
    `key_end` if the value is JSON and `json_key_end` is not empty.
    """

    key: str
    key_end: str
    value_end: str
    value: str = ""
    json_key_end: str = ""

    @property
    def markers(self) -> tuple[str, ...]:
        """All marks, without white space at their ends."""
        return (self.key, self.key_end.strip(), self.value, self.close, self.json_key_end)

    @property
    def close(self) -> str:
        """The mark that ends a value, without white space."""
        return self.value_end.strip()


QWEN: Final = ParameterMarks("<parameter=", ">\n", "\n</parameter>\n")


def parameters(schema: Mapping[str, Any], marks: ParameterMarks) -> list[Format]:
    """Return the formats of all parameters, in the order of the schema."""
    properties = cast("Mapping[str, Any]", schema.get("properties") or {})
    required = cast("list[str]", schema.get("required") or [])
    written: list[Format] = []
    for name, spec in properties.items():
        one = _parameter(marks, name, spec, schema)
        written.append(one if name in required else {"type": "optional", "content": one})
    return written


def is_text(spec: object, close: str) -> bool:
    """Whether a value of this schema is written as plain text, not as JSON.

    A schema with a choice that contains the closing tag needs JSON, because the tag inside the
    value would look like its end.
    """
    if says_nothing(spec):
        return True
    plain = cast("Mapping[str, Any]", spec)
    if plain.get("type") != "string":
        return False
    return not any(isinstance(choice, str) and close in choice for choice in _choices(plain))


def _choices(spec: Mapping[str, Any]) -> list[object]:
    """Return the values that a schema lists."""
    if "const" in spec:
        return [spec["const"]]
    listed: object = spec.get("enum")
    return cast("list[object]", listed) if isinstance(listed, list) else []


def json_form(spec: Mapping[str, Any], root: Mapping[str, Any]) -> Format:
    """Return the format of a JSON value of the part `spec` of the schema `root`.

    It gets the options of `root`, and the definitions to which its references lead.
    """
    keys = (OPTIONS, *_DEFINITIONS) if _refers(spec) else (OPTIONS,)
    shared = {key: root[key] for key in keys if key in root}
    return {"type": "json_schema", "json_schema": {**spec, **shared}}


def _refers(spec: object) -> bool:
    if isinstance(spec, list):
        return any(map(_refers, cast("list[object]", spec)))
    if not isinstance(spec, Mapping):
        return False
    plain = cast("Mapping[str, object]", spec)
    return "$ref" in plain or any(map(_refers, plain.values()))


def _parameter(marks: ParameterMarks, name: str, spec: Any, root: Mapping[str, Any]) -> Format:
    plain = cast("Mapping[str, Any]", spec) if isinstance(spec, Mapping) else {}
    begin = f"{marks.key}{name}{marks.key_end}{marks.value}"
    if not is_text(plain, marks.close):
        if marks.json_key_end:
            begin = f"{marks.key}{name}{marks.json_key_end}{marks.value}"
        return _tag(begin, json_form(plain, root), marks.value_end)
    text = string_form(plain, marks.close)
    if text["type"] != "any_text":
        return _tag(begin, text, marks.value_end)
    after = marks.value_end[marks.value_end.index(marks.close) + len(marks.close) :]
    free = _tag(begin, text, marks.close)
    if not after:
        return free
    return {"type": "sequence", "elements": [free, {"type": "const_string", "value": after}]}


def string_form(spec: Mapping[str, Any], close: str) -> Format:
    """Return the format of a string that `close` ends: the content of a tag with that end."""
    choices = [choice for choice in _choices(spec) if isinstance(choice, str)]
    if choices:
        texts = [{"type": "const_string", "value": choice} for choice in choices]
        return {"type": "or", "elements": texts}
    pattern = _pattern(spec, f"[^{re.escape(close[0])}]")
    if pattern is None:
        return {"type": "any_text"}
    return {"type": "regex", "pattern": pattern, "excludes": [close]}


def _tag(begin: str, content: Format, end: str) -> Format:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def _pattern(spec: Mapping[str, Any], other: str) -> str | None:
    """Return the pattern that a text must match, None if the text is free.

    `other` is a pattern for any character that cannot begin the closing tag.
    """
    if isinstance(spec.get("pattern"), str):
        return _whole(spec["pattern"], other)
    least, most = spec.get("minLength"), spec.get("maxLength")
    if not least and most is None:
        return None
    return f"{other}{{{least or 0},{'' if most is None else most}}}"


def _whole(pattern: str, other: str) -> str:
    """Return a pattern for the whole text: a schema's pattern without an anchor may match
    anywhere.
    """
    before = "" if pattern.startswith("^") else f"{other}*"
    after = "" if pattern.endswith("$") and not pattern.endswith("\\$") else f"{other}*"
    bare = pattern.removeprefix("^")
    return f"{before}({bare[:-1] if not after else bare}){after}"
