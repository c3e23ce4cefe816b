"""Qwen3-Coder: parameters as tags, each value as plain text.

    <tool_call>
    <function=get_weather>
    <parameter=city>
    Oslo
    </parameter>
    </function>
    </tool_call>

The arguments' JSON is made here. A value whose schema says anything but `string` is JSON if it
reads as such; text streams as it arrives. Source: Qwen3-Coder's qwen3coder_tool_parser.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final, cast

import orjson

from router.parsers.grammar import Schemas, ToolFormat
from router.parsers.parts import Sink
from router.parsers.reader import Reader, Steps

START: Final = "<tool_call>"
END: Final = "</tool_call>"
FUNCTION: Final = "<function="
FUNCTION_END: Final = "</function>"
PARAMETER: Final = "<parameter="
PARAMETER_END: Final = "</parameter>"
_WORDS: Final = {"true": "true", "false": "false", "null": "null", "none": "null"}
_STRINGS: Final = ("string", "str", "text", "enum")


def read(reader: Reader, sink: Sink, schemas: Schemas) -> Steps[None]:
    while marker := (yield from reader.until((START, FUNCTION), sink.content)):
        reader.mark(len(marker))
        framed = marker == START
        if framed:
            yield from reader.space()
        if not framed or (yield from reader.literal(FUNCTION)):
            name = yield from reader.word()
            if name and (yield from reader.literal(">")):
                reader.unmark()
                sink.call(name)
                yield from _parameters(reader, sink, schemas.get(name, {}))
                yield from reader.space()
                yield from reader.literal(END)
                continue
        sink.content(reader.marked())


def _parameters(reader: Reader, sink: Sink, schema: Mapping[str, Any]) -> Steps[None]:
    """Up to the function's end; one that is cut short leaves the JSON cut short."""
    opening = "{"
    while True:
        yield from reader.space()
        if (yield from reader.literal(PARAMETER)):
            key: list[str] = []
            if not (yield from reader.until((">",), key.append)):
                return
            sink.arguments(opening + _quoted("".join(key)) + ": ")
            opening = ", "
            if not (yield from _value(reader, sink, _is_text("".join(key), schema))):
                return
        elif (yield from reader.literal(FUNCTION_END)):
            sink.arguments("{}" if opening == "{" else "}")
            return
        else:
            return


def _value(reader: Reader, sink: Sink, is_text: bool) -> Steps[bool]:
    """One value, without the line break at either end; False if it has no end."""
    yield from reader.literal("\n")
    ends = ("\n" + PARAMETER_END, PARAMETER_END)
    if is_text:
        sink.arguments('"')
        found = yield from reader.until(ends, lambda text: sink.arguments(_quoted(text)[1:-1]))
        if found:
            sink.arguments('"')
        return bool(found)
    parts: list[str] = []
    found = yield from reader.until(ends, parts.append)
    if found:
        sink.arguments(_as_json("".join(parts)))
    return bool(found)


def _is_text(key: str, schema: Mapping[str, Any]) -> bool:
    """Whether the schema wants a string: also where it says nothing of the parameter."""
    properties: object = schema.get("properties")
    spec: object = cast("Any", properties).get(key) if isinstance(properties, Mapping) else None
    if not isinstance(spec, Mapping):
        return True
    kind: object = cast("Any", spec).get("type")
    return kind in _STRINGS


def _as_json(text: str) -> str:
    """The value's own JSON if it is some, else the text as a JSON string."""
    stripped = text.strip()
    if stripped.lower() in _WORDS:
        return _WORDS[stripped.lower()]
    try:
        json.loads(stripped, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return _quoted(text)
    return stripped


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _quoted(text: str) -> str:
    return orjson.dumps(text).decode()


FORMAT: Final = ToolFormat("qwen3_coder", read, (START, END))
