"""Calls whose arguments are JSON: an object that holds name and arguments, or a name before them.

{"name": "f", "arguments": {...}}      JsonObject
{"f": {...}}                           KeyedObject
f MARK {...}                           Named
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import orjson

from baton.parsers.grammar import (
    Body,
    CallEnd,
    Schemas,
    Tool,
    WrittenCall,
    announce,
    json_form,
    sequence,
    text_form,
)
from baton.parsers.parts import Sink
from baton.parsers.reader import Steps, TextReader

_BESIDE: Final = ("id", "type", "index", "tool_call_id")  # members that are read and left out


@dataclass(frozen=True, slots=True)
class JsonObject:
    """A JSON object with name and arguments, in any order.

    The key of the arguments may be `arguments` or `parameters`. They may be an object, or a string
    that contains one. The fields are the keys that a forced call uses.
    """

    arguments: str = "arguments"
    name: str = "name"
    beside: str = ""  # what stands before the name in the template; "ID" stands for digits

    @property
    def markers(self) -> tuple[str, ...]:
        """See Body.markers."""
        return ()

    def read(self, reader: TextReader, sink: Sink, schemas: Schemas) -> Steps[CallEnd]:
        """See Body.read."""
        call = _ObjectReader(self, reader, sink)
        complete = yield from call.read()
        if not call.announced:
            return CallEnd.NONE
        return CallEnd.COMPLETE if complete else CallEnd.BROKEN

    def written(self, tool: Tool) -> WrittenCall:
        """See Body.written."""
        named = f'"{self.name}": "{tool.name}", "{self.arguments}": '
        if not self.beside:
            return WrittenCall("{" + named, json_form(tool.schema), "}")
        before, after = self.beside.split("ID")
        digits = {"type": "regex", "pattern": "[0-9]{1,3}"}
        arguments = sequence(digits, text_form(after + named), json_form(tool.schema))
        return WrittenCall("{" + before, arguments, "}")


@dataclass(frozen=True, slots=True)
class KeyedObject:
    """A JSON object with one member: the key is the name, the value the arguments."""

    @property
    def markers(self) -> tuple[str, ...]:
        """See Body.markers."""
        return ()

    def read(self, reader: TextReader, sink: Sink, schemas: Schemas) -> Steps[CallEnd]:
        """See Body.read."""
        if not (yield from reader.literal("{")):
            return CallEnd.NONE
        yield from reader.space()
        name = yield from reader.json_string()
        yield from reader.space()
        if not name or not (yield from reader.literal(":")):
            return CallEnd.NONE
        yield from reader.space()
        if (yield from reader.peek()) != "{":
            return CallEnd.NONE
        announce(reader, sink, name)
        complete = yield from reader.json_value(sink.arguments)
        yield from reader.space()
        complete = complete and (yield from reader.literal("}"))
        return CallEnd.COMPLETE if complete else CallEnd.BROKEN

    def written(self, tool: Tool) -> WrittenCall:
        """See Body.written."""
        return WrittenCall(f'{{"{tool.name}": ', json_form(tool.schema), "}")


@dataclass(frozen=True, slots=True)
class Named:
    """A name and, after `mark`, the arguments.

    `before`: a constant text before the name. A call may have an id: `id_before` is the mark
    between an id and the name after it, `id_after` the mark between the name and an id after it.
    `id_pattern`: the regular expression of the ids in forced calls. `end`: the mark after the
    arguments.
    """

    mark: str
    end: str = ""
    before: str = ""
    id_before: str = ""
    id_after: str = ""
    id_pattern: str = ""

    @property
    def markers(self) -> tuple[str, ...]:
        """See Body.markers."""
        return (self.mark, self.end, self.before, self.id_before, self.id_after)

    def read(self, reader: TextReader, sink: Sink, schemas: Schemas) -> Steps[CallEnd]:
        """See Body.read."""
        if self.before:
            yield from reader.literal(self.before)
        name = yield from reader.word()
        if self.id_before and (yield from reader.literal(self.id_before)):
            name = yield from reader.word()
        if self.id_after and (yield from reader.literal(self.id_after)):
            yield from reader.word()
        yield from reader.marks(self.mark)  # a model may leave the mark out
        yield from reader.space()
        if not name or (yield from reader.peek()) != "{":
            return CallEnd.NONE
        announce(reader, sink, name)
        if not (yield from reader.json_value(sink.arguments)):
            return CallEnd.BROKEN
        yield from reader.marks(self.end)
        return CallEnd.COMPLETE

    def written(self, tool: Tool) -> WrittenCall:
        """See Body.written."""
        arguments = json_form(tool.schema)
        if not self.id_pattern:
            return WrittenCall(f"{self.before}{tool.name}{self.mark}", arguments, self.end)
        own = {"type": "regex", "pattern": self.id_pattern}
        if self.id_before:
            named = text_form(f"{self.id_before}{tool.name}{self.mark}")
            return WrittenCall(self.before, sequence(own, named, arguments), self.end)
        begin = f"{self.before}{tool.name}{self.id_after}"
        return WrittenCall(begin, sequence(own, text_form(self.mark), arguments), self.end)


@dataclass(frozen=True, slots=True)
class Either:
    """Two bodies, a JsonObject and another one. Both are read; forced calls are written as
    `first`.
    """

    first: Body
    other: Body

    @property
    def markers(self) -> tuple[str, ...]:
        """See Body.markers."""
        return self.first.markers + self.other.markers

    def read(self, reader: TextReader, sink: Sink, schemas: Schemas) -> Steps[CallEnd]:
        """See Body.read."""
        is_object = (yield from reader.peek()) == "{"
        body = self.first if is_object == isinstance(self.first, JsonObject) else self.other
        return (yield from body.read(reader, sink, schemas))

    def written(self, tool: Tool) -> WrittenCall:
        """See Body.written."""
        return self.first.written(tool)


class _ObjectReader:
    """Reads one JsonObject. `announced`: the call has been announced to the sink."""

    def __init__(self, form: JsonObject, reader: TextReader, sink: Sink) -> None:
        self.announced = False
        self._reader = reader
        self._sink = sink
        self._form = form
        self._name: str | None = None
        self._early: list[str] | None = None  # arguments that came before the name

    def read(self) -> Steps[bool]:
        """Read the whole object; return False if it is not JSON, or not a call."""
        reader = self._reader
        if not (yield from reader.literal("{")):
            return False
        while True:
            yield from reader.space()
            key = yield from reader.json_string()
            yield from reader.space()
            if key is None or not (yield from reader.literal(":")):
                return False
            yield from reader.space()
            if not (yield from self._member(key)):
                return False
            yield from reader.space()
            if not (yield from reader.literal(",")):
                return (yield from reader.literal("}"))

    def _member(self, key: str) -> Steps[bool]:
        if key == self._form.name and self._name is None:
            self._name = yield from self._reader.json_string()
            if self._name and self._early is not None:
                self._tell("".join(self._early))
            return bool(self._name)
        if key in ("arguments", "parameters") and not self.announced and self._early is None:
            self._early = []
            return (yield from self._arguments())
        if key in _BESIDE or self.announced:
            return (yield from self._reader.json_value(len))
        return False

    def _arguments(self) -> Steps[bool]:
        if (yield from self._reader.peek()) != '"':
            return (yield from self._reader.json_value(self._tell))
        read: list[str] = []
        complete = yield from self._reader.json_value(read.append)
        self._tell(_unpacked("".join(read)))
        return complete

    def _tell(self, text: str) -> None:
        if self._name is None:
            assert self._early is not None, "arguments have begun"
            self._early.append(text)
            return
        if not self.announced:
            self.announced = True
            announce(self._reader, self._sink, self._name)
        self._sink.arguments(text)


def _unpacked(text: str) -> str:
    """Return the text of a JSON string if it contains a JSON object, as some models write
    arguments.

    Any other text is returned unchanged.
    """
    try:
        held = orjson.loads(text)
        return held if isinstance(orjson.loads(held), dict) else text
    except orjson.JSONDecodeError:
        return text
