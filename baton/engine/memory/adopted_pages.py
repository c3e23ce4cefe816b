"""AdoptedPages: between steps, which adopted pages may still be read, and which are copied here.

The fence: a page may be read as long as its owner keeps it (Adoption.safe). This is checked before
and after each step that reads pages. In between the process may have slept longer than the owner's
promise lasts, so what a step sampled counts only if the pages are safe afterwards as well.

The owner wants its memory back. So pages that have been read in place for a while are copied: a
bounded number of bytes per step, and never into room that other requests need. When the owner says
that it is short of memory, all its pages are copied, with more bytes per step; a request for whose
pages there is no room here is preempted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from baton.engine.memory.block_tables import BlockTables
from baton.engine.state.adoption import Adoption
from baton.engine.state.interface import Reservation
from baton.engine.state.sequence import SequenceState
from baton.engine.state.stats import EngineStats
from baton.protocol.clock import Clock
from baton.protocol.errors import InternalError, KVStale

TAKEN_BACK: Final = "the exporter may have taken its KV back"
TAKE_OVER_AFTER_S: Final = 3.0  # a request that ends earlier costs no copy at all
TAKE_OVER_BYTES: Final = 8 << 20  # per step: about 2 ms
SPARE_SHARE: Final = 8  # a pool with less than 1 / 8 free is not filled with copies
RECALLED_BYTES: Final = 32 << 20  # bytes per step of pages that their owner wants back: about 8 ms
# so long there may be no room for pages that are wanted back, before their request is preempted
GIVE_WAY_AFTER_S: Final = 1.0


class AdoptedPages:
    """Keeps and copies adopted pages.

    `block_bytes`: bytes of one block. `sequence_of`: returns the one sequence of a request.
    """

    def __init__(
        self,
        tables: BlockTables,
        stats: EngineStats,
        clock: Clock,
        block_bytes: int,
        sequence_of: Callable[[str], SequenceState],
    ) -> None:
        self._tables = tables
        self._stats = stats
        self._clock = clock
        self._limit = max(1, TAKE_OVER_BYTES // block_bytes)
        self._recalled_limit = max(1, RECALLED_BYTES // block_bytes)
        self._sequence_of = sequence_of

    def receive(self, adoption: Adoption | None, reservation: Reservation | None) -> None:
        """Copy the last adopted page, unless full, as the sequence will write to it.

        Raises KVStale if the pages may belong to another request by now, InternalError if they do
        not fit the reservation.
        """
        if (adoption is not None) != (reservation is not None and reservation.adopting):
            raise InternalError("adopted pages exactly where they are reserved for")
        if adoption is None or reservation is None:
            return
        pool = self._tables.pool
        num_tokens, size = reservation.num_tokens, pool.block_size
        count = pool.blocks_for(num_tokens)
        if len(adoption.ids) != count or any(i < pool.num_blocks for i in adoption.ids):
            raise InternalError(f"{len(adoption.ids)} adopted pages, not {count} of another pool")
        if num_tokens % size:
            self._tables.memory.copy_block(adoption.ids[-1], reservation.blocks[0].ids[0])
            self._stats.num_copied_blocks += 1
        if not adoption.safe():
            raise KVStale(TAKEN_BACK)
        adoption.since = self._clock.monotonic()

    def lapsed(self) -> list[str]:
        """Return the requests whose pages may belong to others by now: what was read of these does
        not count.
        """
        return [a.request_id for a in self._tables.adoptions if not a.safe()]

    def take_over(self, headroom: int) -> list[str]:
        """Copy some pages of adoptions that are wanted back or have lasted for a while, the oldest
        first.

        `headroom` blocks stay free for running requests. Return the requests that must be
        preempted.
        """
        pool, now = self._tables.pool, self._clock.monotonic()
        overdue: list[str] = []
        limits = {True: self._recalled_limit, False: self._limit}
        for adoption in sorted(self._tables.adoptions, key=lambda each: each.since):
            wanted = adoption.note_wanted(now)
            if not wanted and now - adoption.since < TAKE_OVER_AFTER_S:
                continue
            kept = headroom if wanted else headroom + pool.num_blocks // SPARE_SHARE
            count = min(limits[wanted], pool.num_free - kept)
            if count > 0:
                sequence = self._sequence_of(adoption.request_id)
                limits[wanted] -= self._tables.take_over(sequence, count)
            elif limits[wanted] > 0 and adoption.wanted_for(now) > GIVE_WAY_AFTER_S:
                overdue.append(adoption.request_id)
        return overdue

    def take_over_all(self, sequence: SequenceState) -> None:
        """Copy all pages that `sequence` has adopted, if there is room."""
        self._tables.take_over(sequence, self._tables.pool.num_free)
