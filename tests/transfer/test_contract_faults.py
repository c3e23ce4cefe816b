"""The contract of every lane, fifth part: the fault table, over real block pools.

Each test proves that its fault has happened, that no wrong KV was used (a fetch succeeds with the
exporter's bytes or raises), and that on both sides every block is accounted for afterwards. Damage,
loss and reordering of single frames: test_fault_table.py. Real processes: test_processes.py.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest

from baton.engine.memory.block_pool import BlockPool
from baton.protocol.errors import KVCorrupt, KVError, KVLost, KVStale, KVTimeout
from baton.protocol.handles import KVHandle
from baton.runtime.timing import Timing
from kv_transfer.protocol.base import Blocks
from kv_transfer.protocol.frames import Kind
from kv_transfer.stats import TransferStats
from tests.block_lists import held
from tests.transfer import faults
from tests.transfer.cluster import FIRST, Cluster, frames_received
from tests.transfer.conftest import DIRECT, KINDS, WAYS
from tests.transfer.faults import SCATTERING, FaultyLane
from tests.transfer.pools import (
    BOOT_D,
    BOOT_E,
    PATIENCE_S,
    Node,
    expect_bytes,
    fill_random,
    outcome,
    request_of,
    snapshot,
)

NUM_TOKENS = 60
WIRES = (*WAYS, "stream-unix", "grpc")  # where frames pass a network, too
SHORT = Timing(kv_progress_s=0.8)  # long enough for a handshake on a busy machine


@dataclass
class Pooled:
    """A node and the pool that its blocks come from; `owned`: blocks by who holds them."""

    node: Node

    def __post_init__(self) -> None:
        self.pool = BlockPool(self.node.num_blocks, self.node.block_size)
        self.kept: list[Blocks] = []
        self._num_unpinned = 0

    def allocate(self) -> Blocks:
        blocks = self.pool.allocate(self.pool.blocks_for(NUM_TOKENS))
        assert blocks is not None
        return held(tuple(blocks))

    def unref(self, blocks: Blocks) -> None:
        for each in blocks:
            self.pool.unref(each.ids)

    def export(self, request_id: str = "r1", epoch: int = 1) -> KVHandle:
        request = request_of(request_id, epoch)
        return self.node.connector.export(request, 0, self.allocate(), NUM_TOKENS)

    async def fetch(self, handle: KVHandle, epoch: int = 1) -> Blocks:
        """As a decode node does: what is reserved is given back unless the fetch succeeds."""
        blocks = self.allocate()
        try:
            ready = await self.node.connector.fetch(handle, epoch, blocks)
        except BaseException:
            self.unref(blocks)
            raise
        assert ready.num_tokens == NUM_TOKENS
        self.kept.append(blocks)
        return blocks

    def exported(self, handle: KVHandle) -> Blocks:
        """The blocks of an export that is not released yet."""
        blocks = self.node.connector._table.blocks_of(handle.export_seq)
        assert blocks is not None
        return blocks

    def unpin(self) -> None:
        """What the engine thread does with released exports."""
        for _, blocks, _ in self.node.released[self._num_unpinned :]:
            self.unref(blocks)
        self._num_unpinned = len(self.node.released)

    def check(self) -> None:
        """free + used == total, and used is what fetches have brought."""
        self.unpin()
        self.pool.check({block: 1 for (own,) in self.kept for block in own.ids})

    def bytes_of(self, blocks: Blocks) -> list[bytes]:
        memory = self.node.connector.memory
        return [
            b"".join(memory.read(layer, blocks, 0, NUM_TOKENS))
            for layer in range(len(self.node.layers))
        ]


@dataclass
class Stage:
    """P with a prompt of known bytes, and D; `lane` is D's, for faults."""

    cluster: Cluster
    p: Pooled
    d: Pooled
    lane: FaultyLane

    async def another(self) -> Pooled:
        """A second decode node."""
        return Pooled(await self.cluster.node(boot_id=BOOT_E))

    async def succeeds(self, handle: KVHandle, epoch: int = 1, who: Pooled | None = None) -> None:
        """A fetch by D (or `who`) brings P's bytes and touches no others, P's blocks are free, and
        a lane that scatters has put them straight into D's pool."""
        p, d = self.p.node, who or self.d
        source, before = self.p.exported(handle), snapshot(d.node.arena)
        in_pool = self.lane.num_in_pool
        target = await d.fetch(handle, epoch)
        expect_bytes((p, source), (d.node, target), 0, NUM_TOKENS, before)
        await p.freed(p.connector.stats.exports)
        if p.lane.name in SCATTERING and d is self.d:
            assert self.lane.num_in_pool - in_pool >= len(p.layers)


