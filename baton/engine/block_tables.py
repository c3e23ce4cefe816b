"""BlockTables: what sequences do with blocks: take, grow, fork, copy on write, offer, give back.

Between the pool, which knows integers only, and the scheduler, which decides who gets room. A block
is written by one sequence alone: forks share all blocks, and whoever writes into a shared or
findable one gets a copy first.

    parent  [ 3 ][ 7 ][ 5' ]         after fork:  3, 7 and 5 are shared
    child   [ 3 ][ 7 ][ 5  ]         after grow:  each writes into a last block of its own

When all layers attend through a sliding window, blocks that no later token can see go back to the
pool at once (`num_freed`); with one layer that sees everything, all stay.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from baton.engine.block_pool import BlockPool
from baton.engine.sequence import RequestGroup, SequenceState, shared_tokens
from baton.engine.stats import EngineStats
from baton.errors import InternalError
from baton.kv_spec import LayerSpec


class BlockMemory(Protocol):
    """The bytes behind the blocks. KVArena is one; host copies are opaque to whoever holds them."""

    def copy_block(self, source: int, target: int) -> None: ...

    def read_blocks(self, blocks: Sequence[int]) -> Any:
        """Copies of `blocks` in host memory; their row i is blocks[i]."""
        ...

    def write_blocks(self, host: Any, rows: Sequence[int], blocks: Sequence[int]) -> None:
        """Copy these rows of `host` into `blocks`."""
        ...


class BlockTables:
    """Block tables of sequences over `pool`; `window` tokens are visible to every layer at most
    (None: at least one layer sees all)."""

    def __init__(
        self, pool: BlockPool, memory: BlockMemory, stats: EngineStats, window: int | None = None
    ) -> None:
        self.pool = pool
        self.memory = memory
        self.window = window
        self._stats = stats

    # ---- taking ----

    def take(
        self, hashes: Sequence[bytes], count: int, headroom: int
    ) -> tuple[list[int], int] | None:
        """`count` blocks, hits first, and the number of hits; None unless `headroom` stay free."""
        hits = self.pool.lookup(hashes)
        # Held before anything is allocated: the allocation must not evict them.
        self.pool.ref(hits)
        missing = count - len(hits)
        fresh = self.pool.allocate(missing) if missing + headroom <= self.pool.num_free else None
        if fresh is None:
            self.pool.unref(hits)
            return None
        return hits + fresh, len(hits)

    def missing(self, sequence: SequenceState, num_tokens: int) -> int:
        """Blocks that `grow` would take."""
        held = sequence.num_freed + len(sequence.blocks)
        more = max(0, self.pool.blocks_for(num_tokens) - held)
        return more + sum(1 for _ in self._to_copy(sequence))

    def grow(self, sequence: SequenceState, num_tokens: int) -> bool:
        """Blocks for `num_tokens` tokens, those not yet computed in blocks of its own; False (and
        nothing changed) if there is no room."""
        missing = self.missing(sequence, num_tokens)
        if missing > self.pool.num_free:
            return False
        if not missing:
            sequence.forked = False
            return True
        for index in list(self._to_copy(sequence)):
            block = sequence.blocks[index]
            fresh = self.pool.copy_on_write(block)
            assert fresh is not None, "counted as free above"
            if fresh != block:
                self.memory.copy_block(block, fresh)
                sequence.blocks[index] = fresh
                self._stats.num_copied_blocks += 1
        sequence.forked = False
        held = sequence.num_freed + len(sequence.blocks)
        more = self.pool.allocate(max(0, self.pool.blocks_for(num_tokens) - held))
        assert more is not None, "counted as free above"
        sequence.blocks.extend(more)
        return True

    def _to_copy(self, sequence: SequenceState) -> Iterable[int]:
        """Indices of held blocks that it will write but must not."""
        if not sequence.forked:
            return ()
        first = sequence.num_computed // self.pool.block_size - sequence.num_freed
        return (
            index
            for index in range(first, len(sequence.blocks))
            if not self.pool.writable(sequence.blocks[index])
        )

    def blocks_of_followers(self, group: RequestGroup) -> int:
        """Blocks that the known tokens of the group's followers will take beyond the leader's."""
        total = 0
        for sequence in group.sequences[1:]:
            if sequence.following:
                whole = shared_tokens(group.leader, sequence) // self.pool.block_size
                total += self.pool.blocks_for(len(sequence.tokens)) - whole
        return total

    def fork(self, parent: SequenceState, child: SequenceState, num_tokens: int) -> None:
        """`child` shares the blocks of the first `num_tokens` tokens, which count as computed."""
        count = self.pool.blocks_for(num_tokens) - parent.num_freed
        child.blocks = parent.blocks[:count]
        self.pool.ref(child.blocks)
        whole = num_tokens // self.pool.block_size
        child.num_freed = parent.num_freed
        child.num_computed = num_tokens
        child.num_registered = min(parent.num_registered, whole)
        child.know_hashes(parent, whole)
        child.following = False
        parent.forked = child.forked = True
        self._stats.num_forks += 1

    # ---- offering and giving back ----

    def register_full_blocks(self, sequence: SequenceState) -> None:
        """Enter the computed full blocks that are not yet in the prefix map."""
        full = sequence.num_computed // self.pool.block_size
        if full <= sequence.num_registered:
            return  # nearly every decode step: no hashing, no copies
        hashes = sequence.hashes(full, self.pool.block_size)
        for index in range(max(sequence.num_registered, sequence.num_freed), full):
            parent = hashes[index - 1] if index else b""
            self.pool.register(sequence.blocks[index - sequence.num_freed], hashes[index], parent)
        sequence.num_registered = full

    def free_invisible(self, sequence: SequenceState) -> None:
        """Give back leading blocks that no token from num_computed on can see any more."""
        if self.window is None:
            return
        first_visible = sequence.num_computed - self.window + 1
        count = first_visible // self.pool.block_size - sequence.num_freed
        # One block stays: tables name it where the others were.
        count = min(count, len(sequence.blocks) - 1)
        if count > 0:
            self.pool.unref(sequence.blocks[:count])
            del sequence.blocks[:count]
            sequence.num_freed += count
            self._stats.num_window_freed_blocks += count

    def trim(self, sequence: SequenceState) -> None:
        """Give back blocks beyond the known tokens: those of rejected drafts."""
        count = self.pool.blocks_for(len(sequence.tokens)) - sequence.num_freed
        if count < len(sequence.blocks):
            self.pool.unref(sequence.blocks[count:])
            del sequence.blocks[count:]

    def release(self, sequence: SequenceState) -> None:
        """Give back all blocks: it starts anew, if at all."""
        self.pool.unref(sequence.blocks)
        sequence.blocks = []
        sequence.num_freed = 0
        sequence.num_computed = 0
        sequence.num_registered = 0
        sequence.forked = False

    # ---- proof ----

    def prove_private(self, sequence: SequenceState, end: int) -> None:
        """Raise InternalError unless tokens [num_computed, end) lie in blocks that nobody else
        holds and no lookup can find: also what protects others from rejected drafts."""
        size = self.pool.block_size
        for index in range(sequence.num_computed // size, self.pool.blocks_for(end)):
            block = sequence.blocks[index - sequence.num_freed]
            if not self.pool.writable(block):
                raise InternalError(f"{sequence.request.id} would write into shared block {block}")


def window_of(layers: Sequence[LayerSpec]) -> int | None:
    """Tokens that the widest layer sees; None if one sees all."""
    windows = [layer.window for layer in layers]
    return max(windows) if windows and all(windows) else None


def count_blocks(sequences: Iterable[SequenceState]) -> Counter[int]:
    """References that these sequences hold, per block."""
    counts: Counter[int] = Counter()
    for sequence in sequences:
        counts.update(sequence.blocks)
    return counts
