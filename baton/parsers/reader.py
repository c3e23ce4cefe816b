"""TextReader: lets a grammar read text that arrives in pieces as if all of it were there.

A grammar is a generator that calls these methods with `yield from`. When a decision needs more
text, the grammar is suspended until some arrives. All decisions depend on the text alone, so the
way in which the text was cut into pieces never changes the result. Text is passed on (`emit`) as
soon as it is certain, whatever the size of the pieces. Without I/O.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Iterable
from typing import Any, Final, TypeVar

import orjson

T = TypeVar("T")
Steps = Generator[None, None, T]  # suspended while more text is needed; returns a T
Emit = Callable[[str], Any]

_SPACE: Final = re.compile(r"\s*")
_WORD: Final = re.compile(r"[\w.\-]*")
_SCALAR: Final = re.compile(r"[\w.+\-]*")
_PLAIN_CHARS: Final = re.compile(r'[^"\\]*')  # within a JSON string
_PLAIN_JSON: Final = re.compile(r'[^"{}\[\]]*')  # outside of a JSON string
_STRICT_CHARS: Final = re.compile(r'[^"\\\x00-\x1f]*')  # within a string of strict JSON
_STRICT_JSON: Final = re.compile(r"[\s\w.+\-,:]*")
_CLOSES: Final = {"{": "}", "[": "]"}
MAX_WORD: Final = 256
WINDOW: Final = 8192  # characters that are searched at once; longer than any mark


class TextReader:
    """The text so far and the reading position. feed(piece)* -> end()."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._ended = False
        self._mark: int | None = None

    # ---- for the caller that drives the grammar ----

    def feed(self, piece: str) -> None:
        """Append text. Text that was read and is not marked is forgotten."""
        keep = self._at if self._mark is None else self._mark
        self._text = self._text[keep:] + piece
        self._at -= keep
        self._mark = None if self._mark is None else 0

    def end(self) -> None:
        """Note that no more text will come."""
        self._ended = True

    @property
    def at_end(self) -> bool:
        """Whether all of the text so far has been read."""
        return self._at == len(self._text)

    # ---- going back ----

    def mark(self, back: int = 0) -> None:
        """Set the mark `back` characters before the reading position; text after it is kept."""
        self._mark = self._at - back

    def marked(self) -> str:
        """Remove the mark, and return the text that was read since it."""
        assert self._mark is not None, "mark() comes first"
        text, self._mark = self._text[self._mark : self._at], None
        return text

    def unmark(self) -> None:
        """Remove the mark: text that has been read may be forgotten."""
        self._mark = None

    def rewind(self) -> None:
        """Move the reading position back to the mark, and remove the mark."""
        assert self._mark is not None, "mark() comes first"
        self._at, self._mark = self._mark, None

    def unread(self, text: str) -> None:
        """Move back to before `text`, all of which was just read. No mark may be set."""
        assert self._mark is None, "a mark would be lost"
        if self._text.endswith(text, 0, self._at):
            self._at -= len(text)
        else:  # a part of the text has been forgotten
            self._text, self._at = text + self._text[self._at :], 0

    # ---- reading ----

    def peek(self) -> Steps[str]:
        """Return the next character without reading it; "" at the end."""
        while self._at == len(self._text):
            if self._ended:
                return ""
            yield
        return self._text[self._at]

    def space(self) -> Steps[str]:
        """Read all white space."""
        return (yield from self.matching(_SPACE))

    def word(self) -> Steps[str]:
        """Read a name of letters, digits and `_.-`.

        Return "" if there is none, or if it is longer than MAX_WORD.
        """
        found: list[str] = []
        yield from self.run(_WORD, found.append, MAX_WORD)
        word = "".join(found)
        return word if len(word) <= MAX_WORD else ""

    def char(self) -> Steps[str]:
        """Read the next character; "" at the end."""
        char = yield from self.peek()
        self._at += len(char)
        return char

    def matching(self, pattern: re.Pattern[str]) -> Steps[str]:
        """Read all that matches `pattern`, a repeated class of characters."""
        found: list[str] = []
        yield from self.run(pattern, found.append)
        return "".join(found)

    def marks(self, text: str) -> Steps[bool]:
        """Read `text` line by line, with any white space before its lines.

        Returns False if one of its lines does not come.
        """
        for line in lines_of(text):
            yield from self.space()
            if not (yield from self.literal(line)):
                return False
        return True

    def comes(self, text: str) -> Steps[bool]:
        """Whether `text` comes next. Reads nothing."""
        found = yield from self.literal(text)
        if found:
            self._at -= len(text)
        return found

    def any_comes(self, texts: Iterable[str]) -> Steps[bool]:
        """Whether one of `texts` comes next. Reads nothing."""
        for text in texts:
            if (yield from self.comes(text)):
                return True
        return False

    def literal(self, text: str) -> Steps[bool]:
        """Read `text` if it comes next and return True; else read nothing and return False."""
        while len(self._text) - self._at < len(text):
            if self._ended or not text.startswith(self._text[self._at :]):
                return False
            yield
        if not self._text.startswith(text, self._at):
            return False
        self._at += len(text)
        return True

    def until(self, markers: tuple[str, ...], emit: Emit, tail: bool = True) -> Steps[str]:
        """Read up to and past the marker that ends first; return that marker, "" at the end.

        The text before the marker is emitted as it arrives, except a tail that may become a marker.
        At the end of the text this tail is emitted, too, unless `tail` is false.
        """
        while True:
            text, end = self._text, self._at + WINDOW
            found = [
                (at + len(marker), at, marker)
                for marker in markers
                if (at := text.find(marker, self._at, end)) >= 0
            ]
            if found:
                _, at, marker = min(found)
                self._pass(at, emit)
                self._at += len(marker)
                return marker
            if end < len(text):
                self._pass(end - max(map(len, markers), default=0), emit)
                continue
            held = 0 if self._ended and tail else begun(text[self._at :], markers)
            self._pass(len(text) - held, emit)
            if self._ended:
                self._at = len(text)
                return ""
            yield

    def json_string(self) -> Steps[str | None]:
        """Read a JSON string and return its value; None if it is none (its text stays read)."""
        raw: list[str] = []
        if (yield from self.peek()) != '"' or not (yield from self._string(raw.append)):
            return None
        try:
            return json.loads("".join(raw), strict=False)
        except ValueError:
            return None

    def json_value(self, emit: Emit, strict: bool = False) -> Steps[bool]:
        """Read one JSON value and emit it verbatim; return False if it is none or has no end.

        Brackets and strings must match; the text between them is not checked. `strict`: only the
        characters of JSON are accepted, so that other text is soon rejected.
        """
        chars, plain = (_STRICT_CHARS, _STRICT_JSON) if strict else (_PLAIN_CHARS, _PLAIN_JSON)
        char = yield from self.peek()
        if char == '"':
            return (yield from self._string(emit, chars))
        if char not in _CLOSES:
            count = yield from self.run(_SCALAR, emit)
            return count > 0
        closes: list[str] = []
        while True:
            yield from self.run(plain, emit)
            char = yield from self.peek()
            if char == '"':
                if not (yield from self._string(emit, chars)):
                    return False
                continue
            if char in _CLOSES:
                closes.append(_CLOSES[char])
            elif not char or char != closes.pop():
                return False
            self._pass(self._at + 1, emit)
            if not closes:
                return True

    # ---- parts ----

    def _string(self, emit: Emit, chars: re.Pattern[str] = _PLAIN_CHARS) -> Steps[bool]:
        """Read a JSON string from its opening quote on, and emit it verbatim.

        Returns False if it has no end or contains a character that is not in `chars`.
        """
        self._pass(self._at + 1, emit)
        while True:
            yield from self.run(chars, emit)
            char = yield from self.peek()
            if char not in ('"', "\\"):
                return False
            self._pass(self._at + 1, emit)
            if char == '"':
                return True
            if not (yield from self.peek()):
                return False
            self._pass(self._at + 1, emit)  # the escaped character

    def run(self, pattern: re.Pattern[str], emit: Emit, limit: int | None = None) -> Steps[int]:
        """Read and emit all that matches `pattern`, a repeated class of characters; return its
        length.

        With `limit`, stop once more characters than that have matched.
        """
        total = 0
        while True:
            match = pattern.match(self._text, self._at)
            assert match is not None, "the patterns match nothing, too"
            total += match.end() - self._at
            self._pass(match.end(), emit)
            if self._at < len(self._text) or self._ended or (limit is not None and total > limit):
                return total
            yield

    def _pass(self, upto: int, emit: Emit) -> None:
        if upto > self._at:
            emit(self._text[self._at : upto])
            self._at = upto


def lines_of(text: str) -> tuple[str, ...]:
    """Return the lines of a mark without the white space around them, which is layout."""
    return tuple(line.strip() for line in text.split("\n") if line.strip())


def quoted(text: str) -> str:
    """Return a text as a JSON string."""
    return orjson.dumps(text).decode()


def begun(text: str, markers: tuple[str, ...]) -> int:
    """Return the length of the longest tail of `text` with which one of `markers` starts."""
    longest = 0
    for marker in markers:
        at = text.find(marker[0], max(0, len(text) - len(marker) + 1))
        while at >= 0:
            if marker.startswith(text[at:]):
                longest = max(longest, len(text) - at)
                break
            at = text.find(marker[0], at + 1)
    return longest
