"""Nodes of the connectors' state machine, of which every byte is foreseen.

A `Shadowed` node takes its blocks from a real BlockPool and keeps a twin of its arena: what the
machine writes goes into both, what a fetch should bring goes into the twin alone, and `check` wants
them equal but for blocks that a fetch is writing right now. An `Offer` is one export with what is
known of its lease and its epochs, a `Fetch` knows which ends of it would be right. Not here: any
choice (test_machine.py).
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import torch
from hypothesis import strategies as st

from baton.engine.memory.block_pool import BlockPool
from baton.engine.memory.kv_cache import KVArena
from baton.protocol.errors import KVCorrupt, KVLost, KVStale
from baton.protocol.events import FirstToken
from baton.protocol.handles import KVHandle
from baton.protocol.kv_spec import DTYPE_BYTES, HeldBlocks, LayerSpec, first_visible
from baton.runtime.timing import Timing
from kv_transfer.exports import Reader
from kv_transfer.lanes.memory import MemoryFabric, MemoryLane
from kv_transfer.lanes.shm_arena import ShmArena
from kv_transfer.lanes.stream import StreamLane, StreamLaneOptions
from kv_transfer.pool.layout import ArenaMemory
from kv_transfer.protocol.base import Blocks, KVMemory, Lane, Payload
from kv_transfer.protocol.frames import Kind
from kv_transfer.protocol.shares import first_sent
from kv_transfer.stats import NO_LANE
from tests.transfer.direct_lanes import shm_lane
from tests.transfer.faults import kind_of
from tests.transfer.pools import PATIENCE_S, Node, fill_random, request_of

MAX_TOKENS = 40


@lru_cache(256)
def kv_of(number: int, layer: int, spec: LayerSpec, dtype: str) -> tuple[bytes, bytes]:
    """K and V rows of the tokens of export `number`: no two exports have a row in common."""
    generator = torch.Generator().manual_seed(1000 * number + layer)
    width = spec.kv_heads * DTYPE_BYTES[dtype]
    sizes = (MAX_TOKENS * width * dim for dim in (spec.k_dim, spec.v_dim))
    k, v = (torch.randint(0, 256, (n,), dtype=torch.uint8, generator=generator) for n in sizes)
    return k.numpy().tobytes(), v.numpy().tobytes()


class Gate:
    """Where a node's fetches can be held up, in front of any of the frames that bring something.
    A faults.Fault that also damages the next few DATA frames when told to."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._passes: int | None = None  # frames let through from now on; None = all
        self._damages: list[Callable[[bytes], list[bytes]]] = []
        self.num_damaged = 0
        self.num_standing = 0

    def close(self, after: int) -> None:
        with self._changed:
            self._passes = after

    def open(self) -> None:
        with self._changed:
            self._passes = None
            self._changed.notify_all()

    def wait_standing(self) -> bool:
        """Until a fetch stands here; False if the gate is open. Blocks."""
        with self._changed:
            stands = self._changed.wait_for(
                lambda: self.num_standing or self._passes is None, PATIENCE_S
            )
            assert stands, "nobody comes"
            return self.num_standing > 0

    def damage(self, how: Callable[[bytes], list[bytes]], count: int) -> None:
        with self._changed:
            self._damages = [how] * count

    def receive(self, index: int, frame: bytes) -> list[bytes]:
        kind = kind_of(frame)
        if kind not in (Kind.DATA, Kind.END):
            return [frame]
        with self._changed:
            self.num_standing += 1
            self._changed.notify_all()
            passed = self._changed.wait_for(lambda: self._passes != 0, PATIENCE_S)
            self.num_standing -= 1
            assert passed, "nobody has opened the gate"
            if self._passes is not None:
                self._passes -= 1
            if kind is Kind.DATA and self._damages:
                self.num_damaged += 1
                return self._damages.pop()(frame)
        return [frame]


