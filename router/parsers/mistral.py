"""Mistral: `[TOOL_CALLS]` before a JSON array of calls, or before each name with its arguments.

    [TOOL_CALLS][{"name": "f", "arguments": {...}}, ...]       tokenizers up to v7
    [TOOL_CALLS]f[ARGS]{...}[TOOL_CALLS]g{...}                 v11 and later

Source: mistral-common, tokens/tokenizers/instruct.py.
"""

from __future__ import annotations

from typing import Final

from router.parsers.grammar import CallEnd, Schemas, ToolFormat, json_call
from router.parsers.parts import Sink
from router.parsers.reader import Reader, Steps

START: Final = "[TOOL_CALLS]"
CALL_ID: Final = "[CALL_ID]"
ARGS: Final = "[ARGS]"


def read(reader: Reader, sink: Sink, _: Schemas) -> Steps[None]:
    while (yield from reader.until((START,), sink.content)):
        reader.mark(len(START))
        yield from reader.space()
        if (yield from reader.literal("[")):
            yield from _array(reader, sink)
        else:
            yield from _named(reader, sink)


def _array(reader: Reader, sink: Sink) -> Steps[None]:
    """`{...}, {...}]`. The mark stands before the bracket."""
    while True:
        yield from reader.space()
        end = yield from json_call(reader, sink, "arguments")
        if end is CallEnd.NONE:
            sink.content(reader.marked())
        if end is not CallEnd.COMPLETE:
            return
        yield from reader.space()
        reader.mark()
        if (yield from reader.literal("]")) or not (yield from reader.literal(",")):
            reader.unmark()
            return


def _named(reader: Reader, sink: Sink) -> Steps[None]:
    name = yield from reader.word()
    if (yield from reader.literal(CALL_ID)):
        yield from reader.word()
    yield from reader.literal(ARGS)
    yield from reader.space()
    is_call = bool(name) and (yield from reader.peek()) == "{"
    if not is_call:
        sink.content(reader.marked())
        return
    reader.unmark()
    sink.call(name)
    yield from reader.json_value(sink.arguments)


FORMAT: Final = ToolFormat("mistral", read, (START, CALL_ID, ARGS), short_ids=True)
