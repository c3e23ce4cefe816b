"""Calls whose arguments are nested elements; each tag stands after a mark of the format.

    MARK<invoke name="f">MARK<city>OsloMARK</city>
    MARK<days>MARK<item>1MARK</item>MARK<item>2MARK</item>MARK</days>MARK</invoke>

The arguments are converted to JSON. The schema says whether an element is a list or an object. If
the schema does not say it, elements called `item` make a list and others make an object. The text
of an element without elements is a value as in baton/parsers/tagged.py. Source: MiniMax M3's chat
template.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, cast

from baton.guided.schema_kinds import kinds_of, target_of
from baton.guided.xml_parameters import is_text, string_form
from baton.guided.xml_parameters import json_form as json_part
from baton.parsers.grammar import (
    CallEnd,
    Form,
    Schemas,
    Tool,
    WrittenCall,
    announce,
    sequence,
    tag,
    text_form,
)
from baton.parsers.literals import NOTES, WRITTEN_DEPTH
from baton.parsers.parts import Sink
from baton.parsers.reader import Emit, Steps, TextReader, quoted
from baton.parsers.tagged import as_json

MAX_DEPTH: Final = 64  # how deeply nested elements are read
ITEM: Final = "item"


@dataclass(frozen=True, slots=True)
class Nested:
    """How a tool call with nested arguments is written: `begin` NAME `name_end` ELEMENTS `end`.

    The fields are fixed texts of the format; NAME is the tool's, ELEMENTS are its arguments, one
    tagged element each. `mark` comes directly before every tag.
    """

    mark: str
    begin: str
    name_end: str
    end: str

    @property
    def markers(self) -> tuple[str, ...]:
        """See Body.markers."""
        return (self.mark,)

    def read(self, reader: TextReader, sink: Sink, schemas: Schemas) -> Steps[CallEnd]:
        """See Body.read."""
        if not (yield from reader.marks(self.begin)):
            return CallEnd.NONE
        name = yield from reader.word()
        if not name or not (yield from reader.marks(self.name_end)):
            return CallEnd.NONE
        announce(reader, sink, name)
        schema = schemas.get(name, {})
        elements = _Elements(reader, sink.arguments, self.mark, schema)
        complete = yield from elements.members(schema, is_list=False, depth=0)
        complete = complete and (yield from reader.marks(self.end))
        return CallEnd.COMPLETE if complete else CallEnd.CUT

    # ---- calls that must be made ----

    def written(self, tool: Tool) -> WrittenCall:
        """See Body.written."""
        begin = f"{self.begin}{tool.name}{self.name_end}"
        members = self._members(tool.schema, tool.schema, 0)
        if not members:
            return WrittenCall(begin, text_form(self.end), "")
        return WrittenCall(begin, sequence(*members), self.end)

    def _members(
        self, schema: Mapping[str, Any], root: Mapping[str, Any], depth: int
    ) -> list[Form]:
        properties = cast("Mapping[str, Any]", schema.get("properties") or {})
        required = schema.get("required") or ()
        made: list[Form] = []
        for name, spec in properties.items():
            one = self._element(name, spec, root, depth + 1)
            made.append(one if name in required else {"type": "optional", "content": one})
        return made

    def _element(self, name: str, spec: object, root: Mapping[str, Any], depth: int) -> Form:
        plain = cast("Mapping[str, Any]", spec) if isinstance(spec, Mapping) else {}
        begin, end = f"{self.mark}<{name}>", f"{self.mark}</{name}>"
        if is_text(plain, self.mark):
            return tag(begin, string_form(plain, self.mark), end)
        members: list[Form] = []
        if plain.keys() <= NOTES and depth < WRITTEN_DEPTH:
            if plain.get("type") == "array" and isinstance(plain.get("items"), Mapping):
                item = self._element(ITEM, plain["items"], root, depth + 1)
                members = [{"type": "star", "content": item}]
            elif plain.get("type") == "object":
                members = self._members(plain, root, depth)
        if members:
            return sequence(text_form(begin), *members, text_form(end))
        return tag(begin, json_part(plain, root), end)


class _Elements:
    """Reads elements and emits them as JSON. `root`: the schema that resolves references."""

    def __init__(self, reader: TextReader, emit: Emit, mark: str, root: Mapping[str, Any]) -> None:
        self._reader = reader
        self._emit = emit
        self._root = root
        self._begin, self._end = f"{mark}<", f"{mark}</"

    def members(self, schema: Mapping[str, Any], is_list: bool, depth: int) -> Steps[bool]:
        """Read all elements up to a closing tag, which is not read; return False if none comes."""
        reader, emit = self._reader, self._emit
        emit("[" if is_list else "{")
        first = True
        while True:
            yield from reader.space()
            if (yield from reader.comes(self._end)):
                emit("]" if is_list else "}")
                return True
            name: list[str] = []
            if depth >= MAX_DEPTH or not (yield from reader.literal(self._begin)):
                return False
            if not (yield from reader.until((">",), name.append)):
                return False
            key = "".join(name)
            emit(("" if first else ", ") + ("" if is_list else f"{quoted(key)}: "))
            first = False
            if not (yield from self._value(key, self._part(schema, key, is_list), depth + 1)):
                return False

    def _value(self, key: str, schema: object, depth: int) -> Steps[bool]:
        reader, end = self._reader, f"{self._end}{key}>"
        space = yield from reader.space()
        is_element = (yield from reader.comes(self._begin)) and not (
            yield from reader.comes(self._end)
        )
        kinds = kinds_of(schema, self._root)
        if is_element:
            is_list = "object" not in kinds or (
                "array" in kinds and (yield from reader.comes(f"{self._begin}{ITEM}>"))
            )
            plain = cast("Mapping[str, Any]", schema) if isinstance(schema, Mapping) else {}
            complete = yield from self.members(plain, is_list, depth)
            yield from reader.space()
            return complete and (yield from reader.literal(end))
        if is_text(schema, self._begin):
            self._emit('"' + quoted(space)[1:-1])
            found = yield from reader.until(
                (end,), lambda text: self._emit(quoted(text)[1:-1]), tail=False
            )
            if found:
                self._emit('"')
            return bool(found)
        parts = [space]
        found = yield from reader.until((end,), parts.append)
        text = "".join(parts)
        if found and not text.strip() and "string" not in kinds:  # an empty list has no elements
            text = "[]" if "array" in kinds else "{}"
        if found:
            self._emit(as_json(text, kinds))
        return bool(found)

    def _part(self, schema: Mapping[str, Any], key: str, is_list: bool) -> object:
        """Return the schema of one element, {} if there is none."""
        for _ in range(8):
            if "$ref" not in schema:
                break
            found = target_of(schema["$ref"], self._root)
            schema = cast("Mapping[str, Any]", found) if isinstance(found, Mapping) else {}
        if is_list:
            return schema.get("items", {})
        properties = schema.get("properties")
        return cast("Any", properties).get(key, {}) if isinstance(properties, Mapping) else {}
