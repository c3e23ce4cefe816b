"""BlockTables: what sequences do with blocks: take, grow, fork, copy on write, offer, give back.

Between the pool, which knows integers only, and the scheduler, which decides who gets room. A block
is written by one sequence alone: forks share all blocks, and whoever writes into a shared or
findable one gets a copy first.

    parent  [ 3 ][ 7 ][ 5' ]         after fork:  3, 7 and 5 are shared
    child   [ 3 ][ 7 ][ 5  ]         after grow:  each writes into a last block of its own

A sequence has a table per layer group (layer_groups.py), all of the same pool. In a group whose
layers attend through a sliding window, blocks that no later token can see go back to the pool at
once (`num_freed`), and a prefix hit or a hand-over needs only those that can be seen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from baton.engine.memory.block_pool import BlockMemory, BlockPool
from baton.engine.memory.prefix_lookup import PrefixLookup, key_of
from baton.engine.memory.state_checkpoints import StateCheckpoints
from baton.engine.memory.state_slots import StateSlots
from baton.engine.state import sequence as sequences
from baton.engine.state.adoption import Adoption
from baton.engine.state.interface import Reservation, SequenceChunk
from baton.engine.state.sequence import RequestGroup, SequenceState, Table, shared_tokens
from baton.engine.state.stats import EngineStats
from baton.protocol.errors import InternalError
from baton.protocol.kv_spec import BlockLists, first_visible

NEVER: Final = 1 << 62  # Table.first_whole of a table that may not offer blocks to others


@dataclass(frozen=True, slots=True)
class Taken:
    """Tables with a reference to each of their blocks. The KV of the first `num_hits` blocks is
    there (if windowed: of those still seen). `num_found`: blocks from the prefix map, in all
    groups. `num_known`: leading blocks that are known, also where no state behind them is. `slots`:
    reserved for the states of the request's sequences."""

    tables: list[Table]
    num_hits: int
    num_found: int
    num_known: int = 0
    slots: tuple[int, ...] = ()

    @property
    def blocks(self) -> BlockLists:
        """The tables' blocks as lists."""
        return sequences.as_lists(self.tables)


