"""What is let through to xgrammar it enforces; what it ignores is refused, by name."""

from __future__ import annotations

import json
import re
from ipaddress import IPv6Address
from typing import Any

import jsonschema
import pytest

from baton.engine.core.grammars import Grammars
from baton.guided.grammars import lenient
from baton.guided.schema_keywords import check_xgrammar, not_followed
from baton.guided.xgrammar import XgrammarBackend
from baton.protocol.errors import InvalidRequest
from baton.protocol.sampling import GuidedDecoding
from tests.engine.guided_vocabulary import allowed, random_output, vocabulary
from tests.guided_cases import SCHEMAS, check_json

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


def tag_of(form: Any) -> GuidedDecoding:
    return GuidedDecoding("structural_tag", json.dumps({"type": "structural_tag", "format": form}))


FOLLOWED: list[dict[str, Any]] = [
    {"type": ["integer", "string", "null"], "minimum": 3, "maximum": 9, "maxLength": 2},
    {"type": "integer", "exclusiveMinimum": -13, "exclusiveMaximum": 7, "title": "x", "x-y": 1},
    {"type": "integer", "minimum": -12345, "maximum": 67890},
    {"type": "number", "minimum": 0.5, "maximum": 0.5},
    {"type": "string", "minLength": 2, "maxLength": 4, "minimum": 7},
    {"type": "string", "pattern": "^[A-Z]{2}-\\d{3}(a|b)?$"},
    {"type": "string", "pattern": "^[^a-z\\s]{2}$"},
    {"type": "string", "pattern": "^.\\W\\D\\S[ -~]$"},
    {"type": "string", "pattern": "^a|b$"},
    {"type": "string", "pattern": "(?:\\$\\^)"},
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
def test_what_is_let_through_is_enforced(schema: dict[str, Any]) -> None:
    assert not_followed(schema) == ""
    start = XgrammarBackend(vocabulary()).compile(schema_of(schema))
    for seed in range(30):
        check_json(random_output(start.clone(), seed, plain=True).decode(), schema)


def test_formats_that_are_let_through_are_enforced() -> None:
    def written(name: str) -> list[str]:
        schema = {"type": "string", "format": name}
        start = XgrammarBackend(vocabulary()).compile(schema_of(schema))
        return [json.loads(random_output(start.clone(), seed, True, 4000)) for seed in range(60)]

    for text in written("ipv6"):
        IPv6Address(text)
    time = r"T(?=\d)(\d+H)?(\d+M)?(\d+S)?"
    for text in written("duration"):
        assert re.fullmatch(rf"P(\d+W|(?=.)(\d+Y)?(\d+M)?(\d+D)?({time})?)", text), text
    for text in written("uri"):
        assert re.fullmatch(r"[A-Za-z][\w+.-]*:[\w.~!$&'()*+,;=:@%/?#-]*", text, re.ASCII), text
    for text in written("uri-reference"):
        assert re.fullmatch(r"[\w.~!$&'()*+,;=:@%/?#-]*", text, re.ASCII), text


@pytest.mark.parametrize("mark", "dDwWsS^$.*+?()[]{}|/_@#%&=:;,<>!~' -")
def test_escapes_in_patterns_mean_what_they_mean_elsewhere(mark: str) -> None:
    backend = XgrammarBackend(vocabulary())
    for pattern in (f"^\\{mark}$", f"^[\\{mark}]$"):
        assert not_followed({"type": "string", "pattern": pattern}) == ""
        matcher = backend.compile(schema_of({"type": "string", "pattern": pattern}))
        assert matcher.advance(ord('"'))
        ids = [id for id in allowed(matcher) if id < 128]
        assert ids
        for id in ids:
            assert re.fullmatch(pattern, json.loads(f'"{chr(id)}"'), re.ASCII)


# What a walk broke, or may: (schema, what is named).
IGNORED: list[tuple[Any, str]] = [
    ({"allOf": [record(a=INTEGER), record(b=INTEGER)]}, "allOf"),
    ({"type": "array", "uniqueItems": True, "items": {"enum": [1, 2]}}, "uniqueItems"),
    ({"type": "integer", "if": {"const": 1}, "then": False}, "if"),
    ({"type": "integer", "not": {"const": 1}}, "not"),
    ({"oneOf": [DIGIT, {"type": "integer", "minimum": 3}]}, "oneOf"),
    ({"type": "integer", "multipleOf": 9999991}, "multipleOf"),
    *(({"type": "string", "format": name}, "this format")
      for name in ("date", "time", "date-time", "ipv4", "email", "hostname", "regex", "what")),
    ({"type": "array", "contains": INTEGER}, "contains"),
    ({"type": "object", "patternProperties": {"a": INTEGER}}, "patternProperties"),
    ({"type": "object", "minProperties": 2}, "minProperties"),
    ({"properties": {"a": INTEGER}, "unevaluatedProperties": False}, "unevaluatedProperties"),
    ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
    ({"type": "object", "properties": {"a": INTEGER}, "required": ["b"]}, "this required"),
    ({"type": "object", "required": [{}]}, "this required"),
    ({"minimum": 3}, "minimum"),
    ({"required": ["a"]}, "required"),
    ({"type": []}, "type"),
    ({"type": [{}]}, "type"),
    ({"type": "string", "const": 1}, "type beside const"),
    ({"type": "integer", "enum": [True]}, "type beside enum"),
    ({"type": "string", "enum": ["abc"], "maxLength": 1}, "maxLength beside enum"),
    ({"enum": [1], "const": 2}, "enum beside const"),
    ({"const": [{"a": 2**70}]}, "numbers this large in const"),
    ({"type": "integer", "minimum": 2**70}, "this minimum"),
    ({"type": "object", "anyOf": [{"required": ["b"]}]}, "type beside anyOf"),
    ({"anyOf": []}, "an empty anyOf"),
    ({"$defs": {"x": SHORT}, "$ref": "#/$defs/x", "maxLength": 1}, "maxLength beside $ref"),
    ({"$ref": "http://x/y"}, "$ref 'http://x/y'"),
    ({"$ref": "#/$defs/x"}, "$ref '#/$defs/x'"),
    ({"$defs": {"a/b": {}}, "$ref": "#/$defs/a~1b"}, "$ref '#/$defs/a~1b'"),
    ({"x-hidden": {"not": {}}, "$ref": "#/x-hidden"}, "not"),
    ({"$dynamicRef": "#x"}, "$dynamicRef"),
    (record(a={"$id": "x"}), "$id"),
    ({"type": "string", "pattern": "^a+$", "maxLength": 2},
     "pattern beside minLength, maxLength or format"),
    ({"type": "string", "format": "uuid", "maxLength": 2}, "format beside minLength or maxLength"),
    *(({"type": "string", "pattern": pattern}, "this pattern")
      for pattern in ('^"$', '^\\"$', r"^\\$", r"\n", "\n", r"\x22", r"(?=a)b", r"(?!a)a", "a^b",
                      "a$b", "(?<n>a)", r"(a)\1", "[^]", "[[:alpha:]]", r"a\b", "(?i)a",
                      ".{129}", ".{129,}", "(.{100}){100}", "((.{100})*x){100}")),
    (record(a={"type": "array", "prefixItems": [{"anyOf": [{"not": {}}]}]}), "not"),
    ({"type": "object", "additionalProperties": {"items": {"not": {}}}}, "not"),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "named"), IGNORED, ids=json.dumps)
