"""Keywords of JSON schemas: a schema that must be followed is followed, or refused by name."""

from __future__ import annotations

import json
import re
from ipaddress import IPv6Address
from typing import Any

import pytest

from baton.guided.matcher import GrammarCompiler
from baton.guided.spec import lenient
from baton.protocol.errors import InvalidRequest
from baton.protocol.sampling import GuidedDecoding
from tests.engine.guided_vocabulary import random_output, vocabulary
from tests.guided_cases import check_json

INTEGER: dict[str, Any] = {"type": "integer"}
DIGIT: dict[str, Any] = {"type": "integer", "minimum": 0, "maximum": 9}
SHORT: dict[str, Any] = {"type": "string", "maxLength": 3}
NULL: dict[str, Any] = {"type": "null"}


def record(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object", "properties": properties, "required": list(properties),
        "additionalProperties": False,
    }  # fmt: skip


def schema_of(schema: Any) -> GuidedDecoding:
    return GuidedDecoding("json_schema", json.dumps(schema))


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(vocabulary())


FOLLOWED: list[dict[str, Any]] = [
    {"type": ["integer", "string", "null"], "minimum": 3, "maximum": 9, "maxLength": 2},
    {"type": "integer", "exclusiveMinimum": -13, "exclusiveMaximum": 7, "title": "x", "x-y": 1},
    {"type": "integer", "minimum": -12345, "maximum": 67890},
    {"type": "number", "minimum": 0.5, "maximum": 0.5},
    {"type": "string", "minLength": 2, "maxLength": 4, "minimum": 7},
    {"type": "string", "pattern": "^[A-Z]{2}-\\d{3}(a|b)?$"},
    {"type": "string", "pattern": "^[^a-z\\s]{2}$"},
    {"type": "string", "pattern": "^.\\W\\D\\S[ -~]$"},
    {"type": "string", "pattern": "^(a|b)$"},
    {"type": "string", "pattern": "^(?:\\$\\^)$"},
    {"type": "string", "enum": ["a", 'ü"\\\n😀']},
    {"enum": [1, -2.5, 0.1, 1e-7, None, "x", [1, {"a": [2]}], True]},
    {"const": {"a": [1, None], "b": "c d"}},
    {"type": ["integer", "null"], "enum": [1, None]},
    {"type": "array", "items": DIGIT, "minItems": 1, "maxItems": 2},
    {"type": "array", "prefixItems": [DIGIT, SHORT], "items": NULL, "maxItems": 4},
    {"prefixItems": [DIGIT, SHORT], "items": False, "minItems": 2},
    record(a=DIGIT, b=record(**{'q"\\': SHORT})),
    {"properties": {"a": DIGIT, "b": SHORT, "c": NULL}, "required": ["b"],
     "additionalProperties": False},
    {"type": "object", "additionalProperties": False},
    {"anyOf": [DIGIT, record(a=NULL), SHORT]},
    {"allOf": [{"oneOf": [DIGIT]}]},
    {"$defs": {"n": record(next={"anyOf": [{"$ref": "#/$defs/n"}, NULL]})}, "$ref": "#/$defs/n"},
    {"type": "array", "items": {"$ref": "#"}, "maxItems": 1},
    record(a=DIGIT, b={"$ref": "#/properties/a", "description": "the same"}),
    *({"type": "string", "format": name} for name in ("uuid", "ipv6")),
]  # fmt: skip


@pytest.mark.parametrize("schema", FOLLOWED, ids=json.dumps)
def test_what_is_let_through_is_enforced(compiler: GrammarCompiler, schema: dict[str, Any]) -> None:
    start = compiler.compile(schema_of(schema))
    for seed in range(30):
        check_json(random_output(start.clone(), seed, plain=True, limit=2000).decode(), schema)


# These were never enforced by a library that reads one keyword of each schema.
BESIDE: list[dict[str, Any]] = [
    *({"type": "string", "format": name} for name in ("date", "date-time", "ipv4", "email",
                                                      "hostname")),
    {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 500},
    {"type": "object", "patternProperties": {"a": INTEGER}},
    {"type": "object", "minProperties": 2},
    {"type": "object", "properties": {"a": INTEGER}, "required": ["b"]},
    {"minimum": 3},
    {"required": ["a"]},
    {"type": "object", "anyOf": [{"required": ["b"]}]},
    {"allOf": [{"type": "object", "required": ["a"]}, {"properties": {"a": DIGIT}}]},
    {"$defs": {"x": SHORT}, "$ref": "#/$defs/x", "maxLength": 1},
    {"$defs": {"a/b": INTEGER}, "$ref": "#/$defs/a~1b"},
    record(a={"$id": "x"}),
    {"type": "string", "pattern": "^a+$", "maxLength": 2},
    *({"type": "string", "pattern": pattern}
      for pattern in ('^"$', '^\\"$', r"^\\$", r"^\n$", "^\n$", r"\x22", "(?i)a", ".{129}",
                      ".{129,}")),
]  # fmt: skip