class BlockTables:
    """Block tables of sequences over `pool`. `windows`: per layer group, the most tokens that its
    layers see (0 = all). `states`, `checkpoints`: of a model that keeps recurrent state."""

    def __init__(
        self,
        pool: BlockPool,
        memory: BlockMemory,
        stats: EngineStats,
        windows: Sequence[int] = (0,),
        states: StateSlots | None = None,
        checkpoints: StateCheckpoints | None = None,
    ) -> None:
        self.pool = pool
        self.memory = memory
        self.windows = tuple(windows)
        self.states = states or StateSlots()
        self.checkpoints = checkpoints or StateCheckpoints(pool, stats)
        self._lookup = PrefixLookup(pool, self.windows, self.checkpoints)
        self.adoptions: set[Adoption] = set()  # those whose pages a table names
        self._stats = stats
        self._windowed = any(self.windows)

    @property
    def num_groups(self) -> int:
        return len(self.windows)

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks of all groups together hold `num_tokens` tokens."""
        return self.num_groups * self.pool.blocks_for(num_tokens)

    # ---- taking ----

    def take(self, hashes: Sequence[bytes], num_tokens: int, headroom: int) -> Taken | None:
        """Take blocks for `num_tokens` tokens, hits first, for a sequence that computes on behind
        the hits: see begin(). None (and nothing changed) unless `headroom` blocks stay free."""
        size = self.pool.block_size

        def start_of(num_hits: int) -> int:
            return num_hits * size

        find = self._lookup.num_hits
        num_known = num_hits = self.pool.num_cached and find(hashes, start_of, resumes=False)
        if num_known and self.states.num_slots:
            num_hits = find(hashes, start_of, resumes=True)
        taken = self._take(hashes[:num_hits], num_tokens, headroom, start_of)
        return None if taken is None else replace(taken, num_known=num_known)

    def begin(self, sequence: SequenceState, taken: Taken) -> None:
        """Give blocks, and a slot with the state behind the hits, to a sequence that computes on
        there."""
        sequence.tables = taken.tables
        sequence.num_computed = taken.num_hits * self.pool.block_size
        if self.states.num_slots:
            self.states.take(sequence)
            self.checkpoints.begin(sequence, taken.num_hits, taken.num_known)

    def next_stop(self, group: RequestGroup, sequence: SequenceState, num_tokens: int) -> int:
        """Return how many of `num_tokens` tokens `sequence` computes next, so that its state can
        be copied where a follower forks and where a checkpoint is."""
        if self.states.num_slots:
            num_tokens = self.states.stop_for_forks(group, sequence, num_tokens)
            num_tokens = self.checkpoints.stop(sequence, num_tokens)
        return num_tokens

    def take_for_arrival(self, hashes: Sequence[bytes], num_tokens: int) -> Taken | None:
        """Take blocks for `num_tokens` tokens, of which at most the last is computed here. Blocks
        that arrive only in part are zeroed, and will not be offered to others."""
        start = self._last_start(num_tokens)
        find = self._lookup.num_hits
        num_hits = self.pool.num_cached and find(hashes, lambda _: start, resumes=False)
        taken = self._take(hashes[:num_hits], num_tokens, 0, lambda _: start)
        if taken is None:
            return None
        if not taken.num_found:  # all groups are windowed, and look at none of the first blocks
            taken = replace(taken, num_hits=0)
        size = self.pool.block_size
        for table, window in zip(taken.tables, self.windows, strict=True):
            first = first_visible(window, num_tokens)
            if taken.num_hits * size < first:
                table.first_whole = self.pool.blocks_for(first)
                stop = min(table.first_whole, table.end)
                for index in range(max(table.num_freed, taken.num_hits), stop):
                    self.memory.clear_block(table.blocks[index - table.num_freed])
        return taken

    @property
    def may_adopt(self) -> bool:
        """Whether tables can name other pools' pages: if one group sees all tokens."""
        return self.windows == (0,)

    def take_to_adopt(self, hashes: Sequence[bytes], num_tokens: int) -> Taken | None:
        """Take hits, and one block for what follows all full blocks of `num_tokens` tokens, which
        lie elsewhere. None (and nothing changed) if there is no room."""
        hits = self.pool.lookup(hashes[: num_tokens // self.pool.block_size])
        self.pool.ref(hits)
        last = self.pool.allocate(1)
        if last is None:
            self.pool.unref(hits)
            return None
        self.pool.hits.update(hits)
        return Taken([Table([*hits, *last], num_registered=len(hits))], len(hits), len(hits))

    def blocks_for_arrival(self, num_tokens: int) -> int:
        """Return how many blocks of all groups take_for_arrival() takes, hits included."""
        start, count = self._last_start(num_tokens), self.pool.blocks_for(num_tokens)
        return sum(count - self.pool.first_seen(window, start) for window in self.windows)

    def _last_start(self, num_tokens: int) -> int:
        """Return the first token of the last block: computing may begin there if all are hits."""
        return (num_tokens - 1) // self.pool.block_size * self.pool.block_size

    def _take(
        self,
        hashes: Sequence[bytes],
        num_tokens: int,
        headroom: int,
        start_of: Callable[[int], int],
    ) -> Taken | None:
        """Take blocks, those of `hashes` first, which are all hits. `start_of(num_hits)`: the first
        token to compute here."""
        num_hits = len(hashes)
        start, count = start_of(num_hits), self.pool.blocks_for(num_tokens)
        tables: list[Table] = []
        for group, window in enumerate(self.windows):
            first = self.pool.first_seen(window, start)
            found = [self.pool.find(key_of(each, group)) for each in hashes[first:num_hits]]
            blocks = [block for block in found if block is not None]
            tables.append(Table(blocks, first, num_registered=max(first, num_hits)))
        hits = [block for table in tables for block in table.blocks]
        # Held before anything is allocated: the allocation must not evict them.
        self.pool.ref(hits)
        missing = sum(count - table.end for table in tables)
        fresh = self.pool.allocate(missing) if missing + headroom <= self.pool.num_free else None
        if fresh is None:
            self.pool.unref(hits)
            return None
        self.pool.hits.update(hits)
        at = 0
        for table in tables:
            more = count - table.end
            table.blocks += fresh[at : at + more]
            at += more
        return Taken(tables, num_hits, len(hits))

    def missing(self, sequence: SequenceState, num_tokens: int) -> int:
        """Return how many blocks `grow` would take."""
        count = self.pool.blocks_for(num_tokens)
        more = 0
        for table in sequence.tables:
            more += max(0, count - table.end)
        if sequence.forked:
            more += sum(1 for _ in self._to_copy(sequence))
        return more

    def grow(self, sequence: SequenceState, num_tokens: int) -> bool:
        """Give a sequence blocks for `num_tokens` tokens, own ones for tokens not yet computed.
        Return False (and nothing changed) if there is no room."""
        missing = self.missing(sequence, num_tokens)
        if missing > self.pool.num_free:
            return False
        if not missing:
            sequence.forked = False
            return True
        for table, index in list(self._to_copy(sequence)):
            block = table.blocks[index]
            fresh = self.pool.copy_on_write(block)
            assert fresh is not None, "counted as free above"
            if fresh != block:
                self.memory.copy_block(block, fresh)
                table.blocks[index] = fresh
                self._stats.num_copied_blocks += 1
        sequence.forked = False
        count = self.pool.blocks_for(num_tokens)
        for table in sequence.tables:
            more = self.pool.allocate(max(0, count - table.end))
            assert more is not None, "counted as free above"
            table.blocks.extend(more)
        return True

    def room(self, sequence: SequenceState) -> int:
        """Return how many tokens the sequence's blocks hold."""
        return min(table.end for table in sequence.tables) * self.pool.block_size

    def _to_copy(self, sequence: SequenceState) -> Iterator[tuple[Table, int]]:
        """Yield (table, index) of held blocks that it will write but must not: others read them."""
        if not sequence.forked:
            return
        first = sequence.num_computed // self.pool.block_size
        for table in sequence.tables:
            for index in range(first - table.num_freed, len(table.blocks)):
                if not self._writable(table.blocks[index]):
                    yield table, index

    def blocks_of_followers(self, group: RequestGroup) -> int:
        """Return how many blocks the followers' known tokens take beyond the leader's."""
        total = 0
        for sequence in group.sequences[1:]:
            if sequence.following:
                whole = shared_tokens(group.leader, sequence) // self.pool.block_size
                total += self.pool.blocks_for(len(sequence.tokens)) - whole
        return total * self.num_groups

    def most_hits(self, group: RequestGroup) -> int:
        """Return how many blocks of its leader may be prefix hits. One token at least must be
        computed, for its hidden state; and no follower may need blocks that are missing before the
        hits, or a state from before them."""
        count = len(group.leader.tokens) - 1
        if self._windowed or self.states.num_slots:
            for sequence in group.sequences[1:]:
                count = min(count, shared_tokens(group.leader, sequence))
        return count // self.pool.block_size

    def fork(self, parent: SequenceState, child: SequenceState, num_tokens: int) -> None:
        """Let `child` share the blocks of the first `num_tokens` tokens, which are computed."""
        count, whole = self.pool.blocks_for(num_tokens), num_tokens // self.pool.block_size
        if any(table.adoption is not None for table in parent.tables):
            raise InternalError(f"{parent.request.id}: adopted pages are one sequence's")
        child.tables = [
            Table(
                table.blocks[: count - table.num_freed],
                table.num_freed,
                min(table.num_registered, whole),
                table.first_whole,
            )
            for table in parent.tables
        ]
        for table in child.tables:
            self.pool.ref(table.blocks)
        self.states.fork(parent, child, num_tokens)
        child.num_computed = num_tokens
        child.know_hashes(parent, whole)
        child.following = False
        parent.forked = child.forked = True
        self._stats.num_forks += 1

    def take_reserved(
        self,
        sequence: SequenceState,
        reservation: Reservation,
        taken: Taken,
        adoption: Adoption | None = None,
    ) -> None:
        """Give a reservation's blocks and slot to the sequence, and the blocks of `adoption` where
        it has none. Its tokens count as computed."""
        sequence.tables = taken.tables
        self.states.seat(sequence, taken.slots)
        if adoption is not None:
            whole = reservation.num_tokens // self.pool.block_size
            self._insert(taken.tables[0], adoption, range(taken.num_hits, whole))
        # The last token is computed for what follows it, unless candidates are known already.
        left = 1 if sequence.candidates is None else 0
        sequence.num_computed = min(reservation.num_tokens, len(sequence.tokens) - left)
        if sequence.num_computed < reservation.start_token:
            # That token lies in a prefix hit, which others read: recompute it in a fresh block.
            whole = sequence.num_computed // self.pool.block_size
            for table in sequence.tables:
                self._cut(table, whole)
            sequence.num_computed = whole * self.pool.block_size
        self.register_full_blocks(sequence)

    def _insert(self, table: Table, adoption: Adoption, places: range) -> None:
        adopted = adoption.ids[places.start : places.stop]
        table.blocks[places.start : places.start] = adopted
        # Others cannot read these pages, so no block after them may be found until they are copied.
        table.first_whole = NEVER
        table.num_registered = places.start
        if not adopted:
            adoption.end()
            return
        adoption.hold(len(adopted))
        table.adoption = adoption
        self.adoptions.add(adoption)
        self._stats.num_adopted_blocks += len(adopted)

    def take_over(self, sequence: SequenceState, limit: int) -> int:
        """Copy at most `limit` adopted blocks into own, free ones; return how many."""
        copied = 0
        for table in sequence.tables:
            adoption = table.adoption
            if adoption is None:
                continue
            places = [i for i, block in enumerate(table.blocks) if not self._is_own(block)]
            places = places[: limit - copied]
            fresh = self.pool.allocate(len(places))
            if fresh is None:
                continue
            for index, block in zip(places, fresh, strict=True):
                self.memory.copy_block(table.blocks[index], block)
            if not adoption.safe():  # what has been copied may be wrong
                self.pool.unref(fresh)
                continue
            for index, block in zip(places, fresh, strict=True):
                table.blocks[index] = block
            self._drop_adopted(table, len(places))
            copied += len(places)
            if table.adoption is None:
                table.first_whole = 0
                self.register_full_blocks(sequence)
        self._stats.num_taken_over_blocks += copied
        return copied

    # ---- offering and giving back ----

    def register_full_blocks(self, sequence: SequenceState) -> None:
        """Enter the computed full blocks that are not yet in the prefix map, and the state behind
        them where a checkpoint is to be."""
        full = sequence.num_computed // self.pool.block_size
        for group, table in enumerate(sequence.tables):
            if full <= max(table.num_registered, table.first_whole):
                continue  # nearly every decode step: no hashing, no copies
            hashes = sequence.hashes(full, self.pool.block_size)
            first = max(table.num_registered, table.num_freed, table.first_whole)
            for index in range(first, full):
                block = table.blocks[index - table.num_freed]
                parent = hashes[index - 1] if index else b""
                self.pool.register(block, key_of(hashes[index], group), None if group else parent)
            table.num_registered = full
        if sequence.num_computed in sequence.checkpoint_at:
            self.checkpoints.note(sequence)

    def free_invisible(self, sequence: SequenceState) -> None:
        """Free leading blocks that no token from the last computed one on sees. That token counts,
        as whoever takes the KV over may compute it again."""
        if not self._windowed:
            return
        for window, table in zip(self.windows, sequence.tables, strict=True):
            if not window:
                continue
            count = self.pool.first_seen(window, sequence.num_computed - 1) - table.num_freed
            # One block stays: it pads the table behind the last block.
            count = min(count, len(table.blocks) - 1)
            if count > 0:
                self._unref(table, table.blocks[:count])
                del table.blocks[:count]
                table.num_freed += count
                self._stats.num_window_freed_blocks += count

    def settle_drafts(
        self, sequence: SequenceState, chunk: SequenceChunk, num_accepted: int
    ) -> None:
        """Free blocks beyond the known tokens, which rejected drafts have left. A state that has
        seen such drafts goes back to before `chunk`: the accepted tokens are computed again."""
        if self.states.settle(sequence, refused=num_accepted < chunk.num_drafts):
            sequence.num_computed = chunk.start
            self._stats.num_rollbacks += 1
        count = self.pool.blocks_for(len(sequence.tokens))
        for table in sequence.tables:
            self._cut(table, count)

    def _cut(self, table: Table, count: int) -> None:
        """Keep the sequence's first `count` blocks."""
        kept = count - table.num_freed
        if kept < len(table.blocks):
            self._unref(table, table.blocks[kept:])
            del table.blocks[kept:]

    def release(self, sequence: SequenceState) -> None:
        """Free all blocks and the state of a sequence, which then has computed nothing."""
        self.give_back(sequence.tables)
        self.states.give_back(sequence)
        sequence.tables = []
        sequence.num_computed = 0
        sequence.forked = False

    def give_back(self, tables: Sequence[Table]) -> None:
        """Remove a reference from each block. The blocks of all groups for the same tokens are
        evicted together, as one group's blocks alone answer no lookup."""
        if len(tables) == 1:
            self._unref(tables[0], tables[0].blocks)
            return
        places = [
            (index, block)
            for table in tables
            for index, block in enumerate(table.blocks, table.num_freed)
        ]
        places.sort(key=lambda place: place[0])
        self.pool.unref([block for _, block in places])

    def _unref(self, table: Table, blocks: Sequence[int]) -> None:
        if table.adoption is None:
            self.pool.unref(blocks)
            return
        own = [block for block in blocks if self._is_own(block)]
        self.pool.unref(own)
        self._drop_adopted(table, len(blocks) - len(own))

    def _drop_adopted(self, table: Table, count: int) -> None:
        adoption = table.adoption
        if adoption is None or not count:
            return
        adoption.drop(count)
        if adoption.ended:
            table.adoption = None
            self.adoptions.remove(adoption)

    def _is_own(self, block: int) -> bool:
        return block < self.pool.num_blocks

    def _writable(self, block: int) -> bool:
        return self._is_own(block) and self.pool.writable(block)

    # ---- proof ----

    def prove_owned(self, owned: Counter[int], sequences: Iterable[SequenceState]) -> Counter[int]:
        """Return the references `owned` without adopted pages. Raises InternalError unless live
        adoptions hold those, each as often as it knows, and each live adoption has some."""
        held: Counter[Adoption] = Counter()
        foreign = 0
        for sequence in sequences:
            for table in sequence.tables:
                adopted = {block for block in table.blocks if not self._is_own(block)}
                foreign += len(adopted)
                if table.adoption is not None:
                    if not adopted or not adopted <= set(table.adoption.ids):
                        raise InternalError(f"{sequence.request.id} names pages never adopted")
                    held[table.adoption] += len(adopted)
        live = {adoption: adoption.num_held for adoption in self.adoptions}
        if live != dict(held) or foreign != held.total() or any(a.ended for a in live):
            raise InternalError("adopted pages are not those of the live adoptions")
        return Counter({block: count for block, count in owned.items() if self._is_own(block)})

    def prove_private(self, sequence: SequenceState, end: int) -> None:
        """Raise InternalError unless tokens [num_computed, end) lie in blocks that nobody else
        holds and no lookup can find. This also protects others from rejected drafts."""
        first = sequence.num_computed // self.pool.block_size
        for table in sequence.tables:
            for index in range(first, self.pool.blocks_for(end)):
                block = table.blocks[index - table.num_freed]
                if not self._writable(block):
                    raise InternalError(
                        f"{sequence.request.id} would write into shared block {block}"
                    )
