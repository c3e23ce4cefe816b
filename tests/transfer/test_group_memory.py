"""A group's pools and states as one: what is written and read is what one pool of all heads would
hold."""

from __future__ import annotations

import random

import pytest
import torch

from baton.engine.memory.kv_cache import KVArena
from baton.engine.parallel.pool import GroupArena, SharedMemory, make_memory
from baton.engine.state.place import RankPlace
from baton.protocol.errors import InternalError, KVCorrupt
from baton.protocol.kv_spec import HeldBlocks, LayerSpec, StateSpec
from kv_transfer.pool.device_copies import memory_of
from kv_transfer.pool.group_memory import GroupMemory
from kv_transfer.pool.layout import ArenaMemory
from kv_transfer.protocol.base import KVMemory, Payload

LAYERS = (LayerSpec(4, 8, 8), LayerSpec(4, 8, 8, window=16, kind="sliding"))
NUM_BLOCKS, BLOCK = 10, 4
HELD = (HeldBlocks((3, 8, 1, 6)), HeldBlocks((2, 9, 4, 7)))
SPAN = (2, 13)
# Queries and keys of 8 channels, values of 24; KV beside a state of another dtype; KV alone.
STATE = StateSpec((40, 3), (8, 5, 3), "bfloat16", segments=(8, 8, 24))
HYBRID = (
    LayerSpec(0, 0, 0, kind="state", state=STATE),
    LayerSpec(4, 8, 8, state=StateSpec((48, 4), (16, 7), segments=(16, 32))),
    LayerSpec(4, 8, 8),
)
SLOT, NUM_SLOTS, NUM_CHECKPOINTS = 2, 3, 2
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


# ---- recurrent states ----


def hybrid_group(size: int) -> GroupArena:
    place, blocks = RankPlace(0, size), (NUM_BLOCKS, BLOCK)
    states = (NUM_SLOTS, NUM_CHECKPOINTS)
    memory = SharedMemory(make_memory(), place, blocks, HYBRID, "float32", states)
    return GroupArena(memory, HYBRID, "float32")


def hybrid_pool() -> KVArena:
    arena = KVArena(HYBRID, NUM_BLOCKS, BLOCK, "float32")
    arena.keep_states(NUM_SLOTS, NUM_CHECKPOINTS)
    return arena


def in_slot(slot: int) -> tuple[HeldBlocks]:
    return (HeldBlocks((3, 8), state_slot=slot),)


def random_bytes(count: int, seed: int) -> bytes:
    generator = torch.Generator().manual_seed(seed)
    return bytes(torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator).tolist())


def state_of(memory: KVMemory, layer: int, slot: int = SLOT) -> bytes:
    """All bytes of a layer's state, read in pieces of 97."""
    total, found = HYBRID[layer].state_bytes, b""
    for start in range(0, total, 97):
        parts = memory.read_state(layer, in_slot(slot), start, min(start + 97, total))
        found += b"".join(map(bytes, parts))
    return found


@pytest.mark.parametrize("size", [2, 4, 8])
def test_the_states_of_a_group_are_those_of_one_pool(size: int) -> None:
    """Written whole and in pieces, of any length."""
    arena = hybrid_group(size)
    group, whole = memory_of(arena, 1.0), ArenaMemory(hybrid_pool())
    assert group.layers == whole.layers
    draw = random.Random(size)
    for turn in range(12):
        layer, slot = turn % 2, draw.randrange(NUM_SLOTS)
        total = HYBRID[layer].state_bytes
        start = 0 if turn < 4 else draw.randrange(total)
        body = random_bytes(draw.randrange(1, total - start + 1) if start else total, turn)
        for memory in (group, whole):
            memory.write_state(layer, in_slot(slot), start, body)
        for each in range(NUM_SLOTS):
            assert state_of(group, layer, each) == state_of(whole, layer, each)
    for layer in (0, 1):
        with pytest.raises(KVCorrupt, match="of the state of layer"):
            group.write_state(layer, in_slot(SLOT), HYBRID[layer].state_bytes - 1, b"xx")


