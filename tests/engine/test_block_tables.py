"""BlockTables over several layer groups: which prefix is a hit, and what an arrival may offer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from baton.engine.memory.block_pool import BlockPool
from baton.engine.memory.block_tables import BlockTables
from baton.engine.memory.state_checkpoints import StateCheckpoints
from baton.engine.state.interface import Reservation
from baton.engine.state.sequence import SequenceState, as_lists
from baton.engine.state.stats import EngineStats
from baton.protocol.events import BlockEventKind
from tests.engine.test_scheduler import NoMemory
from tests.fakes import request

SIZE = 4


def make(windows: Sequence[int], num_blocks: int = 100, checkpoints: int = 0) -> BlockTables:
    pool, stats = BlockPool(num_blocks, SIZE), EngineStats()
    states = StateCheckpoints(pool, stats, NoRows(checkpoints)) if checkpoints else None
    return BlockTables(pool, NoMemory(), stats, windows, checkpoints=states)


@dataclass
class NoRows:
    """Rows of states without bytes."""

    num_checkpoints: int
    num_slots: int = 1

    def copy(self, source: int, target: int) -> None:
        assert source != target


def sequence_of(num_tokens: int) -> SequenceState:
    tokens = list(range(num_tokens))
    return SequenceState(request(prompt=tokens), b"root", tokens)


def computed(tables: BlockTables, num_tokens: int) -> SequenceState:
    """A sequence whose full blocks all groups offer."""
    sequence = sequence_of(num_tokens)
    taken = tables.take([], num_tokens, 0)
    assert taken is not None
    sequence.tables = taken.tables
    sequence.num_computed = num_tokens
    tables.register_full_blocks(sequence)
    return sequence


@given(
    windows=st.sampled_from([(0, 6), (0, 1, 9), (5,), (9, 4), (0, 0)]),
    known=st.sets(st.tuples(st.integers(0, 2), st.integers(0, 7))),
    ends=st.sets(st.integers(1, 8)),
)
def test_a_hit_is_the_longest_prefix_that_every_group_can_go_on_from(
    windows: tuple[int, ...], known: set[tuple[int, int]], ends: set[int]
) -> None:
    """`known`: (group, block) of what is in the map. `ends`: blocks before a checkpoint."""
    tables = make(windows, checkpoints=8)
    origin = computed(tables, 8 * SIZE)
    hashes = list(origin.hashes(8, SIZE))
    tables.release(origin)
    for group in range(len(windows)):
        for index in range(8):
            if (group, index) not in known:
                key = hashes[index] + (bytes((group,)) if group else b"")
                tables.pool._by_hash.pop(key)  # as an eviction would

    def goes_on(count: int) -> bool:
        needed = (
            (group, index)
            for group, window in enumerate(windows)
            for index in range(count)
            if not window or (index + 1) * SIZE - 1 > count * SIZE - window
        )
        return all(block in known for block in needed)

    def num_hits(*, resumes: bool) -> int:
        return tables._lookup.num_hits(hashes, lambda count: count * SIZE, resumes)

    assert num_hits(resumes=False) == max(count for count in range(9) if goes_on(count))
    origin.state_slot = 0
    for end in ends:
        origin.num_computed = end * SIZE
        origin.checkpoint_at = (end * SIZE,)
        tables.checkpoints.note(origin)
    assert num_hits(resumes=True) == max(count for count in (0, *ends) if goes_on(count))


def test_a_hit_begins_with_a_hole_in_windowed_groups() -> None:
    tables = make((0, 6))
    first = computed(tables, 20)
    taken = tables.take(first.hashes(4, SIZE), 18, 0)
    assert taken is not None
    full, sliding = taken.tables
    # Token 16 sees 11 .. 16: block 2 is the first that it looks at.
    assert (taken.num_hits, full.num_freed, sliding.num_freed) == (4, 0, 2)
    assert full.blocks[:4] == first.tables[0].blocks[:4]
    assert sliding.blocks[:2] == first.tables[1].blocks[2:4]
    assert (len(full.blocks), len(sliding.blocks)) == (5, 3)
    tables.give_back(taken.tables)
    tables.release(first)
    assert tables.pool.num_free == 100


def test_events_tell_of_the_first_group_alone() -> None:
    tables = make((0, 6, 6), num_blocks=6)
    sequence = computed(tables, 8)
    (stored,) = tables.pool.take_events()
    assert (stored.kind, stored.hashes) == (BlockEventKind.STORED, tuple(sequence.hashes(2, SIZE)))
    cleared, again = tables.pool.snapshot_events()
    assert (cleared.kind, again.hashes) == (BlockEventKind.CLEARED, stored.hashes)
    tables.release(sequence)
    assert tables.pool.allocate(6) is not None
    (evicted,) = tables.pool.take_events()
    assert evicted.kind is BlockEventKind.EVICTED
    assert set(evicted.hashes) == set(stored.hashes)
    assert tables.pool.num_cached == 0


def test_what_arrives_in_part_is_not_offered() -> None:
    tables = make((0, 6))
    hashes = list(sequence_of(20).hashes(5, SIZE))
    taken = tables.take_for_arrival(hashes[:5], 20)
    assert taken is not None
    assert tables.blocks_for_arrival(20) == 5 + 3
    # A layer with a window of 6 is sent from token 14 on: block 3 holds 12 .. 15, so not all.
    full, sliding = taken.tables
    assert (full.first_whole, sliding.num_freed, sliding.first_whole) == (0, 2, 4)
    sequence = sequence_of(21)
    reservation = Reservation("r", as_lists(taken.tables), 20, 0)
    tables.take_reserved(sequence, reservation, taken)
    assert sequence.num_computed == 20
    known = [tables.pool.find(each + b"\x01") is not None for each in hashes]
    assert known == [False, False, False, False, True]
    assert len(tables.pool.lookup(hashes)) == 5
    # A child of it, or a copy brought back from the host, does not forget that.
    child = sequence_of(21)
    tables.fork(sequence, child, 20)
    child.tables[1].num_registered = 0
    tables.register_full_blocks(child)
    assert tables.pool.find(hashes[3] + b"\x01") is None
    tables.release(child)
    tables.release(sequence)
    assert tables.pool.num_free == 100


def test_an_arrival_that_is_a_hit_throughout_can_be_computed_from_its_last_block() -> None:
    tables = make((0, 6))
    first = computed(tables, 20)
    tables.free_invisible(first)
    hashes = list(first.hashes(5, SIZE))
    taken = tables.take_for_arrival(hashes, 20)
    assert taken is not None
    assert taken.num_hits == 5
    sequence = sequence_of(20)
    tables.take_reserved(sequence, Reservation("r", as_lists(taken.tables), 20, 20), taken)
    # Its last token is computed in a fresh last block; token 16 sees from 11, in block 2, on.
    assert sequence.num_computed == 16
    assert [table.num_freed for table in sequence.tables] == [0, 2]
    assert tables.grow(sequence, 20)
    tables.prove_private(sequence, 20)
    for each in (first, sequence):
        tables.release(each)
    tables.pool.check({})
    assert tables.pool.num_free == 100


def test_a_stretch_of_tokens_is_evicted_with_all_its_groups() -> None:
    tables = make((0, 100), num_blocks=8)
    sequence = computed(tables, 16)
    hashes = list(sequence.hashes(4, SIZE))
    tables.release(sequence)
    for left in (3, 2, 1, 0):
        assert tables.pool.allocate(2) is not None
        found = tables._lookup.num_hits(hashes, lambda count: count * SIZE, resumes=False)
        assert found == left
