"""DeepSeek V3, R1 and V3.1: a list of calls between markers that are tokens of their own.

    CALLS CALL one CALL_END CALL one CALL_END ... CALLS_END
    one = function SEPARATOR name, a line break, the arguments in a json fence     V3, R1
        | name SEPARATOR arguments                                                 V3.1

Source: the chat templates of DeepSeek-V3 and DeepSeek-V3.1.
"""

from __future__ import annotations

from typing import Final

from router.parsers.grammar import Schemas, ToolFormat
from router.parsers.parts import Sink
from router.parsers.reader import Reader, Steps

CALLS: Final = "<｜tool▁calls▁begin｜>"  # noqa: RUF001  the model's own bars
CALLS_END: Final = "<｜tool▁calls▁end｜>"  # noqa: RUF001
CALL: Final = "<｜tool▁call▁begin｜>"  # noqa: RUF001
CALL_END: Final = "<｜tool▁call▁end｜>"  # noqa: RUF001
SEPARATOR: Final = "<｜tool▁sep｜>"  # noqa: RUF001
FENCE: Final = "```"


def read(reader: Reader, sink: Sink, _: Schemas) -> Steps[None]:
    markers = (CALLS, CALL)
    while marker := (yield from reader.until(markers, sink.content)):
        reader.mark(len(marker))
        if marker == CALLS:
            yield from reader.space()
            if not (yield from reader.literal(CALL)):
                sink.content(reader.marked())
                continue
        yield from _call(reader, sink)


def _call(reader: Reader, sink: Sink) -> Steps[None]:
    """One call with what ends it. The mark stands before its marker."""
    name = yield from reader.word()
    is_call = bool(name) and (yield from reader.literal(SEPARATOR))
    yield from reader.space()
    fenced = False
    if is_call and (yield from reader.peek()) != "{":
        name = yield from reader.word()  # V3: what stood before the separator is "function"
        yield from reader.space()
        fenced = yield from reader.literal(FENCE + "json")
        yield from reader.space()
    is_call = is_call and bool(name) and (yield from reader.peek()) == "{"
    if not is_call:
        sink.content(reader.marked())
        return
    reader.unmark()
    sink.call(name)
    if not (yield from reader.json_value(sink.arguments)):
        return
    yield from reader.space()
    if fenced and (yield from reader.literal(FENCE)):
        yield from reader.space()
    if (yield from reader.literal(CALL_END)):
        yield from reader.space()
        yield from reader.literal(CALLS_END)


FORMAT: Final = ToolFormat("deepseek_v3", read, (CALLS, CALLS_END, CALL, CALL_END, SEPARATOR))