@pytest.mark.parametrize("size", [2, 4, 8])
def test_each_rank_gets_its_heads_of_every_segment(size: int) -> None:
    arena, whole = hybrid_group(size), hybrid_pool()
    for memory in (memory_of(arena, 1.0), ArenaMemory(whole)):
        memory.write_state(0, in_slot(SLOT), 0, random_bytes(STATE.num_bytes, 3))
    assert whole.states is not None
    conv, matrices = whole.states.views(0)
    assert conv is not None
    assert matrices is not None
    cut = [part.chunk(size) for part in conv[SLOT].view(torch.int16).split((8, 8, 24))]
    for rank, own in enumerate(arena.ranks):
        assert own.states is not None
        mine, heads = own.states.views(0)
        assert mine is not None
        assert heads is not None
        expected = torch.cat([part[rank] for part in cut])
        assert torch.equal(mine[SLOT].view(torch.int16), expected)
        ours, theirs = heads[SLOT], matrices[SLOT].chunk(size)[rank]
        assert torch.equal(ours.view(torch.int32), theirs.view(torch.int32))


@pytest.mark.parametrize("size", [2, 4])
def test_what_the_leader_does_to_a_slot_happens_on_every_rank(size: int) -> None:
    """Copies to checkpoints and back, host copies; KV is as it was."""
    arena = hybrid_group(size)
    memory, states = memory_of(arena, 1.0), arena.states
    assert states is not None
    for layer in (0, 1):
        memory.write_state(layer, in_slot(0), 0, random_bytes(HYBRID[layer].state_bytes, layer))
    first = [state_of(memory, layer, 0) for layer in (0, 1)]
    states.copy(0, NUM_SLOTS + 1)
    host = states.read_slots([0, 1])
    states.copy(1, 0)
    assert not any(map(any, (state_of(memory, layer, 0) for layer in (0, 1))))
    states.copy(NUM_SLOTS + 1, 1)
    states.write_slots(host[:1], [2])
    for slot in (1, 2):
        assert [state_of(memory, layer, slot) for layer in (0, 1)] == first
    assert not any(torch.frombuffer(each.buffer(), dtype=torch.uint8).any() for each in arena.ranks)


def test_ranks_see_one_memory_of_states() -> None:
    descriptor, blocks, states = make_memory(), (NUM_BLOCKS, BLOCK), (NUM_SLOTS, NUM_CHECKPOINTS)
    leader, other = (
        SharedMemory(descriptor, RankPlace(rank, 2), blocks, HYBRID, "float32", states)
        for rank in (0, 1)
    )
    arena = GroupArena(leader, HYBRID, "float32")
    theirs = other.arena(1).states
    assert theirs is not None
    theirs.views(0)[1][SLOT] = 7.0  # type: ignore[index]
    mine = arena.ranks[1].states
    assert mine is not None
    assert bool((mine.views(0)[1][SLOT] == 7.0).all())  # type: ignore[index]
    assert arena.states is not None
    assert not arena.states.views(0)[1].any(), "rank 0's own heads"  # type: ignore[union-attr]


def test_a_part_of_a_state_is_never_taken_for_the_whole() -> None:
    """One rank's pool, of which a connector of its own knows the whole model's layers."""
    rank = ArenaMemory(hybrid_group(2).ranks[1], layers=HYBRID, tp=(2, 1))
    for start, end in ((0, 1), (0, STATE.num_bytes)):
        with pytest.raises(InternalError, match="only a part of the state of layer 0"):
            rank.read_state(0, in_slot(SLOT), start, end)
        with pytest.raises(InternalError, match="only a part of the state of layer 0"):
            rank.write_state(0, in_slot(SLOT), start, bytes(end - start))
