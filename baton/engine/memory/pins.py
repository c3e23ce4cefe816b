"""Pins: references to blocks and state slots that belong to no sequence, because an export is being
read."""

from __future__ import annotations

from collections import Counter

from baton.engine.memory.block_tables import BlockTables
from baton.engine.state.sequence import Table
from baton.protocol.errors import InternalError
from baton.protocol.kv_spec import BlockLists


class Pins:
    """Counts the pins of each block, for the pool's proof."""

    def __init__(self, tables: BlockTables) -> None:
        self.counts: Counter[int] = Counter()
        self._tables = tables

    def pin(self, blocks: BlockLists) -> None:
        """Add a reference to each block, and keep the state slot that the lists name."""
        for held in blocks:
            self._tables.pool.ref(held.ids)
            self.counts.update(held.ids)
            if held.state_slot is not None:
                self._tables.states.pin(held.state_slot)

    def unpin(self, blocks: BlockLists) -> None:
        """Undo one pin. Raises InternalError, and changes nothing, for what was not pinned."""
        counts = Counter(block for held in blocks for block in held.ids)
        if counts - self.counts:
            raise InternalError("blocks are unpinned that were not pinned")
        for held in blocks:
            if held.state_slot is not None:
                self._tables.states.unpin(held.state_slot)
        self.counts -= counts
        self._tables.give_back([Table(list(held.ids), held.first) for held in blocks])
