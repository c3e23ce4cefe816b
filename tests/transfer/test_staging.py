"""StagedMemory on a device that reorders whatever it may: nothing is read too early."""

from __future__ import annotations

import gc
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.engine.memory.kv_cache import KVArena
from baton.protocol.errors import InternalError, KVCorrupt, KVTimeout
from baton.protocol.kv_spec import LayerSpec
from kv_transfer.pool.device_copies import ArenaPool
from kv_transfer.pool.layout import ArenaMemory
from kv_transfer.pool.staging import StagedMemory
from kv_transfer.protocol.base import Blocks, Payload
from tests.block_lists import held
from tests.transfer.fake_device import COMPUTE, FakeDevice
from tests.transfer.pools import snapshot

LAYERS = (LayerSpec(2, 8, 8), LayerSpec(1, 24, 0, kind="mla"))
PATIENCE_S = 30.0
SEEDS = range(8)


def pool_of(dtype: str = "bfloat16", block_size: int = 4) -> KVArena:
    return KVArena(LAYERS, 12, block_size, dtype)


def staged(
    arena: KVArena, device: FakeDevice, num_slots: int = 4, timeout_s: float = PATIENCE_S
) -> StagedMemory:
    described = ArenaMemory(arena, staged=True)
    return StagedMemory(ArenaPool(described), device, timeout_s, num_slots, 1 << 14)


