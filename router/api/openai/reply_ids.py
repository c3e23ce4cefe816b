"""Ids inside a reply: drawn, or, where the reply may be told again, always the same.

A resumable request's replies are made anew for every reader, by any router. Its scope says so
(`pin`), and everything that would be drawn or read from a clock is made of what the record keeps.
"""

from __future__ import annotations

import hashlib
import string
import time
from dataclasses import dataclass
from typing import Any, Final

from starlette.requests import Request as HttpRequest
from starlette.types import Scope

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

    def of_choice(self, index: int) -> PinnedIds:
        """Those of one of several choices: their order among choices does not matter then."""
        return PinnedIds(f"{self._seed}/{index}", self._short, self._prefix)

    def with_prefix(self, prefix: str) -> PinnedIds:
        return PinnedIds(self._seed, self._short, prefix)


def pin(scope: Scope, pinned: Pin) -> None:
    """Mutates `scope`: replies of its request can be told again."""
    scope[_PIN_KEY] = pinned


def created_at(request: HttpRequest) -> int:
    pinned = pin_of(request.scope)
    return int(time.time()) if pinned is None else pinned.created


def call_ids(request: HttpRequest, short: bool) -> DrawId:
    """What draws the ids of tool calls."""
    pinned = pin_of(request.scope)
    if pinned is not None:
        return PinnedIds(f"{pinned.name}/{pinned.created}", short)
    return draw_short_call_id if short else draw_call_id


def of_choice(draw_id: DrawId, index: int) -> DrawId:
    return draw_id.of_choice(index) if isinstance(draw_id, PinnedIds) else draw_id


def pin_of(scope: Scope) -> Pin | None:
    """None for a request that is told once."""
    found: Any = scope.get(_PIN_KEY)
    assert found is None or isinstance(found, Pin)
    return found
