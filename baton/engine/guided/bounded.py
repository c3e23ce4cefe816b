"""Texts of bounded length in structural tags, spelled so that xgrammar keeps them JSON.

In a text with `minLength` or `maxLength` it lets control characters pass, which JSON escapes. Where
all of an answer is JSON the vocabulary is without them; beside a tag they may be text. So the bound
becomes a pattern that leaves them out. Pure; no I/O.
"""

from __future__ import annotations

import json
from typing import Any, Final, cast

from baton.structural_tags import format_of, holds_json

_MAPS: Final = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_VALUES: Final = frozenset({"const", "enum", "default", "examples"})
_LENGTHS: Final = frozenset({"minLength", "maxLength"})
_CHARACTER: Final = r'[^"\\\x00-\x1f]'


def bounded_tag(text: str) -> str:
    """A structural tag of the same texts. Raises InvalidRequest for what is none."""
    return json.dumps({"type": "structural_tag", "format": _form(format_of(text))})


def _form(form: Any) -> Any:
    if isinstance(form, list):
        return [_form(item) for item in cast("list[Any]", form)]
    if not isinstance(form, dict):
        return form
    plain = cast("dict[str, Any]", form)
    in_json = holds_json(plain)
    return {
        key: (_schema(value) if in_json else value) if key == "json_schema" else _form(value)
        for key, value in plain.items()
    }


def _schema(schema: Any, is_map: bool = False) -> Any:
    """`is_map`: its keys are names, not keywords."""
    if isinstance(schema, list):
        return [_schema(item) for item in cast("list[Any]", schema)]
    if not isinstance(schema, dict):
        return schema
    plain = {
        key: value if key in _VALUES and not is_map else _schema(value, not is_map and key in _MAPS)
        for key, value in cast("dict[str, Any]", schema).items()
    }
    least, most = plain.get("minLength", 0), plain.get("maxLength", "")
    if is_map or not plain.keys() & _LENGTHS or "pattern" in plain or "format" in plain:
        return plain
    if type(least) is not int or (type(most) is not int and most != ""):
        return plain
    others = {key: value for key, value in plain.items() if key not in _LENGTHS}
    return {**others, "pattern": f"^{_CHARACTER}{{{least},{most}}}$"}