def test_what_is_ignored_is_refused_by_name(schema: Any, named: str) -> None:
    assert not_followed(schema) == named
    with pytest.raises(InvalidRequest) as caught:
        XgrammarBackend(vocabulary()).compile(schema_of(schema))
    assert caught.value.message == f"guided: xgrammar does not follow {named}"
    assert caught.value.field == "guided"
    check_xgrammar(schema_of(lenient(schema)))


def test_what_xgrammar_reads_of_known_schemas_is_let_through() -> None:
    found = {name: not_followed(schema) for name, schema in SCHEMAS.items()}
    assert {name: word for name, word in found.items() if word} == {
        "number": "multipleOf", "pattern": "this format"
    }  # fmt: skip
    assert [not_followed(schema) for schema in (True, False, {}, 3)] == [""] * 4
    deep: Any = {}
    for _ in range(900):
        deep = {"type": "array", "items": deep}
    assert not_followed(deep) == ""


BAD = {"type": "array", "uniqueItems": True}


@pytest.mark.parametrize(
    "guided",
    [
        tag_of({"type": "json_schema", "json_schema": BAD}),
        tag_of({"type": "or", "elements": [{"type": "dispatch", "rules": [
            ["a", {"type": "tag", "begin": "<", "end": ">",
                   "content": {"type": "qwen_xml_parameter", "json_schema": record(a=BAD)}}]]}]}),
        GuidedDecoding("structural_tag", json.dumps(
            {"structures": [{"begin": "<", "end": ">", "schema": json.dumps(BAD)}],
             "triggers": ["<"]})),
    ],
)  # fmt: skip
def test_the_schemas_of_structural_tags_count_too(guided: GuidedDecoding) -> None:
    with pytest.raises(InvalidRequest, match="does not follow uniqueItems"):
        check_xgrammar(guided)


