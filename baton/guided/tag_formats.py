"""Translates the formats of structural tags that clients give into those of structural_tags.py.

A format of tokens, a `dispatch` or a style becomes an older format with the same meaning, in which
tokens are given by their texts. An unknown format raises UnsupportedFeature. Pure; no I/O.

Source: xgrammar's structural tag formats.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final, cast

from baton.guided.spec import FIELD, Format
from baton.protocol.errors import InvalidRequest, UnsupportedFeature

_ALLOWED: Final[dict[str, frozenset[str]]] = {
    "const_string": frozenset({"value"}),
    "json_schema": frozenset({"json_schema", "style"}),
    "qwen_xml_parameter": frozenset({"json_schema"}),
    "any_text": frozenset({"excludes"}),
    "regex": frozenset({"pattern", "excludes"}),  # excludes: what the text of a tag must not hold
    "grammar": frozenset({"grammar"}),
    "sequence": frozenset({"elements"}),
    "or": frozenset({"elements"}),
    "optional": frozenset({"content"}),
    "plus": frozenset({"content"}),
    "star": frozenset({"content"}),
    "repeat": frozenset({"content", "min", "max"}),
    "tag": frozenset({"begin", "content", "end"}),
    "triggered_tags": frozenset(
        {"triggers", "tags", "at_least_one", "stop_after_first", "excludes"}
    ),
    "tags_with_separator": frozenset({"tags", "separator", "at_least_one", "stop_after_first"}),
    "dispatch": frozenset({"rules", "loop", "excludes"}),
    "token": frozenset({"token"}),
    "any_tokens": frozenset({"exclude_tokens"}),
    "token_dispatch": frozenset({"rules", "loop", "exclude_tokens"}),
    "token_triggered_tags": frozenset(
        {"trigger_tokens", "tags", "at_least_one", "stop_after_first", "exclude_tokens"}
    ),
}


def format_of_tag(text: str) -> Format:
    """Return the format of a structural tag in either spelling. Raises InvalidRequest."""
    try:
        given: object = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise wrong(f"it is not JSON: {error}") from error
    tag = object_of(given, "it")
    if "format" in tag:
        return object_of(tag["format"], "format")
    structures, triggers = tag.get("structures"), tag.get("triggers")
    if not isinstance(structures, list) or not structures or not isinstance(triggers, list):
        raise wrong("it needs either format, or structures and triggers")
    tags: list[dict[str, Any]] = []
    for item in cast("list[object]", structures):
        one = object_of(item, "structures")
        schema = one.get("schema", True)
        if isinstance(schema, str):
            try:
                schema = json.loads(schema)
            except (ValueError, RecursionError) as error:
                raise wrong(f"a schema is not JSON: {error}") from error
        content = {"type": "json_schema", "json_schema": schema}
        tags.append({"begin": one.get("begin"), "content": content, "end": one.get("end", "")})
    return {"type": "triggered_tags", "triggers": triggers, "tags": tags}


def known(form: Mapping[str, Any]) -> Format:
    """Return a format that structural_tags.py can write.

    A format of tokens, a `dispatch` or a style becomes an older format with the same meaning.
    Raises UnsupportedFeature for an unknown format.
    """
    kind = form.get("type")
    allowed = _ALLOWED.get(kind) if isinstance(kind, str) else None
    plain = {key: value for key, value in form.items() if key != "type"}
    extra = [key for key, value in plain.items() if value and key not in (allowed or ())]
    if allowed is None or extra:
        name = repr(kind) if allowed is None else extra[0]
        raise UnsupportedFeature(f"structural_tag: {name} is not supported", field=FIELD)
    match kind:
        case "token":
            return {"type": "const_string", "value": plain.get("token")}
        case "any_tokens":
            return {"type": "any_text", "excludes": plain.get("exclude_tokens")}
        case "token_triggered_tags":
            plain["triggers"] = plain.pop("trigger_tokens", None)
            plain["excludes"] = plain.pop("exclude_tokens", None)
            return {"type": "triggered_tags", **plain}
        case "dispatch" | "token_dispatch":
            tags = [{"begin": begin, "content": then, "end": ""} for begin, then in _rules(form)]
            return {
                "type": "triggered_tags",
                "triggers": [tag["begin"] for tag in tags],
                "tags": tags,
                "stop_after_first": plain.get("loop") is False,
                "excludes": plain.get("excludes") or plain.get("exclude_tokens"),
            }
        case "json_schema" if plain.get("style") == "qwen_xml":
            return {"type": "qwen_xml_parameter", "json_schema": plain.get("json_schema")}
        case _:
            return dict(form)


def _rules(form: Mapping[str, Any]) -> list[tuple[object, object]]:
    """Return the rules of a `dispatch`: each pattern with what follows it."""
    rules = form.get("rules")
    if not isinstance(rules, list) or not rules:
        raise wrong("rules must be a list that is not empty")
    for rule in cast("list[object]", rules):
        if not isinstance(rule, list) or len(cast("list[object]", rule)) != 2:
            raise wrong("each of the rules is a pattern and a format")
    return [(pattern, content) for pattern, content in cast("list[list[object]]", rules)]


def excludes_of(form: Mapping[str, Any]) -> list[str]:
    """Return the texts that the text of a format must not contain."""
    given = form.get("excludes") or []
    if not isinstance(given, list):
        raise wrong("excludes must be a list of texts")
    return [text_of(one, "excludes") for one in cast("list[object]", given)]


def object_of(value: object, name: str) -> Format:
    if not isinstance(value, dict):
        raise wrong(f"{name} must be an object")
    return cast("dict[str, Any]", value)


def objects_of(form: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    items = form.get(name)
    if not isinstance(items, list) or not items:
        raise wrong(f"{name} must be a list that is not empty")
    return [object_of(item, name) for item in cast("list[object]", items)]


def text_of(value: object, name: str, empty: bool = False) -> str:
    """Return a text; if `value` names a token, return the token's text."""
    if isinstance(value, dict) and cast("dict[str, object]", value).get("type") == "token":
        value = cast("dict[str, object]", value).get("token")
    if not isinstance(value, str):
        raise UnsupportedFeature(f"structural_tag: {name} must be a text", field=FIELD)
    if not value and not empty:
        raise wrong(f"{name} must not be empty")
    return value


def wrong(why: str) -> InvalidRequest:
    return InvalidRequest(f"structural_tag: {why}", field=FIELD)