@asynccontextmanager
async def staged(cluster: Cluster, **settings: object) -> AsyncIterator[Stage]:
    lane = FaultyLane(cluster.new_lane())
    p = Pooled(await cluster.node(num_blocks=16))
    fill_random(p.node.arena, 1)
    d = Pooled(await cluster.node(lane, boot_id=BOOT_D, num_blocks=20, **settings))
    yield Stage(cluster, p, d, lane)
    p.check()
    d.check()


# ---- memory that is reused too early ------------------------------------------------------------
@pytest.mark.parametrize("cluster", KINDS, indirect=True)
async def test_the_pool_is_churned_in_mid_transfer(cluster: Cluster) -> None:
    """The lease ends, the blocks go to another prompt, whose KV D never gets to see."""
    async with staged(cluster) as stage:
        p, d = stage.p, stage.d
        handle = p.export()
        fetch = asyncio.create_task(d.fetch(handle))
        assert p.node.connector.publish(handle, 0, NUM_TOKENS)
        await frames_received(d.node, 1)
        p.node.clock.advance(p.node.timing.kv_lease_s)
        assert p.node.connector.expire(p.node.clock.monotonic()) == 1
        await p.node.freed()
        p.unpin()
        other = p.allocate()  # the very blocks that are still being asked for
        fill_random(p.node.arena, 2)
        assert not p.node.connector.publish(handle, 1, NUM_TOKENS)
        assert isinstance(await outcome(fetch), KVStale)
        assert d.node.connector.stats.fetches == 0
        p.unref(other)


