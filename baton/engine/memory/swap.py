"""Swapper: how a preempted group loses its blocks, by a copy to host memory or by recomputation.

Life of a swapped group:
    swap_out -> every block of its tables is copied once, also shared ones; all references go back
    swap_in  -> blocks that the prefix map still has are taken from there, the others are copied
                back; the tables are as they were, forks share again what they shared
    drop     -> it was aborted: its copy is forgotten

A group is swapped as a whole, never in part. Host memory is taken as it is needed, for at most as
many blocks as the pool has.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from baton.engine.config import PreemptionMode
from baton.engine.memory.block_tables import BlockTables
from baton.engine.memory.state_slots import SwappedStates
from baton.engine.state.sequence import RequestGroup, SequenceState, count_blocks
from baton.engine.state.stats import EngineStats
from baton.protocol.clock import Clock
from baton.protocol.errors import InternalError


@dataclass(frozen=True, slots=True)
class _Copy:
    """A group's blocks in host memory.

    Row i of `host` was known to the prefix map as hashes[i] (None: it was not there). `tables[s]`
    lists the rows of sequence s, per layer group. `states`: those of the sequences that have one.
    """

    host: Any
    hashes: tuple[bytes | None, ...]
    tables: dict[SequenceState, list[list[int]]]
    states: SwappedStates


class Swapper:
    """Owns the host copies. `block_bytes`: bytes of one block over all layers of a group."""

    def __init__(
        self,
        tables: BlockTables,
        stats: EngineStats,
        clock: Clock,
        mode: PreemptionMode,
        block_bytes: int,
    ) -> None:
        self._tables = tables
        self._stats = stats
        self.clock = clock
        self._mode: PreemptionMode = mode
        self._block_bytes = block_bytes
        self._copies: dict[RequestGroup, _Copy] = {}

    @property
    def num_blocks(self) -> int:
        """The number of blocks in host memory now."""
        return sum(len(copy.hashes) for copy in self._copies.values())

    def prefers_swap(self, group: RequestGroup) -> bool:
        """Whether to swap `group` out: as configured, else if that is cheaper by measured means."""
        blocks = len(count_blocks(group.sequences))
        if self._mode == "recompute" or self.num_blocks + blocks > self._tables.pool.num_blocks:
            return False
        stats = self._stats
        unknown = stats.copy_bytes_per_s == 0.0 or stats.prefill_tokens_per_s == 0.0
        if self._mode == "swap" or unknown:
            return True
        tokens = sum(s.num_computed for s in group.sequences)
        first = [s.tables[0].blocks for s in group.sequences if s.tables]  # group 0 keeps most
        shared = sum(map(len, first)) - len({block for held in first for block in held})
        tokens -= shared * self._tables.pool.block_size
        out_and_in = 2 * blocks * self._block_bytes
        return out_and_in / stats.copy_bytes_per_s <= tokens / stats.prefill_tokens_per_s

    def swap_out(self, group: RequestGroup) -> bool:
        """Copy the group's blocks to host memory and free all of them.

        Return False, and change nothing, if adopted pages among them may belong to another request
        by now.
        """
        pool = self._tables.pool
        tables_held = [table for s in group.sequences for table in s.tables]
        adoptions = [table.adoption for table in tables_held if table.adoption is not None]
        blocks = list(count_blocks(group.sequences))
        row_of = {block: row for row, block in enumerate(blocks)}
        started = self.clock.monotonic()
        host = self._tables.memory.read_blocks(blocks)
        self._measure(len(blocks), started)
        if not all(adoption.safe() for adoption in adoptions):
            return False
        # An exact request must get its own bytes back, not what others computed from the same
        # tokens.
        own = pool.num_blocks if group.leader.exact_chunk is None else 0
        hashes = tuple(pool.hash_of(block) if block < own else None for block in blocks)
        tables = {
            s: [[row_of[block] for block in table.blocks] for table in s.tables]
            for s in group.sequences
        }
        for sequence in group.sequences:
            self._tables.give_back(sequence.tables)
            for table in sequence.tables:
                table.blocks = []
        self._copies[group] = _Copy(host, hashes, tables, self._tables.states.swap_out(tables))
        self._stats.num_swap_outs += 1
        self._stats.num_swapped_out_blocks += len(blocks)
        return True

    def swap_in(self, group: RequestGroup, headroom: int) -> bool:
        """Bring the group's tables back.

        Return False, and change nothing, unless its known tokens fit and `headroom` blocks stay
        free.
        """
        copy, pool = self._copies[group], self._tables.pool
        found = {
            row: pool.find(block_hash)
            for row, block_hash in enumerate(copy.hashes)
            if block_hash is not None
        }
        hits = {row: block for row, block in found.items() if block is not None}
        pool.ref(hits.values())
        lost = [row for row in range(len(copy.hashes)) if row not in hits]
        if len(lost) + self._growth(group, copy) + headroom > pool.num_free:
            pool.unref(list(hits.values()))
            return False
        fresh = pool.allocate(len(lost))
        assert fresh is not None, "counted as free above"
        if lost:
            started = self.clock.monotonic()
            self._tables.memory.write_blocks(copy.host, lost, fresh)
            self._measure(len(lost), started)
        self._restore(copy, {**hits, **dict(zip(lost, fresh, strict=True))})
        self._tables.states.swap_in(copy.states)
        del self._copies[group]
        self._stats.num_swap_ins += 1
        self._stats.num_swapped_in_blocks += len(lost)
        return True

    def drop(self, group: RequestGroup) -> None:
        """Forget the copy of a group that ends while it is swapped out."""
        del self._copies[group]

    def check(self, swapped: list[RequestGroup]) -> None:
        """Prove that exactly these groups have copies, and that these are not more than allowed."""
        if set(swapped) != set(self._copies) or self.num_blocks > self._tables.pool.num_blocks:
            raise InternalError("host copies do not match the swapped requests")

    # ---- inside ----

    def _growth(self, group: RequestGroup, copy: _Copy) -> int:
        """Return how many blocks the group's next step may take beyond those it had."""
        total = self._tables.blocks_of_followers(group)
        for sequence in group.sequences:
            if sequence.following:
                continue
            count = self._tables.pool.blocks_for(len(sequence.tokens))
            for table, rows in zip(sequence.tables, copy.tables[sequence], strict=True):
                total += max(0, count - table.num_freed - len(rows)) + sequence.forked
        return total

    def _restore(self, copy: _Copy, block_of: dict[int, int]) -> None:
        pool = self._tables.pool
        unclaimed = set(block_of)  # rows whose one reference no table has taken over yet
        for sequence, tables in copy.tables.items():
            for table, rows in zip(sequence.tables, tables, strict=True):
                table.blocks = [block_of[row] for row in rows]
                pool.ref(block_of[row] for row in rows if row not in unclaimed)
                unclaimed.difference_update(rows)
                table.num_registered = 0
            self._tables.register_full_blocks(sequence)

    def _measure(self, num_blocks: int, started: float) -> None:
        seconds = self.clock.monotonic() - started
        self._stats.copy_done(num_blocks * self._block_bytes, seconds)
