"""Grammar: what a format of tool calls is to the machine that runs it; and calls written as JSON.

A format is a function that reads the answer (after any reasoning) to its end and tells the sink.
Rules that all formats share:
- A call is announced once its name is known and its arguments have begun. Before that it may turn
  out not to be one: then its text, markers too, is content.
- After that its arguments are passed on verbatim as they come, valid JSON or not, as OpenAI warns
  its own clients; an answer cut short leaves them cut short.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from router.parsers.parts import Sink
from router.parsers.reader import Reader, Steps

# Tool name -> its parameters' JSON schema; only formats that spell values without types need it.
Schemas = Mapping[str, Mapping[str, Any]]
Grammar = Callable[[Reader, Sink, Schemas], Steps[None]]


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A format by name. `markers`, the first of which begins calls, must reach the grammar also
    where they are special tokens."""

    name: str
    grammar: Grammar
    markers: tuple[str, ...]
    short_ids: bool = field(default=False)  # call ids of 9 letters and digits, as Mistral's demand


class CallEnd(enum.Enum):
    NONE = enum.auto()  # not a call: nothing was announced
    COMPLETE = enum.auto()
    BROKEN = enum.auto()  # announced, then cut short or not JSON


def json_call(reader: Reader, sink: Sink, *arguments: str) -> Steps[CallEnd]:
    """Read `{"name": ..., "arguments": ...}`; `arguments` are the names that these may have.

    Name and arguments come in any order; `id`, `type` and `index` may stand with them. The caller's
    mark stays for NONE, and is gone once the call is announced.
    """
    call = _JsonCall(reader, sink, arguments)
    complete = yield from call.read()
    if not call.announced:
        return CallEnd.NONE
    return CallEnd.COMPLETE if complete else CallEnd.BROKEN


class _JsonCall:
    """One object on its way to a call."""

    def __init__(self, reader: Reader, sink: Sink, arguments: tuple[str, ...]) -> None:
        self.announced = False
        self._reader = reader
        self._sink = sink
        self._keys = arguments
        self._name: str | None = None
        self._early: list[str] | None = None  # arguments that came before the name

    def read(self) -> Steps[bool]:
        """The whole object; False where it is not JSON, or no call."""
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
        if key == "name" and self._name is None:
            self._name = yield from self._reader.json_string()
            if self._name and self._early is not None:
                self._tell("".join(self._early))
            return bool(self._name)
        if key in self._keys and not self.announced and self._early is None:
            self._early = []
            return (yield from self._reader.json_value(self._tell))
        if key in ("id", "type", "index") or self.announced:
            return (yield from self._reader.json_value(len))
        return False

    def _tell(self, text: str) -> None:
        if self._name is None:
            assert self._early is not None, "arguments have begun"
            self._early.append(text)
            return
        if not self.announced:
            self.announced = True
            self._reader.unmark()
            self._sink.call(self._name)
        self._sink.arguments(text)
