"""The text of a custom tool's call, while its arguments `{"input": "..."}` are written. Sans I/O.

A model calls a custom tool as a function of one text. What it writes is JSON, or nearly: raw line
breaks are taken as such, and arguments of another form are the input as they are.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final, cast

FIELD: Final = "input"
_OPENING: Final = re.compile(rf'\s*\{{\s*"{FIELD}"\s*:\s*"')
_WHOLE: Final = re.compile(r'(?:[^"\\]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*')
_HALF: Final = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}$")  # of a pair: its other half follows


class CustomInput:
    """`push` fragments in order, then `finish` once; each answers the text that they add."""

    def __init__(self) -> None:
        self._raw = ""
        self._at: int | None = None  # in `_raw`: the input goes on here; None: not begun

    def push(self, fragment: str) -> str:
        self._raw += fragment
        if self._at is None:
            opening = _OPENING.match(self._raw)
            if opening is None:
                return ""
            self._at = opening.end()
        found = _WHOLE.match(self._raw, self._at)
        assert found is not None, "it matches nothing at least"
        written = _HALF.sub("", found.group())
        self._at += len(written)
        return _decoded(written)

    def finish(self) -> str:
        """What is left: half of a pair that stays alone, or arguments of another form."""
        if self._at is None:
            return _other(self._raw)
        found = _WHOLE.match(self._raw, self._at)
        assert found is not None, "it matches nothing at least"
        closed = self._raw[found.end() : found.end() + 1] == '"'
        return _decoded(found.group()) if closed else ""


def _decoded(written: str) -> str:
    """The text of a JSON string's inside; a surrogate alone becomes a replacement character."""
    text: str = json.loads(f'"{written}"', strict=False)
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _other(raw: str) -> str:
    try:
        found: object = json.loads(raw, strict=False)
    except ValueError:
        return raw
    told = cast("dict[str, Any]", found).get(FIELD) if isinstance(found, dict) else None
    return told if isinstance(told, str) else raw
