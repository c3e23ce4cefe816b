"""ArenaMemory against plain tensor indexing; staged copies against views."""

from __future__ import annotations

from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.engine.memory.kv_cache import KVArena
from baton.protocol.errors import ConfigError, InternalError, KVCorrupt
from baton.protocol.kv_spec import DTYPE_BYTES, BlockLists, HeldBlocks, LayerSpec, PoolFormat
from kv_transfer.pool.codec import Rows, pack, unpack
from kv_transfer.pool.layout import HOLE, ArenaMemory, Slot, byte_ranges
from kv_transfer.protocol.base import Payload
from kv_transfer.protocol.shares import rows_bytes
from tests.block_lists import held
from tests.transfer.pools import LAYERS, fill_random, layer_bytes, snapshot

RANGES = st.tuples(
    st.integers(1, 9),  # block size
    st.integers(0, 40),
    st.integers(0, 40),
    st.randoms(use_true_random=False),
)


@pytest.mark.parametrize("staged", [False, True])
@given(case=RANGES)
@settings(max_examples=40, deadline=None)
def test_reading_equals_the_tensors(staged: bool, case) -> None:
    size, a, b, rng = case
    start, end = min(a, b), max(a, b) + 1
    arena = KVArena(LAYERS, 48, size, "bfloat16")
    fill_random(arena, 1)
    blocks = held(rng.sample(range(48), -(-end // size)))
    memory = ArenaMemory(arena, staged)
    for layer in range(len(LAYERS)):
        read = b"".join(memory.read(layer, blocks, start, end))
        assert read == layer_bytes(arena, layer, blocks, start, end)


@pytest.mark.parametrize("staged", [False, True])
@given(case=RANGES)
@settings(max_examples=40, deadline=None)
def test_writing_puts_it_there_and_nowhere_else(staged: bool, case) -> None:
    size, a, b, rng = case
    start, end = min(a, b), max(a, b) + 1
    arena = KVArena(LAYERS, 48, size, "bfloat16")
    fill_random(arena, 2)
    before = snapshot(arena)
    blocks = held(rng.sample(range(48), -(-end // size)))
    memory = ArenaMemory(arena, staged)
    for layer, spec in enumerate(LAYERS):
        old = layer_bytes(arena, layer, blocks, 0, end)
        payload = rng.randbytes((end - start) * spec.token_bytes("bfloat16"))
        memory.write(layer, blocks, start, end, Payload(memoryview(payload), "bfloat16"))
        assert layer_bytes(arena, layer, blocks, start, end) == payload
        slot = Slot(arena.page_bytes, arena.slot_offset(layer))
        # Undo what lies in the range: then all is as before.
        ranges = byte_ranges(spec, memory.format, slot, blocks[0], (start, end))
        for offset, length in ranges:
            arena.buffer()[offset : offset + length] = before[offset : offset + length]
        assert layer_bytes(arena, layer, blocks, 0, end) == old
    assert snapshot(arena) == before


def test_reading_copies_nothing_on_the_cpu() -> None:
    arena = KVArena(LAYERS, 4, 8, "float32")
    (fragment, *_) = ArenaMemory(arena).read(0, held([2]), 0, 3)
    arena.layer(0)[0][2, 0, 0, 0] = 1.0
    assert bytes(fragment[:4]) == torch.tensor(1.0).numpy().tobytes()


def test_neighbouring_rows_are_one_range() -> None:
    pool = PoolFormat(4, "float32")
    plain, lone = LayerSpec(1, 2, 2), Slot(64, 0)  # 8 bytes a row; 32 bytes of K, then 32 of V
    assert byte_ranges(plain, pool, lone, HeldBlocks([5, 6]), (1, 6)) == [
        (5 * 64 + 8, 24),
        (6 * 64, 16),
        (5 * 64 + 32 + 8, 24),
        (6 * 64 + 32, 16),
    ]
    latent = LayerSpec(1, 2, 0, kind="mla")  # no V between: blocks 5 and 6 are one range
    ranges = byte_ranges(latent, pool, Slot(32, 0), HeldBlocks([5, 6, 1]), (1, 9))
    assert ranges == [(5 * 32 + 8, 56), (32, 8)]
    assert byte_ranges(plain, pool, lone, HeldBlocks([5]), (2, 2)) == []
    # The second layer of a page of 192 bytes; blocks before the third are a hole.
    second, hole = Slot(192, 128), HeldBlocks([5, 6], first=2)
    assert byte_ranges(plain, pool, second, hole, (11, 13)) == [
        (5 * 192 + 128 + 24, 8),
        (6 * 192 + 128, 8),
        (5 * 192 + 128 + 32 + 24, 8),
        (6 * 192 + 128 + 32, 8),
    ]


# ---- layer groups -------------------------------------------------------------------------------
MIXED = (LayerSpec(2, 8, 8), LayerSpec(2, 8, 8, window=9), LayerSpec(4, 6, 2, window=9))


def scattered(rng: Random, num_groups: int, count: int, first: int) -> BlockLists:
    """A sequence of `count` blocks per group; all groups but the first have a hole."""
    ids = rng.sample(range(40), num_groups * count)
    lists = [ids[group * count : (group + 1) * count] for group in range(num_groups)]
    return (HeldBlocks(lists[0]), *(HeldBlocks(each[first:], first) for each in lists[1:]))


def test_tables_keep_their_places_behind_a_hole() -> None:
    """A peer indexes by the sequence's blocks; no pool has what fills the hole."""
    memory = ArenaMemory(KVArena(MIXED, 40, 4, "bfloat16"))
    blocks = (HeldBlocks((3, 1, 4)), HeldBlocks((9, 8), 1), HeldBlocks((7,), 2))
    assert memory.tables(blocks) == ((3, 1, 4), (HOLE, 9, 8), (HOLE, HOLE, 7))
    assert [memory.group(layer) for layer in range(3)] == [0, 1, 2]
    assert memory.tables((HeldBlocks(()),) * 3) == ((), (), ())


@pytest.mark.parametrize("staged", [False, True])
@given(
    tokens=st.tuples(st.integers(0, 30), st.integers(1, 20)),
    first=st.integers(0, 8),
    rng=st.randoms(use_true_random=False),
)
@settings(max_examples=40, deadline=None)
def test_each_group_has_its_own_blocks_and_hole(
    staged: bool, tokens: tuple[int, int], first: int, rng: Random
) -> None:
    """What is held travels from any hole to any other and touches no other page; a hole is
    neither read nor written."""
    start, end = tokens[0], sum(tokens)
    source, target = (KVArena(MIXED, 40, 4, "bfloat16") for _ in range(2))
    assert source.groups.num_groups > 1
    fill_random(source, 3)
    fill_random(target, 4)
    before = snapshot(target)
    count = -(-end // 4)
    first = min(first, count - 1)
    here = scattered(rng, source.groups.num_groups, count, first)
    there = scattered(rng, source.groups.num_groups, count, min(first, start // 4))
    memory, other = ArenaMemory(source, staged), ArenaMemory(target, staged)
    for layer, spec in enumerate(MIXED):
        size = (end - start) * spec.token_bytes("bfloat16")
        payload = Payload(memoryview(rng.randbytes(size)), "bfloat16")
        other.write(layer, there, start, end, payload)
        assert b"".join(other.read(layer, there, start, end)) == payload.data
        if start // 4 < here[source.group_of[layer]].first:
            for heads in (range(spec.kv_heads), range(1)):  # whole rows, and a slice of them
                with pytest.raises(InternalError, match="not held"):
                    memory.read(layer, here, start, end, heads)
            with pytest.raises(InternalError, match="not held"):
                memory.write(layer, here, start, end, payload)
        else:
            read = b"".join(memory.read(layer, here, start, end))
            assert read == layer_bytes(source, layer, here, start, end)
    used = {block for group in there for block in group.ids}
    for block in set(range(40)) - used:
        page = slice(block * target.page_bytes, (block + 1) * target.page_bytes)
        assert snapshot(target)[page] == before[page]


# ---- precisions and slices ----------------------------------------------------------------------
WHOLE = (LayerSpec(4, 8, 4), LayerSpec(1, 24, 0, kind="mla"))


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("dtype", DTYPE_BYTES)
def test_what_is_written_is_read(dtype: str, staged: bool) -> None:
    """Any precision, scales included; through another block size."""
    source, target = (KVArena(WHOLE, 8, size, dtype) for size in (4, 7))
    fill_random(source, 3)
    for layer, spec in enumerate(WHOLE):
        if dtype == "int8":
            for scales in source.scales(layer):
                scales.copy_(torch.rand(scales.shape))
        read = ArenaMemory(source, staged).read(layer, held([5, 2, 7]), 3, 11)
        payload = Payload(memoryview(b"".join(read)), dtype)
        assert len(payload.data) == 8 * rows_bytes(spec, spec.kv_heads, dtype)
        there = ArenaMemory(target, staged)
        there.write(layer, held([1, 6]), 3, 11, payload)
        assert b"".join(there.read(layer, held([1, 6]), 3, 11)) == payload.data


def test_a_rank_holds_and_gives_its_heads() -> None:
    """Each of two ranks against the whole model's pool."""
    whole = KVArena(WHOLE, 8, 4, "float32")
    fill_random(whole, 4)
    everything = ArenaMemory(whole)
    for rank in (0, 1):
        local = (LayerSpec(2, 8, 4), WHOLE[1])
        memory = ArenaMemory(KVArena(local, 8, 4, "float32"), layers=WHOLE, tp=(2, rank))
        assert [memory.heads(0), memory.heads(1)] == [range(2 * rank, 2 * rank + 2), range(1)]
        for layer in (0, 1):
            heads = memory.heads(layer)
            part = b"".join(everything.read(layer, held([3, 1]), 1, 8, heads))
            memory.write(layer, held([0, 5]), 1, 8, Payload(memoryview(part), "float32", heads))
            assert b"".join(memory.read(layer, held([0, 5]), 1, 8)) == part
        one = range(2 * rank + 1, 2 * rank + 2)
        slim = b"".join(memory.read(0, held([0, 5]), 1, 8, one))
        assert slim == b"".join(everything.read(0, held([3, 1]), 1, 8, one))
        before = b"".join(memory.read(0, held([0, 5]), 1, 8, range(2 * rank, 2 * rank + 1)))
        memory.write(0, held([0, 5]), 1, 8, Payload(memoryview(bytes(len(slim))), "float32", one))
        assert b"".join(memory.read(0, held([0, 5]), 1, 8, one)) == bytes(len(slim))
        assert b"".join(memory.read(0, held([0, 5]), 1, 8, range(2 * rank, 2 * rank + 1))) == before
        with pytest.raises(InternalError, match="not all in"):
            memory.read(0, held([0, 5]), 1, 8, range(4))


def test_views_are_the_pool_or_nothing() -> None:
    arena = KVArena(WHOLE, 8, 4, "bfloat16")
    memory = ArenaMemory(arena)
    views = memory.views(0, held([3]), 0, 2, range(4))
    assert views is not None
    for view in views:
        view[:] = b"\x01" * len(view)
    assert set(b"".join(memory.read(0, held([3]), 0, 2))) == {1}
    assert memory.views(0, held([3]), 0, 2, range(2)) is None
    assert ArenaMemory(arena, staged=True).views(0, held([3]), 0, 2, range(4)) is None
    quantised = ArenaMemory(KVArena(WHOLE, 8, 4, "int8"))
    assert quantised.views(0, held([3]), 0, 2, range(4)) is None


def test_a_payload_of_another_precision_is_converted() -> None:
    arena = KVArena(WHOLE, 8, 4, "float16")
    memory = ArenaMemory(arena)
    rows = [Rows(torch.randn(3, 4, dim)) for dim in (8, 4)]
    memory.write(0, held([2]), 0, 3, Payload(memoryview(b"".join(pack(rows))), "float32", range(4)))
    stored = Payload(memoryview(b"".join(memory.read(0, held([2]), 0, 3))), "float16", range(4))
    for before, after in zip(rows, unpack(WHOLE[0], stored), strict=True):
        assert torch.equal(before.values.half(), after.values)


def test_what_does_not_fit_is_refused() -> None:
    memory = ArenaMemory(KVArena(WHOLE, 8, 4, "float16"))
    with pytest.raises(KVCorrupt, match="7 bytes"):
        memory.write(0, held([2]), 0, 3, Payload(memoryview(bytes(7)), "float16"))
    with pytest.raises(ConfigError, match="rank 0 of 2"):
        ArenaMemory(KVArena(WHOLE, 8, 4, "float16"), tp=(2, 0))
