"""Calls whose arguments are pairs of name and value, in the syntax of Python or Gemma.

    get_weather(city='Oslo', days=[1, 2], metric=True)                 Python
    call:get_weather{city:<|"|>Oslo<|"|>,days:[1,2],metric:true}       Gemma 4

The arguments are converted to JSON. One reader reads the values of both syntaxes
(baton/parsers/values.py). A word without quotes that is no other kind of value is a string.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

from baton.guided.xml_parameters import json_form as json_part
from baton.guided.xml_parameters import string_form
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
from baton.parsers.parts import Sink
from baton.parsers.reader import Steps, TextReader, quoted
from baton.parsers.values import PLAIN_KEY, Values

WRITTEN_DEPTH: Final = 4  # values nested deeper than this are JSON in forced calls
MAX_ALTERNATIVES: Final = 8
NOTES: Final = frozenset({"type", "items", "properties", "required", "title", "description"})


@dataclass(frozen=True, slots=True)
class Literals:
    """A call written as `begin` NAME `opening` KEY `equals` VALUE `comma` ... `closing`.

    `quotes` are marks around strings without escapes; forced calls use the first. Without `quotes`,
    strings have the quotes of JSON.
    """

    begin: str = ""
    opening: str = "("
    closing: str = ")"
    equals: str = "="
    comma: str = ", "
    quotes: tuple[str, ...] = ()

    @property
    def markers(self) -> tuple[str, ...]:
        """See Body.markers."""
        return (self.begin, *self.quotes)

    def read(self, reader: TextReader, sink: Sink, schemas: Schemas) -> Steps[CallEnd]:
        """See Body.read."""
        if self.begin and not (yield from reader.literal(self.begin)):
            return CallEnd.NONE
        name = yield from reader.word()
        if not name or not (yield from reader.literal(self.opening)):
            return CallEnd.NONE
        values, opening = Values(reader, sink.arguments, self.quotes), "{"
        while True:
            yield from reader.space()
            if (yield from reader.literal(self.closing)):
                if opening == "{":
                    announce(reader, sink, name)
                sink.arguments("{}" if opening == "{" else "}")
                return CallEnd.COMPLETE
            key = yield from self._key(reader)
            if not key:
                return CallEnd.NONE if opening == "{" else CallEnd.CUT
            if opening == "{":
                announce(reader, sink, name)
            sink.arguments(opening + quoted(key) + ": ")
            opening = ", "
            yield from reader.space()
            if not (yield from values.value()):
                return CallEnd.CUT
            yield from reader.space()
            yield from reader.literal(",")

    def _key(self, reader: TextReader) -> Steps[str]:
        """Read a parameter's name and `equals`; return the name, "" if there is none."""
        found: list[str] = []
        for quote in self.quotes:
            if (yield from reader.literal(quote)):
                yield from reader.until((quote,), found.append)
                break
        else:
            found.append((yield from reader.matching(PLAIN_KEY)) if self.quotes else (
                yield from reader.word()
            ))  # fmt: skip
        yield from reader.space()
        return "".join(found).strip() if (yield from reader.literal(self.equals)) else ""

    # ---- calls that must be made ----

    def written(self, tool: Tool) -> WrittenCall:
        """See Body.written."""
        begin = f"{self.begin}{tool.name}{self.opening}"
        pairs = self._pairs(tool.schema, tool.schema, 0)
        if pairs is None:
            return WrittenCall(begin, text_form(self.closing), "")
        return WrittenCall(begin, pairs, self.closing)

    def _pairs(self, schema: Mapping[str, Any], root: Mapping[str, Any], depth: int) -> Form | None:
        """Return the form of an object's properties, required ones first; None without
        properties.
        """
        properties = cast("Mapping[str, Any]", schema.get("properties") or {})
        required = [name for name in schema.get("required") or () if name in properties]
        free = [name for name in properties if name not in required]
        pair = {
            name: sequence(text_form(name + self.equals), self._value(spec, root, depth + 1))
            for name, spec in properties.items()
        }
        further = {name: sequence(text_form(self.comma), one) for name, one in pair.items()}

        def rest(names: Sequence[str]) -> list[Form]:
            return [{"type": "optional", "content": further[name]} for name in names]

        if required:
            first, *others = required
            return sequence(pair[first], *(further[name] for name in others), *rest(free))
        if not free:
            return None
        if depth or len(free) > MAX_ALTERNATIVES:  # any order: too many alternatives
            tags = [tag(f"{name}{self.equals}", pair[name]["elements"][1], "") for name in free]
            return {"type": "tags_with_separator", "tags": tags, "separator": self.comma}
        starts = [sequence(pair[name], *rest(free[at + 1 :])) for at, name in enumerate(free)]
        return {"type": "optional", "content": {"type": "or", "elements": starts}}

    def _value(self, spec: object, root: Mapping[str, Any], depth: int) -> Form:
        plain = cast("Mapping[str, Any]", spec) if isinstance(spec, Mapping) else {}
        kind = plain.get("type")
        if not self.quotes or depth > WRITTEN_DEPTH:
            return json_part(plain, root)
        if kind == "string":
            return tag(self.quotes[0], string_form(plain, self.quotes[0]), self.quotes[0])
        if not plain.keys() <= NOTES:
            return json_part(plain, root)
        if kind == "array" and isinstance(plain.get("items"), Mapping):
            item = self._value(plain["items"], root, depth + 1)
            further = {"type": "star", "content": sequence(text_form(","), item)}
            items = {"type": "optional", "content": sequence(item, further)}
            return sequence(text_form("["), items, text_form("]"))
        if kind == "object" and plain.get("properties"):
            pairs = self._pairs(plain, root, depth)
            assert pairs is not None, "it has properties"
            return sequence(text_form("{"), pairs, text_form("}"))
        return json_part(plain, root)
