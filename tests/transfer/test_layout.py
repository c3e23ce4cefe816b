"""ArenaMemory against plain tensor indexing; staged copies against views."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.engine.kv_cache import KVArena
from baton.kv_spec import LayerSpec, PoolFormat
from kv_transfer.layout import ArenaMemory, byte_ranges
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
    blocks = rng.sample(range(48), -(-end // size))
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
    blocks = rng.sample(range(48), -(-end // size))
    memory = ArenaMemory(arena, staged)
    for layer, spec in enumerate(LAYERS):
        old = layer_bytes(arena, layer, blocks, 0, end)
        payload = rng.randbytes((end - start) * spec.token_bytes("bfloat16"))
        memory.write(layer, blocks, start, end, memoryview(payload))
        assert layer_bytes(arena, layer, blocks, start, end) == payload
        # Undo what lies in the range: then all is as before.
        ranges = byte_ranges(spec, memory.format, blocks, start, end)
        buffer = arena.layer_buffer(layer)
        for offset, length in ranges:
            buffer[offset : offset + length] = before[layer][offset : offset + length]
        assert layer_bytes(arena, layer, blocks, 0, end) == old
    assert snapshot(arena) == before


def test_reading_copies_nothing_on_the_cpu() -> None:
    arena = KVArena(LAYERS, 4, 8, "float32")
    (fragment, *_) = ArenaMemory(arena).read(0, [2], 0, 3)
    arena.layer(0)[0][2, 0, 0, 0] = 1.0
    assert bytes(fragment[:4]) == torch.tensor(1.0).numpy().tobytes()


def test_neighbouring_rows_are_one_range() -> None:
    pool = PoolFormat(4, "float32")
    plain = LayerSpec(1, 2, 2)  # 8 bytes a row; a block is 32 bytes of K, then 32 of V
    assert byte_ranges(plain, pool, [5, 6], 1, 6) == [
        (5 * 64 + 8, 24),
        (6 * 64, 16),
        (5 * 64 + 32 + 8, 24),
        (6 * 64 + 32, 16),
    ]
    latent = LayerSpec(1, 2, 0, kind="mla")  # no V between: blocks 5 and 6 are one range
    assert byte_ranges(latent, pool, [5, 6, 1], 1, 9) == [(5 * 32 + 8, 56), (32, 8)]
    assert byte_ranges(plain, pool, [5], 2, 2) == []
