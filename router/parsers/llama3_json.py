"""Llama 3 and 4: the answer is `{"name": "f", "parameters": {...}}`, several separated by `;`.

Calls stand at the start of an answer, or after `<|python_tag|>`. JSON that is no call is content.
Source: Llama 3.1 prompt format, "JSON based tool calling".
"""

from __future__ import annotations

from typing import Final

from router.parsers.grammar import CallEnd, Schemas, ToolFormat, json_call
from router.parsers.parts import Sink
from router.parsers.reader import Reader, Steps

TAG: Final = "<|python_tag|>"


def read(reader: Reader, sink: Sink, _: Schemas) -> Steps[None]:
    reader.mark()
    yield from reader.space()
    if (yield from reader.literal(TAG)) or (yield from reader.peek()) == "{":
        yield from _calls(reader, sink)
    else:
        sink.content(reader.marked())
    while (yield from reader.until((TAG,), sink.content)):
        reader.mark(len(TAG))
        yield from _calls(reader, sink)


def _calls(reader: Reader, sink: Sink) -> Steps[None]:
    """Calls one after another, as long as they are any. The mark stands before the first."""
    while True:
        yield from reader.space()
        end = yield from json_call(reader, sink, "parameters", "arguments")
        if end is CallEnd.NONE:
            sink.content(reader.marked())
        if end is not CallEnd.COMPLETE:
            return
        reader.mark()
        yield from reader.space()
        if not (yield from reader.literal(";")):
            yield from reader.literal(",")
        yield from reader.space()
        if (yield from reader.peek()) != "{":
            sink.content(reader.marked())
            return


FORMAT: Final = ToolFormat("llama3_json", read, (TAG,))