@dataclass(eq=False)
class Shadowed:
    """`gate`: of a fetching node that has one. Only the machine's thread calls the methods."""

    node: Node
    gate: Gate = field(default_factory=Gate)

    def __post_init__(self) -> None:
        node = self.node
        self.pool = BlockPool(node.num_blocks, node.block_size)
        self._twin = KVArena(node.layers, node.num_blocks, node.block_size, node.dtype)
        self._foreseen = ArenaMemory(self._twin, windowed=node.windowed)
        fill_random(node.arena, 1)
        self._twin.buffer()[:] = node.arena.buffer()

    def allocate(self, num_tokens: int) -> Blocks | None:
        """Blocks for a sequence; a windowed pool holds what is still seen. None: no room."""
        count, lists = self.pool.blocks_for(num_tokens), list[HeldBlocks]()
        for window in self.node.arena.groups.windows:
            seen = first_visible(window, num_tokens) if self.node.windowed else 0
            first = seen // self.pool.block_size
            ids = self.pool.allocate(count - first)
            if ids is None:
                self.free(tuple(lists))
                return None
            lists.append(HeldBlocks(tuple(ids), first))
        return tuple(lists)

    def free(self, blocks: Blocks) -> None:
        for each in blocks:
            self.pool.unref(each.ids)

    def scribble(self, ids: Iterable[int], seed: int) -> None:
        """Other bytes into these blocks, as when somebody else's prompt is computed there."""
        own = list(ids)
        if not own:
            return
        generator = torch.Generator().manual_seed(seed)
        for pages in (self._pages(self.node.arena), self._pages(self._twin)):
            generator.manual_seed(seed)
            shape = (len(own), pages.shape[1])
            pages[own] = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)

    def churn(self, seed: int) -> None:
        """Every free block goes to somebody else and comes back."""
        ids = self.pool.allocate(self.pool.num_free)
        assert ids is not None
        self.scribble(ids, seed)
        self.pool.unref(ids[seed % (len(ids) + 1) :])
        self.pool.unref(ids[: seed % (len(ids) + 1)])

    def compute(self, number: int, layer: int, blocks: Blocks, start: int, end: int) -> None:
        """The forward pass of export `number`: KV of tokens [start, end), as far as it is kept."""
        start = max(start, self._held_from(layer, blocks))
        for memory in (self.node.connector.memory, self._foreseen):
            self._write(memory, number, layer, blocks, (start, end))

    def foresee(self, number: int, blocks: Blocks, start: int, end: int) -> None:
        """What a fetch of [start, end) has to leave behind."""
        for layer, spec in enumerate(self.node.layers):
            first = first_sent(spec, start, end, self.node.windowed)
            self._write(self._foreseen, number, layer, blocks, (first, end))

    def check(self, owned: list[Blocks], in_flight: list[Blocks]) -> None:
        """free + used == total, each block has one owner, and no byte is other than foreseen."""
        everything = [*owned, *in_flight]
        ids = [block for blocks in everything for each in blocks for block in each.ids]
        assert self.pool.num_free + self.pool.num_used == self.pool.num_blocks
        self.pool.check(dict.fromkeys(ids, 1))
        assert len(ids) == len(set(ids)), "two owners"
        wrong = (self._pages(self.node.arena) != self._pages(self._twin)).any(dim=1)
        wrong[[block for blocks in in_flight for each in blocks for block in each.ids]] = False
        assert not wrong.any(), f"blocks {wrong.nonzero().flatten().tolist()}: foreign bytes"

    def _held_from(self, layer: int, blocks: Blocks) -> int:
        return blocks[self.node.arena.group_of[layer]].first * self.pool.block_size

    def _write(
        self, memory: KVMemory, number: int, layer: int, blocks: Blocks, tokens: tuple[int, int]
    ) -> None:
        spec, dtype, (start, end) = self.node.layers[layer], self.node.dtype, tokens
        if end <= start:
            return
        rows = b""
        for part in kv_of(number, layer, spec, dtype):
            row = len(part) // MAX_TOKENS
            rows += part[start * row : end * row]
        memory.write(layer, blocks, start, end, Payload(memoryview(rows), dtype))

    def _pages(self, arena: KVArena) -> torch.Tensor:
        flat = torch.frombuffer(arena.buffer(), dtype=torch.uint8)
        return flat.view(arena.num_blocks, arena.page_bytes)


