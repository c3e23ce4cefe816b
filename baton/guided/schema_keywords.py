"""What xgrammar follows of a JSON schema; it ignores the rest without a word.

It reads one thing of each schema: `$ref`, else `const`, `enum`, `anyOf`, `allOf`, else the keywords
of `type`. So the keywords here are those that it was seen to enforce, in the places where it looks
at them, and anything else has it refused: a schema that must be followed is followed or refused.
Pure; needs no xgrammar, so the router and the nodes ask the same. Not seen: that in objects which
allow other properties, a property's name may be spelled with escapes.

Source: experiments with xgrammar 0.2.8 (tests/engine/test_guided_keywords.py repeats them).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final, cast

from baton.guided.grammars import FIELD, is_lenient
from baton.guided.schema_kinds import target_of
from baton.guided.structural_tags import format_of, holds_json
from baton.protocol.errors import InvalidRequest
from baton.protocol.sampling import GuidedDecoding

Schema = Mapping[str, Any]

# They say nothing of a value, or are read where something refers to them.
_NOTES: Final = frozenset(
    {
        "title", "description", "default", "example", "examples", "deprecated", "readOnly",
        "writeOnly", "nullable", "contentEncoding", "contentMediaType", "$comment", "$schema",
        "$defs", "definitions",
    }
)  # fmt: skip
_HEADS: Final = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
_TYPED: Final[dict[str, frozenset[str]]] = {
    "object": frozenset({"properties", "required", "additionalProperties"}),
    "array": frozenset({"items", "prefixItems", "minItems", "maxItems"}),
    "string": frozenset({"minLength", "maxLength", "pattern", "format"}),
    "number": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}),
}
_KNOWN: Final = frozenset({"type", *_HEADS}).union(*_TYPED.values())
# Not date and time (30 February), ipv4 (leading zeros), hostname (long labels), email (escapes
# that JSON lacks).
_FORMATS: Final = frozenset({"uuid", "ipv6", "duration", "uri", "uri-reference"})
_BOUNDS: Final = _TYPED["number"]
MAX_COUNT: Final = 128  # of the same part in a pattern: beyond, what JSON escapes comes through
_EXACT: Final = 1 << 53  # whole numbers up to here are read as they are
_PYTHON: Final[dict[str, tuple[type, ...]]] = {
    "object": (dict,), "array": (list,), "string": (str,), "boolean": (bool,),
    "null": (type(None),), "integer": (int,), "number": (int, float),
}  # fmt: skip
# A pattern is matched from end to end, as raw text: what JSON escapes is none, anchors in the
# middle and look-around are passed over.
_ESCAPE: Final = r"\\[dDwWsS^$.*+?()\[\]{}|/_@#%&=:;,<>!~' -]"
_CLASS: Final = rf"\[(?!\^?\])\^?(?:[^\x00-\x1f\"\\\[\]]|{_ESCAPE})+\]"
_ATOM: Final = rf"[^\x00-\x1f\"\\\[\]()^$]|{_ESCAPE}|{_CLASS}|\((?:\?:|(?!\?))|\)"
_PATTERN: Final = re.compile(rf"\^?(?:{_ATOM})*\$?")
_COUNT: Final = re.compile(r"(?<=[{,])[0-9]{1,9}(?=[,}])")
_POINTER: Final = re.compile(r"#(/[^/~%]+)*")


def check_xgrammar(guided: GuidedDecoding) -> None:
    """Raise InvalidRequest (field `guided`) for a grammar with a schema that must be followed, not
    `lenient`, and holds what xgrammar ignores."""
    for schema, is_json in _schemas(guided):
        found = not_followed(schema, is_json)
        if found:
            raise InvalidRequest(f"guided: xgrammar does not follow {found}", field=FIELD)


def not_followed(schema: Any, is_json: bool = True) -> str:
    """The first keyword that xgrammar does not follow, "" if it follows all of them. `is_json`:
    else it is a tool's schema whose texts stand between tags."""
    if not isinstance(schema, Mapping):
        return ""
    root = cast("Schema", schema)
    waiting, seen = [root], set[str]()
    while waiting:
        one = waiting.pop()
        found = _ignored(one) or ("" if is_json else _loose(one))
        if found:
            return found
        if "$id" in one and one is not root:
            return "$id"
        parts = list(_parts(one))
        ref = one.get("$ref")
        if isinstance(ref, str) and ref not in seen:
            seen.add(ref)
            target = target_of(ref, root) if _POINTER.fullmatch(ref) else None
            if target is None:
                return f"$ref {ref[:80]!r}"
            parts.append(target)
        waiting += [cast("Schema", part) for part in reversed(parts) if isinstance(part, Mapping)]
    return ""


# ---- one schema ----


def _loose(schema: Schema) -> str:
    """What is not kept of a text between tags: white space around it counts as its own."""
    found = next((key for key in schema if key in _TYPED["string"]), "")
    if found:
        return f"{found} between tags"
    values = [schema.get("const"), *cast("list[Any]", schema.get("enum") or [])]
    return "texts to choose from between tags" if any(isinstance(v, str) for v in values) else ""


