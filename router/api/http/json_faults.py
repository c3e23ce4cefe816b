"""Which field made orjson refuse a body: NaN, lone surrogates, huge numbers. For the error's sake.

Only ever run on a body that was refused already; what it finds is never used as a value.
"""

from __future__ import annotations

import json
import math
from typing import Final, cast

LARGEST: Final = 2**64 - 1
SMALLEST: Final = -(2**63)


def fault_of(raw: bytes) -> tuple[str, str] | None:
    """(path like `messages[0].content`, what is wrong there); None where JSON itself is broken."""
    try:
        content: object = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    waiting: list[tuple[str, object]] = [("", content)]
    while waiting:
        path, value = waiting.pop()
        what = _fault(value)
        if what is not None:
            return path, what
        if isinstance(value, dict):
            fields = cast("dict[str, object]", value)
            if any(_fault(name) for name in fields):
                return path, "has a name that is not valid Unicode"
            waiting += [(f"{path}.{name}" if path else name, each) for name, each in fields.items()]
        elif isinstance(value, list):
            items = cast("list[object]", value)
            waiting += [(f"{path}[{index}]", each) for index, each in enumerate(items)]
    return None


def _fault(value: object) -> str | None:
    if isinstance(value, float) and not math.isfinite(value):
        return "must be a finite number"
    if isinstance(value, int) and not SMALLEST <= value <= LARGEST:
        return "is a number of more than 64 bits"
    if isinstance(value, str) and not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            return "is not valid Unicode (a lone surrogate)"
    return None