def payload(layer: int, num_tokens: int, seed: int, dtype: str = "bfloat16") -> Payload:
    """Random numbers as they travel."""
    draw = torch.Generator().manual_seed(seed)
    source = KVArena(LAYERS, -(-num_tokens // 4), 4, dtype)
    for tensor in source.layer(layer):
        tensor.copy_(torch.randn(tensor.shape, generator=draw))
    blocks = held(range(source.num_blocks))
    fragments = ArenaMemory(source).read(layer, blocks, 0, num_tokens)
    return Payload(memoryview(b"".join(fragments)), dtype)


def compute(
    device: FakeDevice, arena: KVArena, blocks: Blocks, tokens: range, wire: Payload
) -> None:
    """Give the engine's stream the work of one chunk of layer 0: tokens' KV from `wire`."""
    part = ArenaMemory(arena).read(0, held(range(arena.num_blocks)), 0, 1)
    per_token = sum(len(fragment) for fragment in part)
    assert len(wire.data) == per_token * len(tokens)

    def run() -> None:
        ArenaMemory(arena).write(0, blocks, tokens.start, tokens.stop, wire)

    device.enqueue(COMPUTE, run)


def joined(fragments: Sequence[memoryview]) -> bytes:
    return b"".join(fragments)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_read_waits_for_the_chunk_that_it_needs(seed: int) -> None:
    device, arena = FakeDevice(seed), pool_of()
    memory, blocks = staged(arena, device), held((5, 2, 7))
    first, second = payload(0, 6, 1), payload(0, 4, 2)
    compute(device, arena, blocks, range(6), first)
    memory.written(0, blocks, 6)
    compute(device, arena, blocks, range(6, 10), second)
    memory.written(0, blocks, 10)
    assert device.num_gathered == 0  # the engine's thread waited for nothing
    assert joined(memory.read(0, blocks, 0, 6)) == bytes(first.data)
    assert joined(memory.read(0, blocks, 6, 10)) == bytes(second.data)
    assert device.num_gathered == 2


def test_a_device_that_does_not_wait_is_noticed_here() -> None:
    """The proof that the test above can fail."""
    wrong = 0
    for seed in SEEDS:
        device, arena = FakeDevice(seed, careless=True), pool_of()
        memory, blocks = staged(arena, device), held((5, 2, 7))
        wire = payload(0, 6, 1)
        compute(device, arena, blocks, range(6), wire)
        memory.written(0, blocks, 6)
        wrong += joined(memory.read(0, blocks, 0, 6)) != bytes(wire.data)
    assert wrong > 0


def test_the_first_chunk_does_not_wait_for_the_second() -> None:
    device, arena = FakeDevice(0, lazy=True), pool_of()
    memory, blocks = staged(arena, device), held((5, 2, 7))
    compute(device, arena, blocks, range(6), payload(0, 6, 1))
    memory.written(0, blocks, 6)
    reached: list[bool] = []
    device.enqueue(COMPUTE, lambda: reached.append(True))
    memory.written(0, blocks, 10)
    memory.read(0, blocks, 0, 6)
    assert reached == []
    memory.read(0, blocks, 6, 10)
    assert reached == [True]


@pytest.mark.parametrize("seed", SEEDS)
def test_the_next_owner_of_the_same_blocks_is_another_sequence(seed: int) -> None:
    """Equal block tables, another object: the marks of the old one must not answer for it."""
    device, arena = FakeDevice(seed), pool_of()
    memory = staged(arena, device)
    old, new = (held(range(3, 5)) for _ in range(2))
    assert old is not new
    compute(device, arena, old, range(8), payload(0, 8, 1))
    memory.written(0, old, 8)
    memory.read(0, old, 0, 8)
    wire = payload(0, 8, 2)
    compute(device, arena, new, range(8), wire)
    memory.written(0, new, 8)
    assert joined(memory.read(0, new, 0, 8)) == bytes(wire.data)


@pytest.mark.parametrize("seed", SEEDS)
def test_blocks_without_a_mark_are_read_behind_everything_enqueued(seed: int) -> None:
    device, arena = FakeDevice(seed), pool_of()
    memory, wire = staged(arena, device), payload(0, 8, 3)
    compute(device, arena, held((1, 2)), range(8), wire)
    assert joined(memory.read(0, held((1, 2)), 0, 8)) == bytes(wire.data)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_engine_attends_to_nothing_that_has_not_landed(seed: int) -> None:
    device, arena = FakeDevice(seed), pool_of()
    memory, wires = staged(arena, device), [payload(0, 4, s) for s in range(6)]
    blocks = held((9, 0, 4, 6, 1, 11))
    for index, wire in enumerate(wires):
        memory.write(0, blocks, 4 * index, 4 * index + 4, wire)
    memory.landed()
    seen: list[bytes] = []

    def attend() -> None:
        parts = ArenaMemory(arena).read(0, blocks, 0, 24)
        seen.append(joined(parts))

    device.run_until(device.enqueue(COMPUTE, attend))
    halves = [(bytes(w.data[: len(w.data) // 2]), bytes(w.data[len(w.data) // 2 :])) for w in wires]
    assert seen == [b"".join(k for k, _ in halves) + b"".join(v for _, v in halves)]
    assert device.num_held > 0
    assert memory.ring.num_free == 4


@pytest.mark.parametrize("seed", SEEDS)
def test_a_write_does_not_overtake_the_last_owners_step(seed: int) -> None:
    device, arena = FakeDevice(seed), pool_of()
    memory, wire = staged(arena, device), payload(0, 4, 1)
    before = joined(ArenaMemory(arena).read(0, held((3,)), 0, 4))
    seen: list[bytes] = []
    device.enqueue(
        COMPUTE, lambda: seen.append(joined(ArenaMemory(arena).read(0, held((3,)), 0, 4)))
    )
    memory.write(0, held((3,)), 0, 4, wire)
    memory.landed()
    device.finish()
    assert seen == [before]
    assert joined(ArenaMemory(arena).read(0, held((3,)), 0, 4)) == bytes(wire.data)


def test_a_failed_conversation_lands_before_the_blocks_are_reused() -> None:
    for seed in SEEDS:
        device, arena = FakeDevice(seed), pool_of()
        memory = staged(arena, device)
        memory.write(0, held((3,)), 0, 4, payload(0, 4, 1))
        with pytest.raises(KVCorrupt):
            memory.write(0, held((3,)), 0, 4, Payload(memoryview(b"short"), "bfloat16"))
        memory.landed()
        wire = payload(0, 4, 2)
        compute(device, arena, held((3,)), range(4), wire)
        device.finish()
        assert joined(ArenaMemory(arena).read(0, held((3,)), 0, 4)) == bytes(wire.data)


# ---- the ring -----------------------------------------------------------------------------------
def test_a_slot_is_not_reused_while_a_view_of_it_lives() -> None:
    device, arena = FakeDevice(1), pool_of()
    memory = staged(arena, device, num_slots=2, timeout_s=0.01)
    wires = [payload(0, 4, s) for s in range(2)]
    for block, wire in enumerate(wires):
        compute(device, arena, held((block,)), range(4), wire)
    lent = [memory.read(0, held((block,)), 0, 4) for block in range(2)]
    assert memory.ring.num_free == 0
    with pytest.raises(KVTimeout):
        memory.read(0, held((0,)), 0, 4)
    part = lent[0][0][:7]
    lent[0] = ()
    gc.collect()
    assert memory.ring.num_free == 0  # a slice is a view, too
    del part
    assert memory.ring.num_free == 1
    assert joined(lent[1]) == bytes(wires[1].data)
    assert joined(memory.read(0, held((0,)), 0, 4)) == bytes(wires[0].data)
    lent.clear()
    assert memory.ring.num_free == 2


def test_a_full_ring_holds_the_data_plane_up_until_a_slot_is_free() -> None:
    device, arena = FakeDevice(1), pool_of()
    memory = staged(arena, device, num_slots=1)
    lent = [memory.read(0, held((0,)), 0, 4)]
    asked, answered = threading.Event(), threading.Event()

    def read() -> None:
        asked.set()
        memory.read(0, held((1,)), 0, 4)
        answered.set()

    with ThreadPoolExecutor(1) as threads:
        reading = threads.submit(read)
        assert asked.wait(PATIENCE_S)
        assert not answered.is_set()
        memory.written(0, held((0,)), 4)  # the engine is not held up
        lent.clear()
        reading.result(PATIENCE_S)
    assert answered.is_set()
    assert memory.ring.num_free == 1


def test_a_slot_waits_for_its_own_last_copy() -> None:
    """One slot, many writes: each buffer is filled only when the copy out of it is over."""
    for seed in SEEDS:
        device, arena = FakeDevice(seed), pool_of()
        memory = staged(arena, device, num_slots=1)
        wires = [payload(0, 4, s) for s in range(5)]
        for block, wire in enumerate(wires):
            memory.write(0, held((block,)), 0, 4, wire)
        memory.landed()
        device.finish()
        for block, wire in enumerate(wires):
            assert joined(ArenaMemory(arena).read(0, held((block,)), 0, 4)) == bytes(wire.data)


def test_too_much_for_a_slot_is_our_own_fault() -> None:
    device, arena = FakeDevice(1), KVArena((LayerSpec(8, 128, 128),), 4, 16, "float32")
    with pytest.raises(InternalError):
        staged(arena, device).read(0, held((0, 1, 2, 3)), 0, 64)


def test_a_failed_copy_gives_its_slot_back() -> None:
    device, arena = FakeDevice(1), pool_of()
    memory = staged(arena, device)
    with pytest.raises(IndexError):
        memory.read(0, held((99,)), 0, 4)
    assert memory.ring.num_free == 4


# ---- the same bytes as a pool in main memory ----------------------------------------------------
@settings(max_examples=60)
@given(
    seed=st.integers(0, 999),
    dtypes=st.tuples(*[st.sampled_from(["float32", "bfloat16", "float16", "int8", "fp8"])] * 2),
    layer=st.sampled_from([0, 1]),
    tokens=st.tuples(st.integers(0, 11), st.integers(1, 12)),
    half=st.booleans(),
)
def test_it_is_the_twin_of_host_memory(
    seed: int, dtypes: tuple[str, str], layer: int, tokens: tuple[int, int], half: bool
) -> None:
    """Every precision on either side, slices of heads, any range: byte for byte as ArenaMemory."""
    start, end = tokens[0], tokens[0] + tokens[1]
    heads = range(1, 2) if half and LAYERS[layer].kv_heads > 1 else None
    source = pool_of(dtypes[0])
    for tensor in source.layer(layer):
        numbers = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed))
        tensor.copy_((numbers * 9).to(tensor.dtype))
    if dtypes[0] == "int8":
        for scales in source.scales(layer):
            scales.fill_(0.03)
    blocks = held((8, 3, 5, 0, 10, 7))
    device = FakeDevice(seed)
    theirs, ours = ArenaMemory(source), staged(source, device)
    wire = joined(theirs.read(layer, blocks, start, end, heads))
    assert joined(ours.read(layer, blocks, start, end, heads)) == wire
    expected, target = pool_of(dtypes[1], 4), pool_of(dtypes[1], 4)
    arriving = Payload(memoryview(wire), dtypes[0], heads or theirs.heads(layer))
    ArenaMemory(expected).write(layer, blocks, start, end, arriving)
    landing = staged(target, device)
    landing.write(layer, blocks, start, end, arriving)
    landing.landed()
    device.finish()
    assert snapshot(target) == snapshot(expected)
    if dtypes[1] == "int8":
        pairs = zip(target.scales(layer), expected.scales(layer), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)
