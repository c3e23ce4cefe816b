"""Which kinds of JSON values a schema allows, as far as the schema alone tells. Pure.

Kinds are JSON Schema's type names; a whole number is an `integer`, any other a `number`. A keyword
that this module does not know allows everything. So the answer may have too many kinds, but never
too few.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, cast

Kinds = frozenset[str]

ALL: Final[Kinds] = frozenset(
    {"string", "integer", "number", "boolean", "null", "object", "array"}
)  # fmt: skip
MAX_PARTS: Final = 64  # parts of a schema that are looked at, references included
_OF_TYPE: Final[dict[str, Kinds]] = {
    **{name: frozenset({name}) for name in ALL},
    "number": frozenset({"integer", "number"}),
}
# A schema without any of these keywords says at most how a string must look.
_TELLING: Final = frozenset({
    "type", "enum", "const", "$ref", "$dynamicRef", "anyOf", "oneOf", "allOf", "not", "if",
    "properties", "patternProperties", "additionalProperties", "required", "propertyNames",
    "minProperties", "maxProperties", "items", "prefixItems", "additionalItems", "contains",
    "minItems", "maxItems", "uniqueItems", "minimum", "maximum", "exclusiveMinimum",
    "exclusiveMaximum", "multipleOf",
})  # fmt: skip


def kinds_of(schema: object, root: Mapping[str, Any]) -> Kinds:
    """Return the kinds that `schema` allows; its references lead into `root`."""
    return _Search(root).kinds(schema)


def kind_of(value: object) -> str:
    """Return the kind of a JSON value as json.loads returns it."""
    match value:
        case bool():
            return "boolean"
        case None:
            return "null"
        case str():
            return "string"
        case int() | float():
            return "integer" if isinstance(value, int) or value.is_integer() else "number"
        case dict():
            return "object"
        case _:
            return "array"


def says_nothing(schema: object) -> bool:
    """Whether a schema leaves open which kind of value it wants."""
    return (
        not isinstance(schema, Mapping) or not _TELLING & cast("Mapping[str, Any]", schema).keys()
    )


def target_of(reference: object, root: Mapping[str, Any]) -> object:
    """Return what a reference within the schema `root` names, None if it is not there."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    place: object = root
    for step in reference[1:].split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        place = cast("Any", place).get(name) if isinstance(place, Mapping) else None
    return place


class _Search:
    """Looks at one schema's parts, at most MAX_PARTS of them, because a schema may refer to
    itself.
    """

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._left = MAX_PARTS

    def kinds(self, schema: object) -> Kinds:
        self._left -= 1
        if isinstance(schema, bool):
            return ALL if schema else frozenset()
        if not isinstance(schema, Mapping) or self._left < 0:
            return ALL
        plain = cast("Mapping[str, Any]", schema)
        found = _of_type(plain.get("type")) & _of_values(plain)
        if "$ref" in plain:
            found &= self.kinds(target_of(plain["$ref"], self._root))
        for part in _list(plain.get("allOf")) or ():
            found &= self.kinds(part)
        for name in ("anyOf", "oneOf"):
            parts = _list(plain.get(name))
            if parts is not None:
                found &= _union(self.kinds(part) for part in parts)
        return found


def _of_type(given: object) -> Kinds:
    if isinstance(given, str):
        return _OF_TYPE.get(given, ALL)
    names = _list(given)
    return ALL if names is None else _union(_of_type(name) for name in names)


def _of_values(schema: Mapping[str, Any]) -> Kinds:
    """Return the kinds of the values that `const` and `enum` list."""
    found = ALL
    if "const" in schema:
        found &= {kind_of(schema["const"])}
    values = _list(schema.get("enum"))
    return found if values is None else found & {kind_of(value) for value in values}


def _union(kinds: Iterable[Kinds]) -> Kinds:
    return frozenset[str]().union(*kinds)


def _list(value: object) -> list[object] | None:
    return cast("list[object]", value) if isinstance(value, list) else None
