"""A group's pools as one: what is written and read is what one pool of all heads would hold."""

from __future__ import annotations

import random

import pytest
import torch

from baton.engine.memory.kv_cache import KVArena
from baton.engine.parallel.pool import GroupArena, SharedMemory, make_memory
from baton.engine.state.place import RankPlace
from baton.protocol.errors import KVCorrupt
from baton.protocol.kv_spec import HeldBlocks, LayerSpec
from kv_transfer.pool.device_copies import memory_of
from kv_transfer.pool.group_memory import GroupMemory
from kv_transfer.pool.layout import ArenaMemory
from kv_transfer.protocol.base import KVMemory, Payload

LAYERS = (LayerSpec(4, 8, 8), LayerSpec(4, 8, 8, window=16, kind="sliding"))
NUM_BLOCKS, BLOCK = 10, 4
HELD = (HeldBlocks((3, 8, 1, 6)), HeldBlocks((2, 9, 4, 7)))
SPAN = (2, 13)
DTYPES = ("float32", "bfloat16", "int8", "fp8")


def group_of(size: int, dtype: str) -> GroupMemory:
    place, blocks = RankPlace(0, size), (NUM_BLOCKS, BLOCK)
    memory = memory_of(
        GroupArena(SharedMemory(make_memory(), place, blocks, LAYERS, dtype), LAYERS, dtype), 1.0
    )
    assert isinstance(memory, GroupMemory)
    return memory


def one(dtype: str) -> ArenaMemory:
    return ArenaMemory(KVArena(LAYERS, NUM_BLOCKS, BLOCK, dtype))


def read(memory: KVMemory, layer: int, heads: range | None = None) -> bytes:
    return b"".join(bytes(part) for part in memory.read(layer, HELD, *SPAN, heads))


def payload(layer: int, dtype: str, heads: int, seed: int) -> bytes:
    """Finite rows: K, V, then scales."""
    generator = torch.Generator().manual_seed(seed)
    count = (SPAN[1] - SPAN[0]) * heads
    values = torch.randn(2, count * LAYERS[layer].k_dim, generator=generator)
    kinds = {
        "float32": torch.float32, "bfloat16": torch.bfloat16, "fp8": torch.float8_e4m3fn,
    }  # fmt: skip
    if dtype != "int8":
        return values.to(kinds[dtype]).view(torch.uint8).numpy().tobytes()
    scales = torch.rand(2, count, generator=generator) + 0.1
    return (values * 20).to(torch.int8).numpy().tobytes() + scales.numpy().tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [2, 4, 8])
def test_a_group_reads_and_writes_as_one_pool(size: int, dtype: str) -> None:
    """Whole rows and slices of heads, in the pool's precision and in another; eight ranks hold
    each head twice."""
    group, whole = group_of(size, dtype), one(dtype)
    assert group.layers == whole.layers
    assert group.format == whole.format
    assert group.tables(HELD) == whole.tables(HELD)
    draw = random.Random(size)
    for turn in range(12):
        layer, sent = turn % 2, draw.choice((dtype, *DTYPES))
        assert group.group(layer) == whole.group(layer)
        first = draw.randrange(4)
        heads = draw.choice((None, range(first, draw.randrange(first, 4) + 1)))
        body = payload(layer, sent, len(heads or range(4)), turn)
        for memory in (group, whole):
            memory.write(layer, HELD, *SPAN, Payload(memoryview(body), sent, heads))
        for asked in (None, heads, range(2, 3)):
            assert read(group, layer, asked) == read(whole, layer, asked)
    assert any(read(whole, 0))
    if size == 8:
        one_of_two, other = (rank.layer(1)[0].float() for rank in group.arena.ranks[6:])
        assert torch.equal(one_of_two, other), "every replica is written"
    assert group.views(0, HELD, *SPAN, range(4)) is None


def test_a_payload_of_another_length_is_refused() -> None:
    body = payload(0, "float32", 3, 0)
    with pytest.raises(KVCorrupt, match="payload of"):
        group_of(2, "float32").write(0, HELD, *SPAN, Payload(memoryview(body), "float32"))
