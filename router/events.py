"""What happened to a router and its nodes, for the console: a bounded ring of events.

The parts that know note it: sessions (a node joined, drained or was lost), the nodes' health
(quarantine), journeys (retries, migrations), the store's guard, the key guards. A plain request
notes nothing. Each kind has a ring of its own, so a flood of one kind does not drive out another.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from itertools import chain
from typing import Final, Literal

import msgspec

log = logging.getLogger(__name__)
MOST_OF_A_KIND: Final = 100
MOST_CHARS: Final = 240
EventKind = Literal[
    "node-joined", "node-lost", "node-refused", "drain", "quarantine", "retry", "migration",
    "refused-key", "store", "broken",
]  # fmt: skip


class RouterEvent(msgspec.Struct, frozen=True, gc=False):
    """`seq`: counts all events of this router. `at`: wall-clock seconds."""

    seq: int
    at: float
    kind: EventKind
    text: str
    node: str | None = None
    request_id: str | None = None


class EventRing:
    """The last events of each kind. Event loop only. `wall`: returns wall-clock seconds."""

    def __init__(self, wall: Callable[[], float] = time.time) -> None:
        self._wall = wall
        self._kinds: dict[EventKind, deque[RouterEvent]] = {}
        self.seq = 0  # of the last event; 0: there was none

    def note(
        self, kind: EventKind, text: str, *, node: str | None = None, request_id: str | None = None
    ) -> None:
        """Add an event. Texts name nodes and causes, never a key or a text of a client."""
        self.seq += 1
        ring = self._kinds.get(kind)
        if ring is None:
            ring = self._kinds[kind] = deque(maxlen=MOST_OF_A_KIND)
        ring.append(RouterEvent(self.seq, self._wall(), kind, text[:MOST_CHARS], node, request_id))

    def retried(self, request_id: str, epoch: int, num_tokens: int, why: str) -> None:
        """Note, and log, that an epoch of a request failed and the next one begins."""
        log.warning("request %s: epoch %d failed after %d tokens: %s",
                    request_id, epoch, num_tokens, why)  # fmt: skip
        text = f"epoch {epoch} failed after {num_tokens} tokens: {why}"
        self.note("retry", text, request_id=request_id)

    def newest(self, most: int, after: int = 0) -> list[RouterEvent]:
        """Return the last `most` events whose `seq` is above `after`, the oldest first."""
        found = [each for each in chain(*self._kinds.values()) if each.seq > after]
        return sorted(found, key=lambda each: each.seq)[-most:] if most else []
