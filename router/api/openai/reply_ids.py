"""Ids inside a reply: drawn, or, where the reply may be told again, always the same.

A resumable request's replies are made anew for every reader, by any router. Its scope says so
(`pin`), and everything that would be drawn or read from a clock is made of what the record keeps.
"""

from __future__ import annotations

import hashlib
import string
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from starlette.types import Scope

from baton.parsers.message import MessageRules
from router.api.openai.message import DrawId, draw_call_id, draw_short_call_id

_PIN_KEY: Final = "baton.pin"
_LETTERS: Final = string.ascii_letters + string.digits


@dataclass(frozen=True, slots=True)
class Pin:
    """`name`: of the request. `created`: wall-clock seconds. `owner`: a digest of its key. `again`:
    it was made before, and is told once more."""

    name: str
    created: int
    owner: str
    again: bool = False


class PinnedIds:
    """Draws the ids of one choice's tool calls: the nth is always the same one."""

    def __init__(self, seed: str, short: bool = False, prefix: str = "call_") -> None:
        self._seed = seed
        self._short = short
        self._prefix = prefix
        self._drawn = 0

    def __call__(self) -> str:
        digest = hashlib.sha256(f"{self._seed}/{self._drawn}".encode())
        self._drawn += 1
        if self._short:
            return "".join(_LETTERS[byte % len(_LETTERS)] for byte in digest.digest()[:9])
        return self._prefix + digest.hexdigest()[:24]


def pin(scope: Scope, pinned: Pin) -> None:
    """Mutates `scope`: replies of its request can be told again."""
    scope[_PIN_KEY] = pinned


def call_ids(
    pinned: Pin | None,
    message: MessageRules | None,
    prefix: str = "call_",
    choice: int | None = None,
) -> DrawId:
    """What draws the ids of tool calls in a reply whose messages are read by such rules: those of
    one of several choices do not hang on the order among choices."""
    short = message is not None and message.tools is not None and message.tools.short_ids
    if pinned is not None:
        seed = f"{pinned.name}/{pinned.created}"
        return PinnedIds(seed if choice is None else f"{seed}/{choice}", short, prefix)
    return draw_short_call_id if short else partial(draw_call_id, prefix)


def pin_of(scope: Scope) -> Pin | None:
    """None for a request that is told once."""
    found: Any = scope.get(_PIN_KEY)
    assert found is None or isinstance(found, Pin)
    return found
