"""Hermes and Qwen: `<tool_call>{"name": "f", "arguments": {...}}</tool_call>`, once per call.

Source: NousResearch/Hermes-Function-Calling, README; Qwen2.5 and Qwen3 chat templates.
"""

from __future__ import annotations

from typing import Final

from router.parsers.grammar import CallEnd, Schemas, ToolFormat, json_call
from router.parsers.parts import Sink
from router.parsers.reader import Reader, Steps

START: Final = "<tool_call>"
END: Final = "</tool_call>"


def read(reader: Reader, sink: Sink, _: Schemas) -> Steps[None]:
    marker = yield from reader.until((START,), sink.content)
    while marker:  # START, always
        reader.mark(len(START))
        yield from reader.space()
        match (yield from json_call(reader, sink, "arguments")):
            case CallEnd.NONE:
                sink.content(reader.marked())
                marker = yield from reader.until((START,), sink.content)
                continue
            case CallEnd.COMPLETE:
                yield from reader.space()
                marker = yield from reader.until((END, START), sink.content)
            case CallEnd.BROKEN:
                marker = yield from reader.until((END, START), sink.arguments)
        if marker == END:
            marker = yield from reader.until((START,), sink.content)


FORMAT: Final = ToolFormat("hermes", read, (START, END))
