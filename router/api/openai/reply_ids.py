"""Ids inside a reply: random, or, if the reply may be made again, always the same.

The reply to a resumable request is made anew for every reader, by any router. Then the ASGI scope
has a Pin, and what would otherwise be random or read from a clock is computed from the Pin, whose
values are in the request's record.
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
    """What fixes the ids of a reply. `name`: of the request. `created`: wall-clock seconds.
    `owner`: the digest of its API key. `again`: the request was begun before; this is a replay.
    """

    name: str
    created: int
    owner: str
    again: bool = False


class PinnedIds:
    """Returns the ids of one choice's tool calls, computed from `seed`: the nth id is always the
    same."""

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
    """Put a Pin into `scope`, so that the reply to its request can be made again."""
    scope[_PIN_KEY] = pinned


def call_ids(
    pinned: Pin | None,
    message: MessageRules | None,
    prefix: str = "call_",
    choice: int | None = None,
) -> DrawId:
    """Return the function that makes the ids of tool calls in a reply.

    The tool format in `message` may require short ids. `choice`: each of several choices gets its
    own sequence of ids, so their order in time does not matter."""
    short = message is not None and message.tools is not None and message.tools.short_ids
    if pinned is not None:
        seed = f"{pinned.name}/{pinned.created}"
        return PinnedIds(seed if choice is None else f"{seed}/{choice}", short, prefix)
    return draw_short_call_id if short else partial(draw_call_id, prefix)


def pin_of(scope: Scope) -> Pin | None:
    """Return the Pin of a scope, or None for a request whose reply is made only once."""
    found: Any = scope.get(_PIN_KEY)
    assert found is None or isinstance(found, Pin)
    return found
