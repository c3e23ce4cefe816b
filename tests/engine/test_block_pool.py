"""BlockPool: accounting under any order of calls, prefix map, eviction, events, copy-on-write."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from baton.engine.memory.block_pool import BlockPool
from baton.protocol.errors import InternalError
from baton.protocol.events import BlockEvent, BlockEventKind

STORED, EVICTED, CLEARED = BlockEventKind.STORED, BlockEventKind.EVICTED, BlockEventKind.CLEARED


def h(index: int) -> bytes:
    return index.to_bytes(16, "big")


def taken(pool: BlockPool, count: int) -> list[int]:
    blocks = pool.allocate(count)
    assert blocks is not None
    return blocks


def test_allocate_is_all_or_nothing() -> None:
    pool = BlockPool(4, 8)
    assert len(set(taken(pool, 3))) == 3
    assert pool.allocate(2) is None
    assert (pool.num_free, pool.num_used) == (1, 3)
    assert pool.allocate(0) == []
    pool.check()


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (8, 1), (9, 2), (16, 2)])
def test_blocks_for(tokens: int, blocks: int) -> None:
    assert BlockPool(1, 8).blocks_for(tokens) == blocks


def test_freed_hashed_blocks_answer_lookups_until_evicted_oldest_tail_first() -> None:
    pool = BlockPool(4, 8)
    first, second = taken(pool, 2), taken(pool, 2)
    for index, block in enumerate(first + second):
        pool.register(block, h(index), h(index - 1) if index % 2 else b"")
    pool.unref(second)
    pool.unref(first)
    assert pool.lookup([h(0), h(1)]) == first
    assert pool.num_free == 4
    # `second` was freed first, and of it the tail goes before the head.
    order = [taken(pool, 1)[0] for _ in range(4)]
    assert order == [second[1], second[0], first[1], first[0]]
    assert pool.lookup([h(0)]) == []
    pool.check()


def test_a_hit_takes_a_block_out_of_the_eviction_order() -> None:
    pool = BlockPool(2, 8)
    (block,) = taken(pool, 1)
    pool.register(block, h(1), b"")
    pool.unref([block])
    pool.ref(pool.lookup([h(1)]))
    assert pool.ref_count(block) == 1
    assert block not in taken(pool, 1)
    assert pool.allocate(1) is None
    pool.check({0: 1, 1: 1})


def test_lookup_stops_at_the_first_gap() -> None:
    pool = BlockPool(4, 8)
    blocks = taken(pool, 3)
    for index in (0, 2):
        pool.register(blocks[index], h(index), b"")
    assert pool.lookup([h(0), h(1), h(2)]) == [blocks[0]]


def test_equal_content_in_a_second_block_stays_unregistered() -> None:
    pool = BlockPool(4, 8)
    first, second = taken(pool, 2)
    pool.register(first, h(1), b"")
    pool.register(second, h(1), b"")
    assert pool.lookup([h(1)]) == [first]
    assert pool.take_events() == [BlockEvent(STORED, (h(1),))]
    pool.unref([second])
    pool.check({first: 1})


def test_without_prefix_caching_nothing_is_found_or_told() -> None:
    pool = BlockPool(4, 8, enable_prefix_caching=False)
    (block,) = taken(pool, 1)
    pool.register(block, h(1), b"")
    assert pool.lookup([h(1)]) == []
    assert pool.take_events() == []


def test_events_merge_runs_and_keep_the_order() -> None:
    pool = BlockPool(3, 8)
    blocks = taken(pool, 3)
    for index, block in enumerate(blocks):
        pool.register(block, h(index), h(index - 1) if index else b"")
    pool.unref(blocks)
    taken(pool, 2)
    assert pool.take_events() == [
        BlockEvent(STORED, (h(0), h(1), h(2)), b""),
        BlockEvent(EVICTED, (h(2), h(1))),
    ]
    assert pool.take_events() == []
    (other,) = taken(pool, 1)
    pool.register(other, h(9), h(7))
    assert pool.take_events() == [
        BlockEvent(EVICTED, (h(0),)),
        BlockEvent(STORED, (h(9),), h(7)),
    ]


def test_snapshot_is_the_state_for_a_new_listener() -> None:
    pool = BlockPool(4, 8)
    blocks = taken(pool, 2)
    pool.register(blocks[0], h(0), b"")
    pool.register(blocks[1], h(1), h(0))
    assert pool.snapshot_events() == [
        BlockEvent(CLEARED),
        BlockEvent(STORED, (h(0), h(1)), b""),
    ]


def test_events_that_nobody_takes_become_a_snapshot() -> None:
    pool = BlockPool(1, 8)
    for index in range(1000):
        (block,) = taken(pool, 1)
        pool.register(block, h(index), b"")
        pool.unref([block])
    assert pool.take_events() == [BlockEvent(CLEARED), BlockEvent(STORED, (h(999),))]
    assert pool.take_events() == []


def test_copy_on_write() -> None:
    pool = BlockPool(3, 8)
    (block,) = taken(pool, 1)
    assert pool.copy_on_write(block) == block
    pool.ref([block])  # a fork
    fresh = pool.copy_on_write(block)
    assert fresh is not None
    assert fresh != block
    pool.check({block: 1, fresh: 1})
    pool.register(block, h(1), b"")  # others may find it now: not writable even for its only holder
    copy = pool.copy_on_write(block)
    assert copy not in (None, block)
    assert pool.lookup([h(1)]) == [block]
    pool.ref([block])
    assert pool.copy_on_write(block) is None, "no room"
    pool.check()


def test_misuse_is_refused() -> None:
    pool = BlockPool(2, 8)
    with pytest.raises(InternalError, match="nothing to refer to"):
        pool.ref([0])
    with pytest.raises(InternalError, match="given back twice"):
        pool.unref([0])
    with pytest.raises(InternalError, match="cannot be written"):
        pool.copy_on_write(0)
    with pytest.raises(InternalError, match="prefix map"):
        pool.register(0, h(1), b"")
    with pytest.raises(InternalError, match="no pool"):
        BlockPool(0, 8)


def test_check_notices_a_reference_that_nobody_owns() -> None:
    pool = BlockPool(2, 8)
    (block,) = taken(pool, 1)
    pool.check({block: 1})
    with pytest.raises(InternalError, match="references"):
        pool.check({})


class PoolMachine(RuleBasedStateMachine):
    """Any order of allocate, fork, free, register and hit on a small pool."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(6, 4)
        self.tables: list[list[int]] = []  # what the holders believe
        self.stored: set[bytes] = set()  # what a listener of the events believes

    @rule(count=st.integers(0, 7))
    def allocate(self, count: int) -> None:
        free = self.pool.num_free
        blocks = self.pool.allocate(count)
        assert (blocks is None) == (count > free)
        if blocks is not None:
            held = {block for table in self.tables for block in table}
            assert not held & set(blocks), "a block has two owners"
            self.tables.append(blocks)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.tables) - 1))
        self.pool.unref(self.tables.pop(index))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        table = data.draw(st.sampled_from(self.tables))
        self.pool.ref(table)
        self.tables.append(list(table))

    @precondition(lambda self: any(self.tables))
    @rule(data=st.data())
    def write_last(self, data: st.DataObject) -> None:
        table = data.draw(st.sampled_from([table for table in self.tables if table]))
        block = self.pool.copy_on_write(table[-1])
        if block is not None:
            table[-1] = block
            assert self.pool.ref_count(block) == 1

    @precondition(lambda self: any(self.tables))
    @rule(data=st.data(), key=st.integers(0, 9))
    def register(self, data: st.DataObject, key: int) -> None:
        table = data.draw(st.sampled_from([table for table in self.tables if table]))
        known = {block for i in range(10) for block in self.pool.lookup([h(i)])}
        if table[0] not in known:
            self.pool.register(table[0], h(key), b"")

    @rule(key=st.integers(0, 9))
    def hit(self, key: int) -> None:
        blocks = self.pool.lookup([h(key)])
        self.pool.ref(blocks)
        self.tables.append(blocks)

    @invariant()
    def accounts_balance(self) -> None:
        self.pool.check(Counter(block for table in self.tables for block in table))

    @invariant()
    def listeners_know_the_map(self) -> None:
        for event in self.pool.take_events():
            assert event.kind is not CLEARED
            if event.kind is STORED:
                self.stored.update(event.hashes)
            else:
                self.stored.difference_update(event.hashes)
        assert self.stored == {h(i) for i in range(10) if self.pool.lookup([h(i)])}

    def teardown(self) -> None:
        for table in self.tables:
            self.pool.unref(table)
        assert self.pool.num_free == self.pool.num_blocks
        self.pool.check({})


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPoolMachine = PoolMachine.TestCase
