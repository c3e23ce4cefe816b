"""ArenaMemory against plain tensor indexing; staged copies against views."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.engine.kv_cache import KVArena
from baton.kv_spec import HeldBlocks, LayerSpec, PoolFormat
from kv_transfer.layout import ArenaMemory, Slot, byte_ranges
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
        memory.write(layer, blocks, start, end, memoryview(payload))
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


MIXED = (LayerSpec(2, 8, 8), LayerSpec(2, 8, 8, window=9), LayerSpec(4, 6, 2, window=9))


@pytest.mark.parametrize("staged", [False, True])
@given(start=st.integers(0, 30), length=st.integers(1, 20), first=st.integers(0, 8))
@settings(max_examples=40, deadline=None)
def test_a_hole_gives_zeros_and_takes_nothing(
    staged: bool, start: int, length: int, first: int
) -> None:
    """Tokens before a windowed group's first held block travel as zeros and are dropped."""
    source, target = (KVArena(MIXED, 40, 4, "bfloat16") for _ in range(2))
    fill_random(source, 3)
    fill_random(target, 4)
    before = snapshot(target)
    end = start + length
    count = -(-end // 4)
    first = min(first, count)
    whole = HeldBlocks(range(count))
    groups = [whole] + [HeldBlocks(range(20 + first, 20 + count), first)] * 2
    blocks = tuple(groups[: source.groups.num_groups])
    memory, other = ArenaMemory(source, staged), ArenaMemory(target, staged)
    for layer, spec in enumerate(MIXED):
        held = blocks[source.group_of[layer]]
        payload = b"".join(memory.read(layer, blocks, start, end))
        assert len(payload) == length * spec.token_bytes("bfloat16")
        hole = min(end, max(start, 4 * held.first)) - start
        k_bytes = spec.kv_heads * spec.k_dim * 2
        assert not any(payload[: hole * k_bytes])
        other.write(layer, blocks, start, end, memoryview(payload))
        read = b"".join(other.read(layer, blocks, start, end))
        assert read == payload
    if first == count:  # nothing of the sliding layers is held: their blocks are untouched
        assert snapshot(target)[20 * target.page_bytes :] == before[20 * target.page_bytes :]
