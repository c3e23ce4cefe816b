"""Calls whose parameters stand between tags of their own, each value as plain text.

    <function=get_weather>
    <parameter=city>
    Oslo
    </parameter>
    </function>

The arguments' JSON is made here. A value of type `string`, or of a schema that names no type, is
text and streams as it arrives. Any other is JSON if it reads as such, unless its schema allows a
string and not what was read: a `12345` of Optional[str] is "12345". A string in quotes is read as
JSON there, because that is how a forced call writes it (baton/guided/xml_parameters.py). Text
between parameters means nothing and is left out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, cast

from baton.guided.schema_kinds import ALL, Kinds, kind_of, kinds_of
from baton.guided.xml_parameters import ParameterMarks, is_text, parameters
from baton.parsers.grammar import (
    CallEnd,
    Schemas,
    Tool,
    WrittenCall,
    announce,
    sequence,
    text_form,
)
from baton.parsers.parts import Sink
from baton.parsers.reader import Steps, TextReader, lines_of, quoted
from baton.parsers.values import literal_json

_WORDS: Final = {"true": "true", "false": "false", "null": "null", "none": "null"}
_STRINGS: Final = ("str", "text", "enum")  # what clients write for `string`


@dataclass(frozen=True, slots=True)
class Tagged:
    """`begin` NAME `name_end` PARAMETERS `end`. `quote`: marks that may stand around a value."""

    begin: str
    name_end: str
    marks: ParameterMarks
    end: str
    quote: tuple[str, str] = ("", "")

    @property
    def markers(self) -> tuple[str, ...]:
        """See Body.markers."""
        return (self.begin, self.name_end, *self.marks.markers, self.end)

    def read(self, reader: TextReader, sink: Sink, schemas: Schemas) -> Steps[CallEnd]:
        """See Body.read."""
        if not (yield from reader.marks(self.begin)):
            return CallEnd.NONE
        name = yield from reader.word()
        if not name or not (yield from reader.marks(self.name_end)):
            return CallEnd.NONE
        yield from reader.space()
        # Where nothing ends a name, only what follows shows that it was one.
        shown = lines_of(self.name_end) != ()
        if not shown and not (yield from reader.any_comes((self.marks.key, self.end.strip()))):
            return CallEnd.NONE
        announce(reader, sink, name)
        return (yield from self.arguments(reader, sink, schemas.get(name, {})))

    def arguments(
        self, reader: TextReader, sink: Sink, schema: Mapping[str, Any]
    ) -> Steps[CallEnd]:
        """All parameters up to `end`; what is cut short leaves the JSON cut short."""
        end, opening = self.end.strip(), "{"
        while mark := (yield from reader.until((self.marks.key, end), len)):
            if mark == end:
                sink.arguments("{}" if opening == "{" else "}")
                return CallEnd.COMPLETE
            found: list[str] = []
            is_json = yield from self._key(reader, found)
            if is_json is None:
                break
            key = "".join(found)
            kinds = _kinds(key, schema, self.marks.close)
            if self.marks.json_key_end:  # the mark says more than the schema
                kinds = kinds or ALL if is_json else None
            sink.arguments(opening + quoted(key) + ": ")
            opening = ", "
            if not (yield from self._value(reader, sink, kinds)):
                break
        return CallEnd.CUT

    def written(self, tool: Tool) -> WrittenCall:
        """See Body.written."""
        begin = f"{self.begin}{tool.name}{self.name_end}"
        found = parameters(tool.schema, self.marks)
        if not found:
            return WrittenCall(begin, text_form(self.end), "")
        return WrittenCall(begin, sequence(*found), self.end)

    def _key(self, reader: TextReader, found: list[str]) -> Steps[bool | None]:
        """A parameter's name with what ends it: whether that says JSON, None if nothing does."""
        end, json_end = self.marks.key_end.strip(), self.marks.json_key_end
        mark = yield from reader.until((end, json_end, '">') if json_end else (end,), found.append)
        if mark and not (yield from reader.marks(self.marks.value)):
            return None
        return mark != end if mark else None

    def _value(self, reader: TextReader, sink: Sink, kinds: Kinds | None) -> Steps[bool]:
        """One value with its end; False if it has none. `kinds`: what it may be, None = text.

        A line break at either end is layout where models write each value on lines of its own.
        """
        close, own_line = (
            self.marks.close,
            self.marks.key_end.endswith("\n") and (self.marks.value == ""),
        )
        ends = ("\n" + close, close) if own_line else (close,)
        if own_line:
            yield from reader.literal("\n")
        if kinds is None:
            begin, end = self.quote
            is_quoted = begin != "" and (yield from reader.literal(begin))
            sink.arguments('"')
            found = yield from reader.until(
                (end,) if is_quoted else ends,
                lambda text: sink.arguments(quoted(text)[1:-1]),
                tail=False,
            )
            if found:
                sink.arguments('"')
            return bool(found) and (not is_quoted or (yield from reader.literal(close)))
        value = yield from self._json(reader)
        if value is None:
            parts: list[str] = []
            if not (yield from reader.until(ends, parts.append)):
                return False
            value = "".join(parts)
        sink.arguments(as_json(value, kinds))
        return True

    def _json(self, reader: TextReader) -> Steps[str | None]:
        """A value in brackets or quotes, and the tag after it: its strings may hold that tag, too.

        None if it is not one; then nothing is read.
        """
        read = [(yield from reader.space())]
        if (yield from reader.peek()) in ("{", "[", '"') and (
            yield from reader.json_value(read.append, strict=True)
        ):
            read.append((yield from reader.space()))
            if (yield from reader.literal(self.marks.close)):
                return "".join(read).removesuffix("\n")
        reader.unread("".join(read))
        return None


def _kinds(key: str, schema: Mapping[str, Any], close: str) -> Kinds | None:
    """What a parameter may be, None for text: also where the schema says nothing of it."""
    properties: object = schema.get("properties")
    spec: object = cast("Any", properties).get(key) if isinstance(properties, Mapping) else None
    if is_text(spec, close) or cast("Mapping[str, Any]", spec).get("type") in _STRINGS:
        return None
    return kinds_of(spec, schema)


def as_json(text: str, kinds: Kinds) -> str:
    """The value's own JSON if it is some, and allowed; else the text as a JSON string. What must
    not be a string may be spelled as Python does, too: some templates show lists to models so."""
    stripped = text.strip()
    stripped = _WORDS.get(stripped.lower(), stripped)
    try:
        kind = kind_of(json.loads(stripped, parse_constant=_no_constant))
    except (ValueError, RecursionError):
        found = None if "string" in kinds else literal_json(stripped)
        return quoted(text) if found is None else found
    return quoted(text) if "string" in kinds and kind not in kinds else stripped


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