@dataclass(eq=False)
class Exporting(Shadowed):
    """One life of an exporting node: from its start under a new boot id to its end."""

    alive: bool = True
    num_unpinned: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.offers: dict[int, Offer] = {}
        self.admitted = asyncio.Event()
        table, loop = self.node.connector._table, asyncio.get_running_loop()
        admit = table.open

        def spy(
            export_seq: int, secret: bytes, request_id: str, epoch: int, lane: str = NO_LANE
        ) -> Reader:
            reader = admit(export_seq, secret, request_id, epoch, lane)
            loop.call_soon_threadsafe(self._on_admitted, export_seq, epoch)
            return reader

        table.open = spy  # type: ignore[method-assign]

    def _on_admitted(self, export_seq: int, epoch: int) -> None:
        self.offers[export_seq].hear(epoch)
        self.admitted.set()

    def export(self, number: int, request_id: str, epoch: int, num_tokens: int) -> Offer | None:
        blocks = self.allocate(num_tokens)
        if blocks is None:
            return None
        handle = self.node.connector.export(request_of(request_id, epoch), 0, blocks, num_tokens)
        offer = Offer(number, self, handle, blocks)
        for other in self.offers.values():
            if other.handle.request_id == request_id:
                other.hear(epoch)
                offer.epoch_tried = max(offer.epoch_tried, other.epoch_tried)
        assert handle.export_seq not in self.offers, "a number was given twice"
        self.offers[handle.export_seq] = offer
        return offer

    def tried(self, request_id: str, epoch: int) -> None:
        """Somebody speaks for this epoch; whether he is heard is not known."""
        for offer in self.offers.values():
            if offer.handle.request_id == request_id:
                offer.epoch_tried = max(offer.epoch_tried, epoch)

    def unpin(self) -> None:
        """What the engine thread does with released exports: each is told of once."""
        for handle, blocks, why in self.node.released[self.num_unpinned :]:
            offer = self.offers[handle.export_seq]
            assert (handle, blocks) == (offer.handle, offer.blocks)
            assert not offer.unpinned, "released twice"
            assert offer.may_end, f"released for no reason: {why}"
            offer.unpinned = True
            self.free(blocks)
            self.num_unpinned += 1

    async def die(self) -> None:
        for offer in self.offers.values():
            offer.may_end = True
        connector = self.node.connector
        await connector.stop()
        self.alive = False
        assert (connector.active_exports, connector.export_bytes) == (0, 0)
        assert all(offer.ended for offer in self.offers.values())
        self.unpin()
        assert self.pool.num_used == 0

    def pinned(self) -> list[Blocks]:
        return [offer.blocks for offer in self.offers.values() if not offer.unpinned]


@dataclass(eq=False)
class Offer:
    """One export. The fence is at least `epoch_heard`, at most `epoch_tried`, while it lives; who
    waits for progress is told of it at once."""

    number: int
    home: Exporting
    handle: KVHandle
    blocks: Blocks
    epoch_heard: int = 0
    epoch_tried: int = 0
    done: bool = False  # all published, and completed
    may_end: bool = False  # somebody has asked for its end, or may have
    num_claims: int = 0  # fetches that acknowledge if they end well, releases by a receiver
    unpinned: bool = False

    def __post_init__(self) -> None:
        self.upto = [0] * len(self.home.node.layers)
        self.renewed()
        self.hear(self.handle.epoch)

    @property
    def first_tokens(self) -> tuple[FirstToken, ...]:
        return (FirstToken(3, self.number),)

    def hear(self, epoch: int) -> None:
        """Of an epoch of the request, by an export, a fetch or a renewal."""
        self.epoch_heard = max(self.epoch_heard, epoch)
        self.epoch_tried = max(self.epoch_tried, epoch)

    def renewed(self) -> None:
        self._until = self.home.node.clock.now + self.home.node.timing.kv_lease_s

    @property
    def lapsed(self) -> bool:
        return self.home.node.clock.now >= self._until

    @property
    def ended(self) -> bool:
        """on_released has fired."""
        released = self.home.node.released
        return any(handle.export_seq == self.handle.export_seq for handle, _, _ in released)

    @property
    def servable(self) -> bool:
        """As far as is known it may be read; who reads it is another question."""
        return self.home.alive and not self.lapsed and not self.ended

    def publish(self, layer: int, upto: int) -> None:
        """Compute and publish; the answer must be the lease's."""
        if self.unpinned or upto <= self.upto[layer]:
            return
        self.home.compute(self.number, layer, self.blocks, self.upto[layer], upto)
        held = self.home.node.connector.publish(self.handle, layer, upto)
        if held:
            assert not self.lapsed, "published under a lease that is over"
            self.upto[layer] = upto
            self.renewed()
        else:
            assert self.lapsed or self.may_end, "an export that is held was given up"

    def complete(self) -> None:
        for layer in range(len(self.upto)):
            self.publish(layer, self.handle.num_tokens)
        if min(self.upto) == self.handle.num_tokens:
            self.home.node.connector.complete(self.handle, self.first_tokens)
            self.done = True

    async def freed(self) -> None:
        """Wait, without polling, until on_released has fired."""
        node = self.home.node
        async with asyncio.timeout(PATIENCE_S):
            while not self.ended:
                node._freed.clear()
                if not self.ended:
                    await node._freed.wait()


