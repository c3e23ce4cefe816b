"""Qwen3-Coder: parameters as tags, each value as plain text.

    <tool_call>
    <function=get_weather>
    <parameter=city>
    Oslo
    </parameter>
    </function>
    </tool_call>

The arguments' JSON is made here. A value of type `string`, or of a schema that names no type, is
text and streams as it arrives. Any other is JSON if it reads as such, unless its schema allows a
string and not what was read: a `12345` of Optional[str] is "12345". A string in quotes is read as
JSON there, because that is how a forced call writes it (baton/xml_parameters.py). Source:
Qwen3-Coder's qwen3coder_tool_parser.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final, cast

import orjson

from baton.schema_kinds import Kinds, kind_of, kinds_of
from baton.xml_parameters import PARAMETER_END, is_text
from router.parsers.grammar import Schemas, ToolFormat
from router.parsers.parts import Sink
from router.parsers.reader import Reader, Steps

START: Final = "<tool_call>"
END: Final = "</tool_call>"
FUNCTION: Final = "<function="
FUNCTION_END: Final = "</function>"
PARAMETER: Final = "<parameter="
_WORDS: Final = {"true": "true", "false": "false", "null": "null", "none": "null"}
_STRINGS: Final = ("str", "text", "enum")  # what clients write for `string`


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
            if not (yield from _value(reader, sink, _kinds("".join(key), schema))):
                return
        elif (yield from reader.literal(FUNCTION_END)):
            sink.arguments("{}" if opening == "{" else "}")
            return
        else:
            return


def _value(reader: Reader, sink: Sink, kinds: Kinds | None) -> Steps[bool]:
    """One value, without the line break at either end; False if it has no end.

    `kinds`: what it may be, None if it is text.
    """
    yield from reader.literal("\n")
    ends = ("\n" + PARAMETER_END, PARAMETER_END)
    if kinds is None:
        sink.arguments('"')
        found = yield from reader.until(ends, lambda text: sink.arguments(_quoted(text)[1:-1]))
        if found:
            sink.arguments('"')
        return bool(found)
    value = yield from _json(reader)
    if value is None:
        parts: list[str] = []
        if not (yield from reader.until(ends, parts.append)):
            return False
        value = "".join(parts)
    sink.arguments(_as_json(value, kinds))
    return True


def _json(reader: Reader) -> Steps[str | None]:
    """A value in brackets or quotes, and the tag after it: its strings may hold that tag, too.

    None if it is not one; then nothing is read.
    """
    read = [(yield from reader.space())]
    if (yield from reader.peek()) in ("{", "[", '"') and (
        yield from reader.json_value(read.append, strict=True)
    ):
        read.append((yield from reader.space()))
        if (yield from reader.literal(PARAMETER_END)):
            return "".join(read).removesuffix("\n")
    reader.unread("".join(read))
    return None


def _kinds(key: str, schema: Mapping[str, Any]) -> Kinds | None:
    """What a parameter may be, None for text: also where the schema says nothing of it."""
    properties: object = schema.get("properties")
    spec: object = cast("Any", properties).get(key) if isinstance(properties, Mapping) else None
    if is_text(spec) or cast("Mapping[str, Any]", spec).get("type") in _STRINGS:
        return None
    return kinds_of(spec, schema)


def _as_json(text: str, kinds: Kinds) -> str:
    """The value's own JSON if it is some, and allowed; else the text as a JSON string."""
    stripped = text.strip()
    stripped = _WORDS.get(stripped.lower(), stripped)
    try:
        kind = kind_of(json.loads(stripped, parse_constant=_no_constant))
    except (ValueError, RecursionError):
        return _quoted(text)
    return _quoted(text) if "string" in kinds and kind not in kinds else stripped


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _quoted(text: str) -> str:
    return orjson.dumps(text).decode()


FORMAT: Final = ToolFormat("qwen3_coder", read, (START, END))
