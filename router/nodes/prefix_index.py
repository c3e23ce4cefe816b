"""PrefixIndex: which block hashes one node holds, as its block events report.

It is a hint for the policy, never a promise. Events are numbered per session, from the session's
snapshot on. A gap means that some events were lost: then all hashes are dropped, and the index is
filled again by the events that follow.
"""

from __future__ import annotations

from collections.abc import Sequence

from baton.protocol.events import BlockEvent, BlockEventKind


class PrefixIndex:
    """`hashes` is the live set: read it, do not keep it over an await."""

    def __init__(self) -> None:
        self.hashes: set[bytes] = set()
        self._next_seq: int | None = None
        self.gaps = 0

    def clear(self) -> None:
        """A session began or ended."""
        self.hashes.clear()
        self._next_seq = None

    def apply(self, first_seq: int, events: Sequence[BlockEvent]) -> None:
        """Take `events`, the first of which has number `first_seq`."""
        if not events:
            return
        if self._next_seq is not None and first_seq != self._next_seq:
            self.gaps += 1
            self.hashes.clear()
        self._next_seq = first_seq + len(events)
        for event in events:
            if event.kind is BlockEventKind.STORED:
                self.hashes.update(event.hashes)
            elif event.kind is BlockEventKind.EVICTED:
                self.hashes.difference_update(event.hashes)
            else:
                self.hashes.clear()