def test_tools_that_are_not_strict_are_followed_as_far_as_they_go() -> None:
    form = {"type": "json_schema", "json_schema": lenient(BAD)}
    check_xgrammar(tag_of(form))
    XgrammarBackend(vocabulary()).compile(tag_of(form))


@pytest.mark.parametrize(
    "text", [{"minLength": 2}, {"maxLength": 2}, {"pattern": "^a$"}, {"enum": ["a"]}, {"const": ""}]
)
def test_texts_between_tags_are_free_or_refused(text: dict[str, Any]) -> None:
    """White space around them is let through, and is theirs."""
    schema = record(a={"type": "string", **text})
    check_xgrammar(tag_of({"type": "json_schema", "json_schema": schema}))
    for form in ({"type": "qwen_xml_parameter"}, {"type": "json_schema", "style": "qwen_xml"}):
        with pytest.raises(InvalidRequest, match="between tags"):
            check_xgrammar(tag_of({**form, "json_schema": schema}))
        check_xgrammar(tag_of({**form, "json_schema": record(a={"type": "string"}, b=DIGIT)}))


def texts_of(schema: Any) -> list[bytes]:
    tab = {"type": "const_string", "value": "\t"}
    form = {"type": "sequence", "elements": [tab, {"type": "json_schema", "json_schema": schema}]}
    start = XgrammarBackend(vocabulary()).compile(tag_of(form))
    return [random_output(start.clone(), seed, True, 3000) for seed in range(20)]


@pytest.mark.parametrize(
    "text",
    [
        {"minLength": 2, "maxLength": 40},
        {"maxLength": 400},
        {"minLength": 3},
        {"pattern": "^.{128}$"},
        {"pattern": "^([^a]{2}.){20}$"},
    ],
)
def test_bounded_texts_in_tags_are_json(text: dict[str, Any]) -> None:
    """Control characters may stand beside them, not in them."""
    schema = {"type": "string", **text}
    for wanted in (schema, lenient(schema), record(const=schema),
                   {"$defs": {"x": schema}, "$ref": "#/$defs/x"}):  # fmt: skip
        assert not_followed(wanted) == ""
        for found in texts_of(wanted):
            check_json(found.decode(), wanted)
    assert {json.loads(found)["maxLength"] for found in texts_of(
        {"const": {"maxLength": 3, "type": "string"}})} == {3}  # fmt: skip


def test_a_node_whose_own_backend_it_is_refuses_too() -> None:
    grammars = Grammars(vocabulary, "xgrammar")
    with pytest.raises(InvalidRequest, match="does not follow uniqueItems"):
        grammars.get(schema_of(BAD))
    grammars.get(schema_of(lenient(BAD)))
    grammars.get(schema_of({"type": "array", "maxItems": 1}))


def test_a_reference_to_the_whole_schema_holds_in_a_tag() -> None:
    schema = {"type": "array", "items": {"$ref": "#"}, "maxItems": 1}
    form = {"type": "tag", "begin": "<", "end": ">", "content":
            {"type": "json_schema", "json_schema": schema}}  # fmt: skip
    start = XgrammarBackend(vocabulary()).compile(tag_of(form))
    for seed in range(12):
        text = random_output(start.clone(), seed, plain=True).decode()
        jsonschema.validate(json.loads(text[1:-1]), schema)
