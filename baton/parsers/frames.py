"""Frames: the marks around tool calls, for all formats in which each call stands between marks.

    opening  call BODY call_end  separator  call BODY call_end  closing

Marks are given as the model's chat template writes them. White space at their ends is layout: a
forced call contains it, and a reader accepts any white space there. A model may leave out
separators and closing marks. The reader needs only the marks that begin calls, and the calls
themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from baton.parsers.grammar import (
    Body,
    CallEnd,
    Form,
    Schemas,
    Tool,
    ToolFormat,
    tag,
)
from baton.parsers.parts import Sink
from baton.parsers.reader import Steps, TextReader


@dataclass(frozen=True, slots=True)
class CallFrame:
    """The marks around the calls of a format; see the module's docstring for the first five.

    `array`: the calls are a list in brackets. `bare`: characters with which an answer may begin a
    call without any mark. `lone`: how a call's body begins, if it may stand without other marks.
    `also`: further marks that may begin calls, each with its closing mark.
    """

    call: str = ""
    call_end: str = ""
    separator: str = ""
    opening: str = ""
    closing: str = ""
    array: bool = False
    bare: str = ""
    lone: str = ""
    also: tuple[tuple[str, str], ...] = ()

    @property
    def marks(self) -> tuple[str, ...]:
        """All marks, without white space at their ends."""
        closing = [end for _, end in self.also]
        return (*self.starts, *_stripped(self.call_end, self.closing, *closing))

    @property
    def starts(self) -> tuple[str, ...]:
        """The marks that begin calls. The first is the one that models usually write."""
        return _stripped(self.opening, self.call, self.lone, *(mark for mark, _ in self.also))


def _stripped(*marks: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(mark.strip() for mark in marks if mark.strip()))


def framed(name: str, frame: CallFrame, body: Body, short_ids: bool = False) -> ToolFormat:
    """Return the format `name` whose calls are `body` within `frame`."""

    def grammar(reader: TextReader, sink: Sink, schemas: Schemas) -> Steps[None]:
        return _FrameReader(frame, body, reader, sink, schemas).read()

    markers = frame.marks + body.markers
    return ToolFormat(name, grammar, CallWriter(frame, body), markers, frame.starts, short_ids)


class _FrameReader:
    """Reads one answer. `_open` are closing marks that may still come and are not content."""

    def __init__(
        self, frame: CallFrame, body: Body, reader: TextReader, sink: Sink, schemas: Schemas
    ) -> None:
        self._frame = frame
        self._body = body
        self._reader = reader
        self._sink = sink
        self._schemas = schemas
        self._call, self._call_end = frame.call.strip(), frame.call_end.strip()
        self._closing, self._closings = frame.closing.strip(), dict(frame.also)
        self._open: tuple[str, ...] = ()

    def read(self) -> Steps[None]:
        reader, sink, starts = self._reader, self._sink, self._frame.starts
        if self._frame.bare:
            reader.mark()
            yield from reader.space()
            char = yield from reader.peek()
            if char and char in self._frame.bare and not (yield from reader.any_comes(starts)):
                yield from self._calls()
            else:
                sink.content(reader.marked())
        while mark := (yield from reader.until(starts + self._open, sink.content)):
            if mark in self._open:
                self._closed(mark)
                continue
            self._closing = self._closings.get(mark, self._frame.closing.strip())
            if mark == self._frame.lone:
                reader.unread(mark)
            reader.mark(0 if mark == self._frame.lone else len(mark))
            if self._call and mark == self._frame.opening.strip():
                yield from reader.space()
                if not (yield from reader.literal(self._call)):
                    sink.content(reader.marked())
                    continue
            yield from self._calls()

    def _calls(self) -> Steps[None]:
        """Read one call after another, until something else comes.

        The reader's mark must stand before the first call: text that is no call becomes content.
        """
        reader, sink = self._reader, self._sink
        yield from reader.space()
        in_array = yield from reader.literal("[")
        while True:
            yield from reader.space()
            end = yield from self._body.read(reader, sink, self._schemas)
            if end is CallEnd.NONE:
                sink.content(reader.marked())
                return
            self._open = tuple(mark for mark in (self._call_end, self._closing) if mark)
            if end is not CallEnd.COMPLETE:
                emit = sink.arguments if end is CallEnd.BROKEN else len
                mark = yield from reader.until(self._frame.starts + self._open, emit)
                reader.unread(mark)
                return
            reader.mark()
            yield from reader.space()
            if not (yield from self._goes_on(in_array)):
                sink.content(reader.marked())
                return

    def _goes_on(self, in_array: bool) -> Steps[bool]:
        """Read what stands between two calls; return whether another call begins.

        If so, the reader's mark stands before that call.
        """
        reader = self._reader
        listed = in_array and (yield from reader.literal("]"))
        if listed:
            reader.mark()
            yield from reader.space()
        if (yield from self._ends()) == self._closing != "" or (listed and not self._call):
            return False
        separator = self._frame.separator.strip() or ("," if in_array else "")
        if separator and not (yield from reader.literal(separator)):
            yield from reader.literal(",")
        yield from reader.space()
        if not self._call:
            return in_array or not self._frame.array
        found = yield from reader.literal(self._call)
        if found:
            reader.mark(len(self._call))
        return found

    def _ends(self) -> Steps[str]:
        """Read the marks that close a call or all calls; return the last one, "" if none comes.

        The text after it is kept by the reader's mark.
        """
        last = ""
        for mark in self._open:
            if (yield from self._reader.literal(mark)):
                self._closed(mark)
                self._reader.mark()
                yield from self._reader.space()
                last = mark
        return last

    def _closed(self, mark: str) -> None:
        self._open = (self._closing,) if mark != self._closing and self._closing else ()


_NOT_A_CALL: Final = r"([^{}\s](.|\n)*)?"  # text that does not begin like a call without marks


@dataclass(frozen=True, slots=True)
class CallWriter:
    """Implements grammar.Writer for calls of `body` within `frame`."""

    frame: CallFrame
    body: Body

    def forced(self, tools: Sequence[Tool], several: bool) -> Form:
        """See Writer.forced."""
        frame = self.frame
        begin = frame.opening + "[" * frame.array
        calls: Form = {
            "type": "tags_with_separator",
            "tags": [self._tag(tool) for tool in tools],
            "separator": frame.separator,
            "at_least_one": True,
            "stop_after_first": not several,
        }
        return tag(begin, calls, "]" * frame.array + frame.closing) if begin else calls

    def offered(self, tools: Sequence[Tool], several: bool) -> Form:
        """See Writer.offered."""
        calls, frame = self.forced(tools, several), self.frame
        if frame.bare:
            pattern = _NOT_A_CALL.replace("{}", frame.bare.replace("[", r"\["))
            return {"type": "or", "elements": [calls, {"type": "regex", "pattern": pattern}]}
        return {
            "type": "triggered_tags",
            "triggers": [frame.starts[0]],
            "tags": calls["tags"] if calls["type"] == "tags_with_separator" else [calls],
            "at_least_one": False,
            "stop_after_first": not several,
        }

    def _tag(self, tool: Tool) -> Form:
        call = self.body.written(tool)
        return tag(self.frame.call + call.begin, call.arguments, call.end + self.frame.call_end)
