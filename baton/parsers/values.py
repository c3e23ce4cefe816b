"""Values: reads values in Python's syntax, or a similar syntax, as they arrive; emits JSON.

It reads strings in quotes with escapes, strings between marks of the format without escapes, lists,
tuples, dictionaries, numbers, and the words of Python and JSON (True, true, None, null, ...).
"""

from __future__ import annotations

import re
from typing import Final

from baton.parsers.reader import Emit, Steps, TextReader, quoted

MAX_DEPTH: Final = 64
PLAIN_KEY: Final = re.compile(r"[^:,\[\](){}\n]*")
_CLOSES: Final = {"[": "]", "(": ")", "{": "}"}
_WORDS: Final = {"True": "true", "False": "false", "None": "null"}
_JSON_WORD: Final = re.compile(r"true|false|null|-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?", re.ASCII)
_BARE: Final = re.compile(r"[^,\[\](){}\n]*")
_QUOTED: Final = {'"': re.compile(r'[^"\\]*'), "'": re.compile(r"[^'\\]*")}
_ESCAPES: Final = {
    "n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0",
    "\n": "", "/": "/", "\\": "\\", '"': '"', "'": "'",
}  # fmt: skip
_CODES: Final = {"x": 2, "u": 4, "U": 8}
_LARGEST: Final = 1e300


def literal_json(text: str) -> str | None:
    """Return the JSON of a list or dictionary in Python's syntax; None if `text` is neither."""
    if text[:1] not in _CLOSES:
        return None
    found: list[str] = []
    reader = TextReader()
    reader.feed(text)
    reader.end()
    reading = Values(reader, found.append, (), bare=False).value()
    try:
        while True:
            next(reading)
    except StopIteration as end:
        whole = bool(end.value) and reader.at_end
    return "".join(found) if whole else None


class Values:
    """Reads values and emits them as JSON. `bare`: a string may stand without quotes."""

    def __init__(
        self, reader: TextReader, emit: Emit, quotes: tuple[str, ...], bare: bool = True
    ) -> None:
        self._reader = reader
        self._emit = emit
        self._quotes = quotes
        self._bare = bare

    def value(self, depth: int = 0) -> Steps[bool]:
        """Read one value and emit it as JSON; return False if it is no value, or has no end."""
        reader, emit = self._reader, self._emit
        for quote in self._quotes:
            if (yield from reader.literal(quote)):
                emit('"')
                found = yield from reader.until((quote,), self._text, tail=False)
                if found:
                    emit('"')
                return bool(found)
        char = yield from reader.peek()
        if char in _QUOTED:
            return (yield from self._string(char))
        if char in _CLOSES:
            return depth < MAX_DEPTH and (yield from self._list(char, depth))
        text = (yield from reader.matching(_BARE)).strip()
        if not (yield from reader.peek()):
            return False  # the text ends here, so the value may have been cut short
        value = _as_json(text)
        if value is not None or (text and self._bare):
            emit(value or quoted(text))
            return True
        return False

    def _list(self, bracket: str, depth: int) -> Steps[bool]:
        reader, emit, is_dict = self._reader, self._emit, bracket == "{"
        yield from reader.char()
        emit("{" if is_dict else "[")
        first = True
        while True:
            yield from reader.space()
            if (yield from reader.literal(_CLOSES[bracket])):
                emit("}" if is_dict else "]")
                return True
            if not first:
                emit(", ")
            first = False
            if is_dict and not (yield from self._member()):
                return False
            if not (yield from self.value(depth + 1)):
                return False
            yield from reader.space()
            if not (yield from reader.literal(",")) and (
                (yield from reader.peek()) != _CLOSES[bracket]
            ):
                return False

    def _member(self) -> Steps[bool]:
        """Read a key of a dictionary and the colon after it; return False if either is missing."""
        reader = self._reader
        if (yield from reader.peek()) in _QUOTED or (yield from reader.any_comes(self._quotes)):
            if not (yield from self.value()):
                return False
            yield from reader.space()
        else:
            key = (yield from reader.matching(PLAIN_KEY)).strip()
            if not key or not self._bare:
                return False
            self._emit(quoted(key))
        self._emit(": ")
        found = yield from reader.literal(":")
        yield from reader.space()
        return found

    def _string(self, quote: str) -> Steps[bool]:
        """Read a string in quotes with the escapes of Python and JSON.

        Return False if it has no end or a wrong escape.
        """
        reader = self._reader
        yield from reader.char()
        self._emit('"')
        while True:
            yield from reader.run(_QUOTED[quote], self._text)
            char = yield from reader.char()
            if char == quote:
                self._emit('"')
                return True
            if char != "\\":
                return False
            escaped = yield from reader.char()
            if not escaped:
                return False
            if escaped in _CODES:
                digits = ""
                for _ in range(_CODES[escaped]):
                    digits += yield from reader.char()
                if not re.fullmatch("[0-9a-fA-F]+", digits):
                    return False
                pair = chr(int(digits, 16)).encode("utf-16-be") if len(digits) > 4 else b""
                units = [pair[:2].hex(), pair[2:].hex()] if pair else [f"{digits:0>4}"]
                self._emit("".join(f"\\u{unit}" for unit in units))
            else:
                self._text(_ESCAPES.get(escaped, "\\" + escaped))

    def _text(self, text: str) -> None:
        self._emit(quoted(text)[1:-1])


def _as_json(text: str) -> str | None:
    """Return the JSON of a number, or of a word like True or null; None for any other text."""
    text = _WORDS.get(text, text)
    if _JSON_WORD.fullmatch(text):
        return text
    try:
        number = float(text.replace("_", ""))
    except ValueError:
        return None
    if not -_LARGEST < number < _LARGEST:
        return None
    return repr(int(number) if number.is_integer() else number)
