"""Kinds of values that a schema allows: what is said in every way, and what cannot be known."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.guided.schema_kinds import ALL, kind_of, kinds_of, says_nothing

ROOT: dict[str, Any] = {
    "$defs": {
        "z": {"type": "string"}, "a/b": {"type": "null"}, "loop": {"$ref": "#/$defs/loop"},
        "many": {"anyOf": [{"$ref": "#/$defs/many"}] * 50},
    }
}  # fmt: skip
NUMBERS = {"integer", "number"}


@pytest.mark.parametrize(
    ("schema", "kinds"),
    [
        ({"type": "string"}, {"string"}),
        ({"type": ["string", "null"]}, {"string", "null"}),
        ({"type": "number"}, NUMBERS),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, {"string", "null"}),
        ({"oneOf": [{"const": "a"}, {"const": 1.5}]}, {"string", "number"}),
        ({"enum": ["1", 2, 2.0, True, None, {}, []]}, ALL - {"number"}),
        ({"enum": ["1", 2], "type": "string"}, {"string"}),
        ({"$ref": "#/$defs/z", "description": "?"}, {"string"}),
        ({"$ref": "#/$defs/a~1b"}, {"null"}),
        ({"allOf": [{"type": ["string", "integer"]}, {"type": "number"}]}, {"integer"}),
        ({"anyOf": [True, {"type": "null"}]}, ALL),
        ({"anyOf": [False, {"type": "null"}]}, {"null"}),
        ({}, ALL),
        ({"type": "str"}, ALL),
        ({"type": 3, "enum": 3, "anyOf": {}, "allOf": None, "$ref": 1}, ALL),
        ({"$ref": "http://x"}, ALL),
        ({"$ref": "#/$defs/none"}, ALL),
        ({"$ref": "#/$defs/z/type/x"}, ALL),
        ({"$ref": "#/$defs/loop"}, ALL),
        ({"$ref": "#/$defs/many"}, ALL),
    ],
)
def test_what_a_schema_allows(schema: dict[str, Any], kinds: set[str]) -> None:
    assert kinds_of(schema, ROOT) == kinds


def test_what_says_nothing() -> None:
    for schema in ({}, True, None, {"description": "a", "default": 1}, {"minLength": 1}):
        assert says_nothing(schema)
    for schema in ({"type": "string"}, {"enum": [1]}, {"$ref": "#"}, {"properties": {}}):
        assert not says_nothing(schema)


VALUES = st.sampled_from([None, True, 0, 1.0, 1.5, "", "1", [], [1], {}, {"a": "x"}])
PARTS = st.recursive(
    st.one_of(
        st.builds(lambda kind: {"type": kind}, st.sampled_from(sorted(ALL))),
        st.builds(lambda value: {"const": value}, VALUES),
        st.builds(lambda values: {"enum": values}, st.lists(VALUES, min_size=1, max_size=3)),
        st.sampled_from([{}, True, False, {"$ref": "#/$defs/z"}, {"$ref": "#/$defs/a~1b"}]),
    ),
    lambda inner: st.builds(
        lambda name, parts: {name: parts},
        st.sampled_from(["anyOf", "oneOf", "allOf"]),
        st.lists(inner, min_size=1, max_size=3),
    ),
    max_leaves=6,
)


@given(PARTS, VALUES)
def test_a_value_that_is_valid_is_of_a_kind_that_is_allowed(part: Any, value: Any) -> None:
    schema = {"$defs": ROOT["$defs"], "allOf": [part]}
    if jsonschema.Draft202012Validator(schema).is_valid(value):
        assert kind_of(json.loads(json.dumps(value))) in kinds_of(schema, schema)