@pytest.mark.parametrize("cluster", DIRECT, indirect=True)
async def test_the_pool_is_churned_under_who_reads_it_himself(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The seqlock: garbage has been read, and the question after it brings it to light."""
    async with staged(cluster) as stage:
        p, d = stage.p, stage.d
        handle = p.export()
        p.node.finish(handle, FIRST)
        blocks = p.exported(handle)
        right = p.bytes_of(blocks)
        pulled, go_on = threading.Event(), threading.Event()
        received = TransferStats.received

        def wait_once(stats: TransferStats, lane: str, num_bytes: int) -> None:
            received(stats, lane, num_bytes)
            pulled.set()
            assert go_on.wait(PATIENCE_S)

        monkeypatch.setattr(TransferStats, "received", wait_once)
        fetch = asyncio.create_task(d.fetch(handle))
        assert await asyncio.to_thread(pulled.wait, PATIENCE_S)
        p.node.clock.advance(p.node.timing.kv_lease_s)
        p.node.connector.expire(p.node.clock.monotonic())
        await p.node.freed()
        fill_random(p.node.arena, 2)
        go_on.set()
        assert isinstance(await outcome(fetch), KVStale)
        assert d.node.connector.stats.frames_received == len(p.node.layers), "all was read"
        assert p.bytes_of(blocks) != right, "the pool was churned"
        assert d.node.connector.stats.fetches == 0


# ---- one side dies ------------------------------------------------------------------------------
@pytest.mark.parametrize("cluster", KINDS, indirect=True)
@pytest.mark.parametrize("percent", [25, 50, 75, 100])
async def test_p_goes_at_any_point(cluster: Cluster, percent: int) -> None:
    """All connections break at once, as when a process is killed."""
    async with staged(cluster) as stage:
        p, d = stage.p, stage.d
        handle = p.export()
        fetch = asyncio.create_task(d.fetch(handle))
        assert all(p.node.publish_all(handle, NUM_TOKENS * percent // 100))
        await frames_received(d.node, len(p.node.layers))
        await asyncio.to_thread(p.node.lane.stop)
        assert isinstance(await outcome(fetch), KVLost)
        assert d.pool.num_used == 0
        await p.node.connector.stop()


@pytest.mark.parametrize("cluster", KINDS, indirect=True)
@pytest.mark.parametrize("percent", [50, 100])
async def test_d_goes_and_another_takes_over(cluster: Cluster, percent: int) -> None:
    """P's blocks stay leased: no second prefill."""
    async with staged(cluster) as stage:
        p, d = stage.p, stage.d
        handle = p.export()
        fetch = asyncio.create_task(d.fetch(handle))
        assert all(p.node.publish_all(handle, NUM_TOKENS * percent // 100))
        await frames_received(d.node, len(p.node.layers))
        await d.node.connector.stop()
        assert isinstance(await outcome(fetch), KVLost)
        assert p.node.released == []
        p.node.finish(handle, FIRST)
        heir = await stage.another()
        await stage.succeeds(handle, epoch=2, who=heir)
        heir.check()


@pytest.mark.parametrize("cluster", KINDS, indirect=True)
async def test_a_cut_connection_costs_no_lease(cluster: Cluster) -> None:
    """The wire breaks in the middle; the same D fetches again."""

    def cut(index: int, frame: bytes) -> list[bytes]:
        raise KVLost("cut")

    async with staged(cluster) as stage:
        p, d = stage.p, stage.d
        handle = p.export()
        fetch = asyncio.create_task(d.fetch(handle))
        assert p.node.connector.publish(handle, 0, NUM_TOKENS)
        await frames_received(d.node, 1)
        stage.lane.receiving = cut
        assert p.node.connector.publish(handle, 1, NUM_TOKENS)
        assert isinstance(await outcome(fetch), KVLost)
        assert p.node.released == []
        stage.lane.receiving = faults.intact
        p.node.finish(handle, FIRST)
        await stage.succeeds(handle)


# ---- words that are lost ------------------------------------------------------------------------
@pytest.mark.parametrize("cluster", WIRES, indirect=True)
@pytest.mark.parametrize("kind", [Kind.END, Kind.ACK])
async def test_a_lost_last_word(cluster: Cluster, kind: Kind) -> None:
    """END lost: not received, whatever has arrived; ACK lost: received, and the lease cleans up."""
    timing = SHORT if kind is Kind.END else Timing()
    async with staged(cluster, timing=timing) as stage:
        p, d = stage.p, stage.d
        lost: list[bytes] = []

        def lose(frame: bytes) -> list[bytes]:
            lost.append(frame)
            return []

        stage.lane.receiving = stage.lane.sending = faults.on_every(kind, lose)
        handle = p.export()
        p.node.finish(handle, FIRST)
        error = await outcome(d.fetch(handle))
        assert isinstance(error, KVTimeout) if kind is Kind.END else error is None
        assert len(lost) == 1
        assert p.node.released == []
        p.node.clock.advance(p.node.timing.kv_lease_s)
        p.node.connector.expire(p.node.clock.monotonic())
        await p.node.freed()


@pytest.mark.parametrize("cluster", ["shm"], indirect=True)
async def test_a_lost_confirmation_is_no_success(cluster: Cluster) -> None:
    """A direct lane's last question goes unanswered: what was read is not used."""
    async with staged(cluster, timing=SHORT) as stage:
        p, d = stage.p, stage.d
        stage.lane.receiving = faults.on_every(Kind.CONFIRM, faults.lose)
        handle = p.export()
        p.node.finish(handle, FIRST)
        assert isinstance(await outcome(d.fetch(handle)), KVTimeout)
        assert d.node.connector.stats.frames_received == len(p.node.layers)
        stage.lane.receiving = faults.intact
        await stage.succeeds(handle)


# ---- words of somebody else ---------------------------------------------------------------------
SWAPS = [
    (lane, kind)
    for lane in WIRES
    for kind in (Kind.DATA, Kind.END, Kind.BLOCKS)
    if lane in DIRECT or kind is not Kind.BLOCKS
]


@pytest.mark.parametrize(("cluster", "kind"), SWAPS, indirect=["cluster"])
async def test_blocks_of_two_requests_are_swapped(cluster: Cluster, kind: Kind) -> None:
    """The other request's frames are authentic and whole; neither fetch takes them."""
    async with staged(cluster) as stage:
        p, d = stage.p, stage.d
        recorded: list[bytes] = []
        stage.lane.receiving = faults.on_every(kind, lambda f: recorded.append(f) or [f])
        for handle in (p.export("r1"), p.export("r2")):
            recorded.clear()  # the second one's stay
            p.node.finish(handle, FIRST)
            d.unref(await d.fetch(handle))
            d.kept.pop()
        await p.node.freed(2)
        p.unpin()
        handles = [p.export(f"r{i}") for i in (1, 2)]
        swapped = 0

        def other(frame: bytes) -> list[bytes]:
            nonlocal swapped
            swapped += 1
            return [recorded[(swapped - 1) % len(recorded)]]

        stage.lane.receiving = faults.on_every(kind, other)
        p.node.finish(handles[0], FIRST)
        assert isinstance(await outcome(d.fetch(handles[0])), KVCorrupt)
        assert swapped >= 2, "also the second try"
        stage.lane.receiving = faults.intact
        for handle in handles:
            p.node.finish(handle, FIRST)
            await d.fetch(handle)
        await p.node.freed(4)


@pytest.mark.parametrize("cluster", WIRES, indirect=True)
async def test_an_old_epochs_fetch_after_a_new_one(cluster: Cluster) -> None:
    """Also when it comes over the connection that the new one has just used."""
    async with staged(cluster) as stage:
        p, d = stage.p, stage.d
        handle = p.export()
        p.node.finish(handle, FIRST)
        blocks = d.allocate()
        ready = await d.node.connector.fetch(handle, 3, blocks, hold=True)
        d.unref(blocks)
        assert isinstance(await outcome(d.fetch(handle, 2)), KVStale)
        assert isinstance(await outcome(d.node.connector.renew(handle, 2)), KVStale)
        await d.node.connector.release(handle, "late", 2)
        assert p.node.released == []
        await stage.succeeds(handle, 3)
        assert ready.held is not None
        await ready.held.release()


@pytest.mark.parametrize("cluster", WIRES, indirect=True)
async def test_a_recorded_conversation_is_worth_nothing(cluster: Cluster) -> None:
    """The exporter's frames of one fetch, played to the next: another nonce, so another proof."""
    async with staged(cluster) as stage:
        p = stage.p
        recorded: list[bytes] = []

        def record(index: int, frame: bytes) -> list[bytes]:
            recorded.append(frame)
            return [frame]

        stage.lane.receiving = record
        handle = p.export()
        p.node.finish(handle, FIRST)
        await stage.succeeds(handle)
        heir = await stage.another()
        replay = iter(recorded)
        lane = FaultyLane(cluster.new_lane(), receiving=lambda i, f: [next(replay)])
        victim = Pooled(await cluster.node(lane, boot_id="1f" * 16, num_blocks=20))
        handle = p.export("r2")
        p.node.finish(handle, FIRST)
        error = await outcome(victim.fetch(handle))
        assert isinstance(error, KVError)
        assert "secret" in error.message
        await stage.succeeds(handle, who=heir)
        heir.check()
        victim.check()
