"""KeptBodies: limits the store's memory that the resumable requests of one key may take.

The store keeps the body of a request while the request runs and for TERMINAL_TTL_S afterwards.
Without a limit one key could fill the store, and no log would have room. Only requests that this
router began are counted. Event loop only.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from baton.protocol.clock import Clock
from baton.protocol.errors import Overloaded
from router.store.base import TERMINAL_TTL_S


@dataclass(slots=True)
class _Owner:
    """What one key has in the store. `ended`: for each ended request when the store forgets its
    body, and the body's bytes; in the order of these times."""

    num_bytes: int = 0
    ended: deque[tuple[float, int]] = field(default_factory=deque[tuple[float, int]])


class KeptBodies:
    """The kept bodies by owner. `max_bytes`: the limit for each owner."""

    def __init__(self, clock: Clock, max_bytes: int) -> None:
        self._clock = clock
        self._max_bytes = max_bytes
        self._owners: dict[str, _Owner] = {}

    def begin(self, owner: str, num_bytes: int) -> None:
        """Count a body of a new request, until TERMINAL_TTL_S after `end`.

        Raises Overloaded if the owner has no room for it.
        """
        now = self._clock.monotonic()
        self._forget(now)
        held = self._owners.setdefault(owner, _Owner())
        if held.num_bytes and held.num_bytes + num_bytes > self._max_bytes:
            first = held.ended[0][0] - now if held.ended else TERMINAL_TTL_S
            raise Overloaded(
                f"{held.num_bytes >> 20} MiB of this key's resumable requests are kept already",
                retry_after_s=max(1, math.ceil(first)),
            )
        held.num_bytes += num_bytes

    def end(self, owner: str, num_bytes: int, *, kept: bool = True) -> None:
        """Note that a request of `begin` runs here no more. `kept`: the store keeps its body for
        TERMINAL_TTL_S; else the body stops counting now."""
        now, ended = self._clock.monotonic(), self._owners[owner].ended
        if kept:
            ended.append((now + TERMINAL_TTL_S, num_bytes))
        else:
            ended.appendleft((now, num_bytes))

    def _forget(self, now: float) -> None:
        for owner, held in list(self._owners.items()):
            while held.ended and held.ended[0][0] <= now:
                held.num_bytes -= held.ended.popleft()[1]
            if not held.num_bytes:
                del self._owners[owner]
