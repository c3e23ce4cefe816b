"""Real arenas with known contents, and the nodes around them, for the transfer tests."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from baton.engine.memory.kv_cache import KVArena
from baton.protocol.errors import KVError
from baton.protocol.events import FirstToken
from baton.protocol.handles import KVHandle
from baton.protocol.kv_spec import (
    HeldBlocks,
    LayerSpec,
    PoolFormat,
    StateSpec,
    first_visible,
    layout_fingerprint,
)
from baton.protocol.request import Request
from baton.protocol.sampling import SamplingParams
from baton.runtime.rotation.deployment_secret import fixed
from baton.runtime.timing import Timing
from kv_transfer.connector import Connector, TransferOptions
from kv_transfer.pool.layout import ArenaMemory
from kv_transfer.protocol.base import Blocks, Lane, Payload
from kv_transfer.protocol.shares import first_sent, heads_of
from tests.fakes import FakeClock
from tests.transfer.direct_lanes import pool_of

SECRET = "deployment secret"
EVERY_FRAME = TransferOptions(burst_bytes=0)  # progress is sent at once, however small
BOOT_P, BOOT_D, BOOT_E = "0a" * 16, "0d" * 16, "0e" * 16
# A plain layer, a window with other heads and dims, and a latent without V.
LAYERS = (
    LayerSpec(2, 8, 8),
    LayerSpec(3, 4, 8, window=16, kind="sliding"),
    LayerSpec(1, 24, 0, kind="mla"),
)
# KV alone, a state of two frames alone, both, and nothing: as a hybrid model has them.
HYBRID = (
    LayerSpec(2, 8, 8),
    LayerSpec(0, 0, 0, kind="state", state=StateSpec((6, 3), (2, 300, 500), "bfloat16")),
    LayerSpec(1, 8, 8, state=StateSpec(recurrent=(2, 5))),
    LayerSpec(0, 0, 0, kind="state"),
)
NUM_SLOTS = 5  # of recurrent states
UNTOUCHED = 0xA5
PATIENCE_S = 30.0  # a test that waits longer has failed


def request_of(request_id: str = "r1", epoch: int = 1) -> Request:
    return Request(request_id, (1, 2, 3), SamplingParams(seed=1), epoch=epoch)


def layer_bytes(arena: KVArena, layer: int, blocks: Blocks, start: int, end: int) -> bytes:
    """K rows, then V rows of tokens [start, end), from the tensors: the twin of ArenaMemory."""
    parts = []
    held = blocks[arena.group_of[layer]]
    hole = held.first * arena.block_size
    assert start >= hole
    for tensor in arena.layer(layer):
        if tensor.numel():
            rows = torch.cat([tensor[b] for b in held.ids])[start - hole : end - hole]
            parts.append(rows.contiguous().view(torch.uint8).numpy().tobytes())
    return b"".join(parts)


def memories(arena: KVArena) -> list[torch.Tensor]:
    """The bytes of the blocks, and of the recurrent states if there are any."""
    kept = [torch.frombuffer(arena.buffer(), dtype=torch.uint8)]
    return kept if arena.states is None else [*kept, arena.states._rows.view(-1)]


def fill_random(arena: KVArena, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for memory in memories(arena):
        memory.copy_(torch.randint(0, 256, memory.shape, dtype=torch.uint8, generator=generator))


def fill_untouched(arena: KVArena) -> None:
    for memory in memories(arena):
        memory.fill_(UNTOUCHED)


def snapshot(arena: KVArena) -> bytes:
    return b"".join(memory.numpy().tobytes() for memory in memories(arena))


def keep_states(arena: KVArena) -> None:
    """Make slots if a layer keeps a recurrent state."""
    arena.keep_states(NUM_SLOTS if any(spec.state for spec in arena.layers) else 0)


@dataclass
class Node:
    """One process' connector with its pool, a clock that the test moves, and what was released."""

    lane: Lane
    boot_id: str = BOOT_P
    block_size: int = 8
    num_blocks: int = 32
    dtype: str = "bfloat16"
    layers: tuple[LayerSpec, ...] = LAYERS
    digest: str = "model"
    secret: str = SECRET
    timing: Timing = field(default_factory=Timing)
    options: TransferOptions = EVERY_FRAME
    tp: tuple[int, int] = (1, 0)
    windowed: bool = False
    more_lanes: tuple[Lane, ...] = ()  # after `lane`
    clock: FakeClock = field(default_factory=FakeClock)

    def __post_init__(self) -> None:
        own = PoolFormat(self.block_size, self.dtype, *self.tp)
        local = tuple(
            replace(spec, kv_heads=len(heads_of(spec.kv_heads, own))) for spec in self.layers
        )
        size = (self.num_blocks, self.block_size, self.dtype)
        self.arena = pool_of(
            self.lane, self.boot_id, lambda memory: KVArena(local, *size, memory=memory)
        )
        keep_states(self.arena)
        self.released: list[tuple[KVHandle, Blocks, str]] = []
        self._freed = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self.connector = Connector(
            memory=ArenaMemory(self.arena, layers=self.layers, tp=self.tp, windowed=self.windowed),
            boot_id=self.boot_id,
            fingerprint=layout_fingerprint(self.digest, "rope", self.layers),
            secrets=fixed(self.secret),
            lanes=(self.lane, *self.more_lanes),
            timing=self.timing,
            clock=self.clock,
            on_released=self._on_released,
            options=self.options,
        )

    def _on_released(self, handle: KVHandle, blocks: Blocks, why: str) -> None:
        self.released.append((handle, blocks, why))
        self._loop.call_soon_threadsafe(self._freed.set)

    def pick(self, num_tokens: int, seed: int = 1) -> Blocks:
        """Enough blocks for `num_tokens`, scattered; a windowed pool holds what is still seen."""
        count = -(-num_tokens // self.block_size)
        windows = self.arena.groups.windows
        ids = random.Random(seed).sample(range(self.num_blocks), count * len(windows))
        held: list[HeldBlocks] = []
        for group, window in enumerate(windows):
            seen = first_visible(window, num_tokens) if self.windowed else 0
            first = seen // self.block_size
            own = tuple(ids[group * count : (group + 1) * count])
            held.append(HeldBlocks(own[first:], first))
        if self.arena.states is not None:
            held[0] = replace(held[0], state_slot=seed % NUM_SLOTS)
        return tuple(held)

    def publish_all(self, handle: KVHandle, upto: int | None = None) -> list[bool]:
        upto = handle.num_tokens if upto is None else upto
        return [self.connector.publish(handle, layer, upto) for layer in range(len(self.layers))]

    def finish(self, handle: KVHandle, tokens: Sequence[FirstToken] = ()) -> None:
        assert all(self.publish_all(handle))
        self.connector.complete(handle, tokens)

    async def freed(self, count: int = 1) -> None:
        """Wait until `count` exports have been released, and no more."""
        async with asyncio.timeout(PATIENCE_S):
            while len(self.released) < count:
                self._freed.clear()
                if len(self.released) < count:
                    await self._freed.wait()
        assert len(self.released) == count
        assert len({handle.export_seq for handle, _, _ in self.released}) == count
        if count == self.connector.stats.exports:
            assert self.connector.active_exports == 0
            assert self.connector.export_bytes == 0


def expect_bytes(
    source: tuple[Node, Blocks],
    target: tuple[Node, Blocks],
    start: int,
    end: int,
    before: bytes,
) -> None:
    """Tokens [start, end), as far as both keep them, and the recurrent state behind them are the
    source's, and every other byte of the target is as before."""
    (p, p_blocks), (d, d_blocks) = source, target
    expected = KVArena(d.layers, d.num_blocks, d.block_size, d.dtype)
    keep_states(expected)
    memory = ArenaMemory(expected)
    taken = 0
    for each in memories(expected):
        each.copy_(torch.frombuffer(bytearray(before), dtype=torch.uint8)[taken:][: each.numel()])
        taken += each.numel()
    for layer, spec in enumerate(d.layers):
        first = first_sent(spec, start, end, d.windowed)
        if end > first and spec.kv_heads:
            wire = layer_bytes(p.arena, layer, p_blocks, first, end)
            payload = Payload(memoryview(wire), p.dtype)
            memory.write(layer, d_blocks, first, end, payload)
        if spec.state is not None:
            assert p.arena.states is not None
            assert expected.states is not None
            source_slot, target_slot = p_blocks[0].state_slot, d_blocks[0].state_slot
            assert source_slot is not None
            assert target_slot is not None
            theirs = p.arena.states.layer_bytes(layer, source_slot)
            ours = expected.states.layer_bytes(layer, target_slot)
            for old, new in zip(ours, theirs, strict=True):
                old.copy_(new)
    assert snapshot(d.arena) == snapshot(expected)


def unreachable(handle: KVHandle) -> KVHandle:
    """The same handle with lanes that nobody listens on."""
    lanes = tuple(replace(lane, address="127.0.0.1:9") for lane in handle.endpoint.lanes)
    return replace(handle, endpoint=replace(handle.endpoint, lanes=lanes))


async def outcome(awaitable) -> KVError | None:
    """The KVError that `awaitable` raised, None if it succeeded."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            await awaitable
    except KVError as error:
        return error
    return None
