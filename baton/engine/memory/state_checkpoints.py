"""StateCheckpoints: copies of recurrent state at the ends of prefixes, so that prompts reuse them.

KV of a prefix is of use only with the state behind its last token. So a prompt's chunk stops where
another prompt may go on, and the state is copied:
    at its end      the last full block before its last token
    at a junction   the end of its known blocks: an earlier prompt had the same tokens up to there
A checkpoint is a row of the arena behind the slots of sequences. Its key is the chained hash of the
block at whose end it is, so tenants, adapters and images are kept apart as those of KV are.

Life of a checkpoint:
    store    copied from the slot of a sequence that has computed exactly these tokens
    restore  copied into the slot of a sequence that begins with these tokens
    replaced another one needs the row: first one without its block, else the least recently used

A checkpoint and its blocks are of use only together:
    its block is evicted   no lookup finds the checkpoint; it serves again if the block comes back
    it is replaced         its blocks stay, for lookups up to an earlier checkpoint, or for KV whose
                           state comes from another node; they are evicted in their turn
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from baton.engine.memory.block_pool import BlockPool
from baton.engine.state.interface import NO_SLOT
from baton.engine.state.sequence import SequenceState
from baton.engine.state.stats import EngineStats
from baton.protocol.errors import InternalError
from baton.protocol.events import BlockEvent, BlockEventKind


class CheckpointMemory(Protocol):
    """The bytes of slots and checkpoints, as in StateArena."""

    @property
    def num_slots(self) -> int:
        """The number of slots of sequences: the first rows."""
        ...

    @property
    def num_checkpoints(self) -> int:
        """The number of rows behind them."""
        ...

    def copy(self, source: int, target: int) -> None:
        """Overwrite the states of row `target` with those of row `source`; both count from 0, slots
        first."""
        ...


class StateCheckpoints:
    """The checkpoints in `memory`; None = the model keeps no state, and prefixes need none.

    `spacing`: the fewest tokens between two checkpoints of a prompt. Counts into `stats`.
    """

    def __init__(
        self,
        pool: BlockPool,
        stats: EngineStats,
        memory: CheckpointMemory | None = None,
        spacing: int = 1,
    ) -> None:
        self._pool = pool
        self._stats = stats
        self._memory = memory
        self._spacing = spacing
        self.num_rows = 0 if memory is None else memory.num_checkpoints
        first = 0 if memory is None else memory.num_slots
        self._free = list(range(first, first + self.num_rows))
        self._row_of: OrderedDict[bytes, int] = OrderedDict()  # least recently used first
        self._told: set[bytes] = set()  # those that listeners know

    @property
    def num_used(self) -> int:
        """The number of checkpoints."""
        return len(self._row_of)

    # ---- a prompt ----

    def longest(self, hashes: Sequence[bytes], count: int) -> int:
        """Return how many of the first `count` blocks lie before the last checkpoint among them;
        all of them if the model keeps no state."""
        if self._memory is None:
            return count
        while count and hashes[count - 1] not in self._row_of:
            count -= 1
        return count

    def begin(self, sequence: SequenceState, num_hits: int, num_known: int) -> None:
        """Give `sequence` the state behind its `num_hits` prefix hits, and choose where it stops.
        `num_known`: how many of its blocks are known, with or without a state behind them."""
        sequence.checkpoint_at = ()
        if self._memory is None:
            return
        size = self._pool.block_size
        if num_hits:
            key = sequence.hashes(num_hits, size)[-1]
            self._memory.copy(self._row_of[key], sequence.state_slot)
            self._row_of.move_to_end(key)
            self._stats.num_checkpoint_hits += 1
        if self.num_rows and self._pool.enable_prefix_caching and sequence.exact_chunk is None:
            stops, last = list[int](), num_hits * size
            for stop in sorted((num_known * size, (sequence.num_prompt - 1) // size * size)):
                if stop - last >= self._spacing:
                    stops.append(stop)
                    last = stop
            sequence.checkpoint_at = tuple(stops)

    def stop(self, sequence: SequenceState, num_tokens: int) -> int:
        """Return how many of `num_tokens` tokens `sequence` computes next, to stop where it will
        be copied."""
        ahead = (at - sequence.num_computed for at in sequence.checkpoint_at)
        return min([num_tokens, *(count for count in ahead if count > 0)])

    def note(self, sequence: SequenceState) -> None:
        """Copy the state of `sequence`, whose computed tokens end at one of its stops, and whose
        full blocks are in the prefix map. Without a slot (it is being swapped in) there is none."""
        if self._memory is None or sequence.state_slot == NO_SLOT:
            return
        size = self._pool.block_size
        key = sequence.hashes(sequence.num_computed // size, size)[-1]
        if key not in self._row_of:
            row = self._free.pop() if self._free else self._replace()
            self._memory.copy(sequence.state_slot, row)
            self._row_of[key] = row
            self._stats.num_checkpoints_stored += 1
        self._row_of.move_to_end(key)

    def clear(self) -> None:
        """Drop all checkpoints."""
        self._free += self._row_of.values()
        self._row_of.clear()

    def _replace(self) -> int:
        """Drop the checkpoint of least use; return its row."""
        lost = (key for key in self._row_of if self._pool.find(key) is None)
        key = next(lost, next(iter(self._row_of)))
        self._stats.num_checkpoints_replaced += 1
        return self._row_of.pop(key)

    # ---- listeners ----

    def tell(self, events: Sequence[BlockEvent]) -> list[BlockEvent]:
        """Return the prefix map's `events`, with what changed among checkpoints since the last
        call behind them. After a CLEARED event that is all checkpoints."""
        if self._memory is None:
            return list(events)
        told = list(events)
        if told and told[0].kind is BlockEventKind.CLEARED:
            told[0] = replace(told[0], states=True)
            self._told.clear()
        known = set(self._row_of)
        for kind, keys in (
            (BlockEventKind.EVICTED, self._told - known),
            (BlockEventKind.STORED, known - self._told),
        ):
            if keys:
                told.append(BlockEvent(kind, tuple(keys), states=True))
        self._told = known
        return told

    # ---- proof ----

    def check(self) -> None:
        """Prove that each row is free or has one checkpoint. Raises InternalError if not."""
        first = 0 if self._memory is None else self._memory.num_slots
        rows = sorted([*self._free, *self._row_of.values()])
        if rows != list(range(first, first + self.num_rows)):
            raise InternalError("the rows of state checkpoints are not free or used once each")