@pytest.mark.parametrize("schema", BESIDE, ids=json.dumps)
def test_keywords_beside_others_are_enforced(
    compiler: GrammarCompiler, schema: dict[str, Any]
) -> None:
    start = compiler.compile(schema_of(schema))
    for seed in range(12):
        check_json(random_output(start.clone(), seed, plain=True, limit=2000).decode(), schema)


def test_formats_that_are_let_through_are_enforced(compiler: GrammarCompiler) -> None:
    def written(name: str) -> list[str]:
        start = compiler.compile(schema_of({"type": "string", "format": name}))
        return [json.loads(random_output(start.clone(), seed, True, 4000)) for seed in range(60)]

    for text in written("ipv6"):
        IPv6Address(text)
    time = r"T(?=\d)(\d+H)?(\d+M)?(\d+S)?"
    for text in written("duration"):
        assert re.fullmatch(rf"P(\d+W|(?=.)(\d+Y)?(\d+M)?(\d+D)?({time})?)", text), text
    for text in written("uri"):
        assert re.fullmatch(r"[A-Za-z][\w+.-]*:[\w.~!$&'()*+,;=:@%/?#\[\]-]*", text, re.ASCII), text
    for text in written("time"):
        assert re.fullmatch(r"\d\d:\d\d:\d\d(\.\d+)?([zZ]|[+-]\d\d:\d\d)", text, re.ASCII), text


@pytest.mark.parametrize("mark", "dDwWsS^$.*+?()[]{}|/_@#%&=:;,!~' -")
def test_escapes_in_patterns_mean_what_they_mean_elsewhere(
    compiler: GrammarCompiler, mark: str
) -> None:
    for pattern in (f"^\\{mark}$", f"^[\\{mark}]$"):
        start = compiler.compile(schema_of({"type": "string", "pattern": pattern}))
        for seed in range(12):
            text = json.loads(random_output(start.clone(), seed, plain=True))
            assert re.fullmatch(pattern, text, re.ASCII), text


# (schema, what is said of it)
REFUSED: list[tuple[Any, str]] = [
    ({"allOf": [record(a=INTEGER), record(b=INTEGER)]}, "Unsatisfiable"),
    ({"type": "array", "uniqueItems": True, "items": {"enum": [1, 2]}}, "uniqueItems"),
    ({"type": "integer", "if": {"const": 1}, "then": False}, "if"),
    ({"type": "integer", "not": {"const": 1}}, "not"),
    ({"oneOf": [DIGIT, {"type": "integer", "minimum": 3}]}, "oneOf"),
    *(({"type": "string", "format": name}, "Unknown format") for name in ("regex", "what")),
    ({"type": "array", "contains": INTEGER}, "contains"),
    ({"properties": {"a": INTEGER}, "unevaluatedProperties": False}, "unevaluatedProperties"),
    ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
    ({"type": "object", "required": [{}]}, "required"),
    ({"type": []}, "empty"),
    ({"type": [{}]}, "type must be"),
    ({"type": "string", "const": 1}, "incompatible types"),
    ({"type": "integer", "enum": [True]}, "incompatible types"),
    ({"type": "string", "enum": ["abc"], "maxLength": 1}, "length"),
    ({"enum": [1], "const": 2}, "Unsatisfiable"),
    ({"type": "integer", "minimum": 2**70}, "integer range"),
    ({"anyOf": []}, "anyOf is empty"),
    ({"$ref": "http://x/y"}, "http://x/y"),
    ({"$ref": "#/$defs/x"}, "does not exist"),
    ({"x-hidden": {"not": {}}, "$ref": "#/x-hidden"}, "not"),
    ({"$dynamicRef": "#x"}, "dynamicRef"),
    ({"type": "string", "format": "uuid", "maxLength": 2}, "Unsatisfiable"),
    *(({"type": "string", "pattern": pattern}, "regex|lookarounds")
      for pattern in (r"(?=a)b", r"(?!a)a", "a^b", "a$b", r"(a)\1", "[^]", r"a\b", r"\<")),
    (record(a={"type": "array", "prefixItems": [{"anyOf": [{"not": {}}]}]}), "not"),
    ({"type": "object", "additionalProperties": {"items": {"not": {}}}}, "not"),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "named"), REFUSED, ids=json.dumps)
def test_what_cannot_be_followed_is_refused_by_name(
    compiler: GrammarCompiler, schema: Any, named: str
) -> None:
    with pytest.raises(InvalidRequest, match=named) as caught:
        compiler.compile(schema_of(schema))
    assert caught.value.field == "guided"


@pytest.mark.parametrize("schema", [{"type": "array", "uniqueItems": True}, {"not": {"const": 1}}])
def test_what_is_lenient_is_followed_as_far_as_it_goes(
    compiler: GrammarCompiler, schema: dict[str, Any]
) -> None:
    compiler.compile(schema_of(lenient(schema)))
