"""Calls in which the value of each parameter stands as text between tags.

    <function=get_weather>
    <parameter=city>
    Oslo
    </parameter>
    </function>

The arguments are converted to JSON. A value of type `string`, or of a schema without a type, is
text and streams as it arrives. Any other value is JSON if it can be read as JSON. There is one
exception: if the schema allows a string and not the type that was read, the value is a string, so
`12345` for Optional[str] is "12345". For such a schema a string in quotes is read as JSON, because
a forced call writes it in quotes (baton/guided/xml_parameters.py). Text between parameters is left
out.
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
    """A call written as `begin` NAME `name_end` PARAMETERS `end`.

    `marks` are the tags of a parameter, `quote` the marks that may stand around a text value.
    """

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
        # If no mark ends the name, only a parameter or the end of the call proves that it was a
        # name.
        shown = lines_of(self.name_end) != ()
        if not shown and not (yield from reader.any_comes((self.marks.key, self.end.strip()))):
            return CallEnd.NONE
        announce(reader, sink, name)
        return (yield from self.arguments(reader, sink, schemas.get(name, {})))

    def arguments(
        self, reader: TextReader, sink: Sink, schema: Mapping[str, Any]
    ) -> Steps[CallEnd]:
        """Read all parameters up to `end`, and emit them as JSON.

        If the parameters are cut short, the JSON is cut short.
        """
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
        """Read a parameter's name into `found`, and the mark after it.

        Returns whether that mark says that the value is JSON; None if no mark ends the name.
        """
        end, json_end = self.marks.key_end.strip(), self.marks.json_key_end
        mark = yield from reader.until((end, json_end, '">') if json_end else (end,), found.append)
        if mark and not (yield from reader.marks(self.marks.value)):
            return None
        return mark != end if mark else None

    def _value(self, reader: TextReader, sink: Sink, kinds: Kinds | None) -> Steps[bool]:
        """Read one value and its end tag, and emit it as JSON; return False without an end tag.

        `kinds` are the JSON types that the value may have; None: the value is text. If models write
        each value on its own lines, a line break at either end is layout.
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
        """Read a JSON value in brackets or quotes, and the end tag after it; return the value.

        Strings in the value may contain the end tag. If there is no such value, read nothing and
        return None.
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
    """Return the JSON types that a parameter may have; None if it is text, or has no schema."""
    properties: object = schema.get("properties")
    spec: object = cast("Any", properties).get(key) if isinstance(properties, Mapping) else None
    if is_text(spec, close) or cast("Mapping[str, Any]", spec).get("type") in _STRINGS:
        return None
    return kinds_of(spec, schema)


def as_json(text: str, kinds: Kinds) -> str:
    """Return `text` itself if it is JSON of an allowed type, else as a JSON string.

    A value that must not be a string may also have Python's syntax, because some chat templates
    show lists in that syntax to models.
    """
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
