"""PrefixIndex: which block hashes one node holds, as its block events report.

The policy uses the index as a hint: the node may have evicted a block meanwhile. Events are
numbered per session, from the session's snapshot on. A gap means that some events were lost. Then
all hashes are dropped, and the events that follow fill the index again. Blocks of a model that
keeps recurrent state are of use only up to a checkpoint of it; the node's first event says so.
"""

from __future__ import annotations

from collections.abc import Sequence

from baton.protocol.events import BlockEvent, BlockEventKind


class PrefixIndex:
    """The block hashes of one node. `hashes` is the live set: do not keep it over an await.

    `checkpoints`: the hashes behind which it has a recurrent state; None if its model keeps none.
    """

    def __init__(self) -> None:
        self.hashes: set[bytes] = set()
        self.checkpoints: set[bytes] | None = None
        self._next_seq: int | None = None
        self.gaps = 0

    def clear(self) -> None:
        """Drop all hashes, because a session began or ended."""
        self.hashes.clear()
        self.checkpoints = None
        self._next_seq = None

    def apply(self, first_seq: int, events: Sequence[BlockEvent]) -> None:
        """Apply block events, the first of which has the number `first_seq`."""
        if not events:
            return
        if self._next_seq is not None and first_seq != self._next_seq:
            self.gaps += 1
            self.hashes.clear()
            self.checkpoints = None if self.checkpoints is None else set()
        self._next_seq = first_seq + len(events)
        for event in events:
            if event.kind is BlockEventKind.CLEARED:
                self.hashes.clear()
                self.checkpoints = set() if event.states else None
                continue
            known = self.hashes
            if event.states:
                known = self.checkpoints = set() if self.checkpoints is None else self.checkpoints
            if event.kind is BlockEventKind.STORED:
                known.update(event.hashes)
            else:
                known.difference_update(event.hashes)