def _ignored(schema: Schema) -> str:
    """What is passed over in a schema, its parts apart."""
    plain = [key for key in schema if not _is_note(key)]
    for key in plain:
        if key not in _KNOWN:
            return key
    head = next((key for key in _HEADS if key in schema), None)
    if head is not None:
        return _beside(schema, head, plain)
    types = _types(schema)
    if not types:
        return plain[0] if plain else ""
    for key in plain:
        if _is_read(key, types) and not _follows(schema, key):
            return f"this {key}"
    if "pattern" in schema and (schema.keys() & {"minLength", "maxLength", "format"}):
        return "pattern beside minLength, maxLength or format"
    if "format" in schema and (schema.keys() & {"minLength", "maxLength"}):
        return "format beside minLength or maxLength"
    return ""


def _beside(schema: Schema, head: str, plain: list[str]) -> str:
    """Of a schema with one of _HEADS nothing else is read."""
    value = schema[head]
    if head in ("oneOf", "allOf") and not (isinstance(value, list) and len(value) == 1):  # pyright: ignore[reportUnknownArgumentType]
        return head
    if head == "anyOf" and not value:
        return "an empty anyOf"
    is_literal = head in ("const", "enum")
    values = cast("list[Any]", value if head == "enum" and isinstance(value, list) else [value])
    for key in plain:
        if key == "type" and is_literal and all(_is_of(one, _types(schema)) for one in values):
            continue
        if key != head:
            return f"{key} beside {head}"
    if is_literal and not all(map(_is_exact, values)):
        return f"numbers this large in {head}"
    return ""


def _follows(schema: Schema, key: str) -> bool:
    """Whether the value of a keyword is one that is enforced."""
    value = schema[key]
    if key in _BOUNDS:
        return isinstance(value, int | float) and abs(value) <= _EXACT
    match key:
        case "required":
            known = list(cast("Schema", schema.get("properties") or {}))
            return isinstance(value, list) and all(
                name in known for name in cast("list[Any]", value)
            )
        case "pattern":
            return isinstance(value, str) and _is_plain(value)
        case "format":
            return isinstance(value, str) and value in _FORMATS
        case _:
            return True


def _is_plain(pattern: str) -> bool:
    """Whether a pattern is kept and matches nothing but JSON."""
    counts = [int(count) or 1 for count in _COUNT.findall(pattern)]
    most = math.prod(counts) if "){" in pattern else max(counts, default=1)
    return most <= MAX_COUNT and _PATTERN.fullmatch(pattern) is not None


def _parts(schema: Schema) -> Iterator[Any]:
    """The schemas in a schema that are read."""
    for key in ("anyOf", "oneOf", "allOf", "prefixItems"):
        if isinstance(schema.get(key), list):
            yield from schema[key]
    if isinstance(schema.get("properties"), Mapping):
        yield from schema["properties"].values()
    for key in ("additionalProperties", "items"):
        yield schema.get(key)


def _types(schema: Schema) -> tuple[str, ...]:
    """The types of a schema's values, given or by its keywords; none = any."""
    given = schema.get("type")
    if isinstance(given, str):
        return (given,)
    if isinstance(given, list):
        names = cast("list[Any]", given)
        return tuple(names) if all(isinstance(name, str) for name in names) else ()
    if "properties" in schema or "additionalProperties" in schema:
        return ("object",)
    return ("array",) if "items" in schema or "prefixItems" in schema else ()


def _is_read(key: str, types: tuple[str, ...]) -> bool:
    """Whether a keyword is about one of the types; about others it says nothing."""
    return any(key in _TYPED.get("number" if one == "integer" else one, ()) for one in types)


def _is_of(value: Any, types: tuple[str, ...]) -> bool:
    if isinstance(value, bool):
        return "boolean" in types
    return any(isinstance(value, _PYTHON.get(one, ())) for one in types)


def _is_exact(value: Any) -> bool:
    """Whether a value is written as it was given: its numbers are."""
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, int | float) and not abs(one) <= _EXACT:
            return False
        if isinstance(one, dict):
            waiting += cast("dict[str, Any]", one).values()
        elif isinstance(one, list):
            waiting += cast("list[Any]", one)
    return True


def _is_note(key: str) -> bool:
    return key in _NOTES or key == "$id" or key.startswith("x-")


# ---- the schemas of a grammar ----


def _schemas(guided: GuidedDecoding) -> Iterator[tuple[Any, bool]]:
    """Those that must be followed, and whether their values are JSON throughout."""
    if guided.kind == "json_schema":
        try:
            schema = json.loads(guided.grammar)
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"guided: it is not JSON: {error}", field=FIELD) from error
        if not is_lenient(schema):
            yield schema, True
    elif guided.kind == "structural_tag":
        yield from _tagged(format_of(guided.grammar))


def _tagged(form: Any) -> Iterator[tuple[Any, bool]]:
    """The schemas in a structural tag, whatever its formats are called."""
    waiting = [form]
    while waiting:
        one = waiting.pop()
        if isinstance(one, list):
            waiting += reversed(cast("list[Any]", one))
        elif isinstance(one, dict):
            plain = cast("dict[str, Any]", one)
            if "json_schema" in plain and not is_lenient(plain["json_schema"]):
                yield plain["json_schema"], holds_json(plain)
            waiting += [value for key, value in reversed(plain.items()) if key != "json_schema"]
