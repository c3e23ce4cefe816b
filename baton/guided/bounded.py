"""Structural tags as xgrammar must read them: bounded texts stay JSON, white space is bounded.

In a text with `minLength` or `maxLength` it lets control characters pass, which JSON escapes. Where
all of an answer is JSON the vocabulary is without them; beside a tag they may be text. So the bound
becomes a pattern that leaves them out. Pure; no I/O.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Final, cast

from baton.guided.structural_tags import format_of, holds_json

_MAPS: Final = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_VALUES: Final = frozenset({"const", "enum", "default", "examples"})
_LENGTHS: Final = frozenset({"minLength", "maxLength"})
_CHARACTER: Final = r'[^"\\\x00-\x1f]'


def bounded_tag(text: str, grammar_of: Callable[[Any], str]) -> str:
    """A structural tag of the same texts, with the grammars of its schemas in their places: for a
    schema it takes no bound of the white space. Raises InvalidRequest for what is none."""
    return json.dumps({"type": "structural_tag", "format": _form(format_of(text), grammar_of)})


def _form(form: Any, grammar_of: Callable[[Any], str]) -> Any:
    if isinstance(form, list):
        return [_form(item, grammar_of) for item in cast("list[Any]", form)]
    if not isinstance(form, dict):
        return form
    plain = cast("dict[str, Any]", form)
    if holds_json(plain):
        schema = _schema(plain.get("json_schema", True))
        return {"type": "grammar", "grammar": grammar_of(schema)}
    return {
        key: value if key == "json_schema" else _form(value, grammar_of)
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
