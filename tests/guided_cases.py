"""What guided outputs of a random model are asked for and proven against.

Strings, arrays, numbers and depth are bounded, so MAX_TOKENS always suffices.
"""

from __future__ import annotations

import json
import re
from datetime import date
from typing import Any, Final

import jsonschema

MAX_TOKENS: Final = 1200

_TEXT: dict[str, Any] = {"type": "string", "maxLength": 6}
_SMALL: dict[str, Any] = {"type": "integer", "minimum": -5, "maximum": 120}


def _record(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


SCHEMAS: Final[dict[str, dict[str, Any]]] = {
    "person": _record(name=_TEXT, age=_SMALL, member={"type": "boolean"}),
    "enums": _record(
        color={"enum": ["red", "green", "blå"]}, size={"enum": [1, 2.5, None, "x"]}, on={"const": 7}
    ),
    "array": {"type": "array", "items": _SMALL, "minItems": 1, "maxItems": 4},
    "optional": {
        "type": "object",
        "properties": {"a": _SMALL, "b": _TEXT, "c": {"type": "null"}},
        "required": ["b"],
        "additionalProperties": False,
    },
    "nested": _record(
        point=_record(x=_SMALL, y=_SMALL),
        tags={"type": "array", "items": _TEXT, "maxItems": 2},
    ),
    "union": {"anyOf": [_record(kind={"const": "a"}, n=_SMALL), _record(kind={"const": "b"})]},
    "reference": {
        "$defs": {"leaf": _record(value={"anyOf": [_SMALL, {"type": "null"}]})},
        **_record(left={"$ref": "#/$defs/leaf"}, right={"$ref": "#/$defs/leaf"}),
    },
    "pattern": _record(
        id={"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
        day={"type": "string", "format": "date"},
    ),
    "number": _record(
        price={"type": "number", "minimum": 0, "maximum": 99, "multipleOf": 0.25}
    ),
    "tuple": {
        "type": "array", "prefixItems": [_TEXT, {"type": "boolean"}], "items": False,
        "minItems": 2,
    },
}  # fmt: skip

REGEXES: Final = (r"[a-c]{3}-\d{2}(x|yz)?", r"(\+\d{1,3} )?\d{3}/\d{4}", "a|b|[^\n]{2,5}")
CHOICES: Final = ("yes", "no", "yesterday", "größer 😀")
GBNF: Final = 'root ::= pair ("," pair){0,2}\npair ::= [a-d] "=" num\nnum ::= [0-9]{1,3}\n'
GBNF_REGEX: Final = r"[a-d]=[0-9]{1,3}(,[a-d]=[0-9]{1,3}){0,2}"

TOOLS: Final[list[dict[str, Any]]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": _record(
                city={"type": "string", "maxLength": 8}, days=_SMALL, metric={"type": "boolean"}
            ),
        },
    },
    {
        "type": "function",
        "function": {
            "name": "paint",
            "strict": True,
            "parameters": _record(color={"type": "string", "enum": ["red", "blue"]}),
        },
    },
    {"type": "function", "function": {"name": "now"}},
]


_FORMATS: Final = jsonschema.FormatChecker()


@_FORMATS.checks("date", raises=ValueError)
def _is_date(value: object) -> bool:
    """As the grammar has it: 29 February is a day of any year, and 0000 is a year."""
    if not isinstance(value, str):
        return True
    found = re.fullmatch(r"\d{4}-(\d\d-\d\d)", value, re.ASCII)
    return found is not None and bool(date.fromisoformat(f"2000-{found[1]}"))


def check_json(text: str, schema: dict[str, Any]) -> None:
    """Raises unless `text` is JSON of the schema, its formats included."""
    jsonschema.Draft202012Validator(schema, format_checker=_FORMATS).validate(_read(text))


def _read(text: str) -> Any:
    """JSON as its standard has it: no NaN, and no name twice in one object."""

    def no_number(name: str) -> Any:
        raise ValueError(f"{name} is not JSON")

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        members = dict(pairs)
        if len(members) != len(pairs):
            raise ValueError(f"a name twice: {[name for name, _ in pairs]}")
        return members

    return json.loads(text, parse_constant=no_number, object_pairs_hook=once)


def check_regex(text: str, pattern: str) -> None:
    assert re.fullmatch(pattern, text, re.ASCII), repr(text)


def check_call(name: str, arguments: str, tools: list[dict[str, Any]] = TOOLS) -> None:
    """Raises unless it is a call of one of the tools."""
    (function,) = [tool["function"] for tool in tools if tool["function"]["name"] == name]
    check_json(arguments, function.get("parameters", {"const": {}}))