@dataclass(frozen=True, slots=True)
class Ask:
    """How a fetch is asked for. `newer`: epochs above the handle's. `misled`: sent to who is where
    a dead exporter was. `waits`: until it is admitted, or has ended."""

    who: int = 0
    start: int = 0
    newer: int = 0
    hold: bool = False
    misled: bool = False
    waits: bool = True


@dataclass(eq=False)
class Fetch:
    offer: Offer
    who: Shadowed
    epoch: int
    start: int
    blocks: Blocks
    hold: bool
    misled: bool
    num_damaged: int  # frames by the time it started
    may_return: bool = False
    cancelled: bool = False

    def notice(self) -> None:
        """Whether there is a moment at which it may be told that all is well."""
        offer = self.offer
        if offer.done and offer.servable and offer.epoch_heard <= self.epoch and not self.misled:
            self.may_return = True

    @property
    def must_end(self) -> bool:
        """It has nothing to wait for."""
        offer = self.offer
        return offer.done or offer.ended or offer.epoch_heard > self.epoch or self.misled

    def explains(self, error: BaseException) -> bool:
        offer = self.offer
        match error:
            case KVStale():
                others = offer.num_claims - (not self.hold)
                over = offer.ended or offer.lapsed or others > 0
                return over or self.misled or offer.epoch_tried > self.epoch
            case KVLost():
                return not offer.home.alive
            case KVCorrupt():
                return self.who.gate.num_damaged >= self.num_damaged + 2
            case _:
                return False


class Stage:
    """Makes the nodes on one kind of lane. `directory`: of arenas and sockets."""

    def __init__(self, kind: str, directory: Path, timing: Timing) -> None:
        self.kind = kind
        self.memory_lanes: list[MemoryLane] = []
        self.lives: list[Exporting] = []  # of exporters, ended ones too
        self._directory = directory
        self._timing = timing
        self._fabric = MemoryFabric()
        self._arenas: list[ShmArena] = []

    def _memory(self) -> MemoryLane:
        self.memory_lanes.append(MemoryLane(self._fabric))
        return self.memory_lanes[-1]

    def lane(self) -> Lane:
        if self.kind == "memory":
            return self._memory()
        if self.kind == "shm":
            return shm_lane(self._memory, self._directory, self._arenas)
        return StreamLane(self._timing, StreamLaneOptions(tcp=False))

    async def node(self, lane: Lane, boot_id: str, shape: Mapping[str, object]) -> Node:
        node = Node(lane, boot_id, timing=self._timing, **shape)  # type: ignore[arg-type]
        await node.connector.start()
        return node

    async def exporter(self, shape: Mapping[str, object]) -> Exporting:
        """Under a boot id that nobody has had."""
        boot_id = f"{len(self.lives) + 1:032x}"
        self.lives.append(Exporting(await self.node(self.lane(), boot_id, shape)))
        return self.lives[-1]

    def close(self) -> None:
        for arena in self._arenas:
            arena.close()
        for lane in self.memory_lanes:
            assert (lane._active, lane._outgoing) == ({}, set()), "conversations are left"


ASK = st.builds(
    Ask,
    who=st.integers(0, 1),
    start=st.sampled_from((0, 0, 0, 3, 17, MAX_TOKENS)),
    newer=st.integers(-1, 2),
    hold=st.booleans(),
    misled=st.booleans(),
    waits=st.booleans(),
)
