"""CustomInput: extracts the text of a custom tool's call from its arguments `{"input": "..."}`,
while the model writes them. Sans I/O.

The model calls a custom tool as a function with one text. Its arguments need not be correct JSON:
raw line breaks in the text are accepted, and arguments of any other form are taken as the text.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final, cast

FIELD: Final = "input"
_OPENING: Final = re.compile(rf'\s*\{{\s*"{FIELD}"\s*:\s*"')
_WHOLE: Final = re.compile(r'(?:[^"\\]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*')
# The first half of a surrogate pair at the end: its other half is still to come.
_HALF: Final = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}$")


class CustomInput:
    """Call `push` for each fragment of the arguments in order, then `finish` once. Both return the
    text that they add to the input."""

    def __init__(self) -> None:
        self._raw = ""
        self._at: int | None = None  # index in `_raw` of the next unread text; None: no text yet

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
        """Return the rest of the input: a first surrogate without its second, or the whole input if
        the arguments have another form."""
        if self._at is None:
            return _other(self._raw)
        found = _WHOLE.match(self._raw, self._at)
        assert found is not None, "it matches nothing at least"
        closed = self._raw[found.end() : found.end() + 1] == '"'
        return _decoded(found.group()) if closed else ""


def _decoded(written: str) -> str:
    """Return the text that the inside of a JSON string stands for. A surrogate without its other
    half becomes a replacement character."""
    text: str = json.loads(f'"{written}"', strict=False)
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _other(raw: str) -> str:
    try:
        found: object = json.loads(raw, strict=False)
    except ValueError:
        return raw
    told = cast("dict[str, Any]", found).get(FIELD) if isinstance(found, dict) else None
    return told if isinstance(told, str) else raw
