"""The contract of every lane, sixth part: damage on the way, over real block pools.

As test_contract_faults.py, from where the stage comes: each test proves by counters that its fault
has happened, that no wrong KV was used, and that free + used == total on both sides afterwards. All
rows of the table and their tests: docs/kv_transfer.md.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from baton.protocol.errors import KVCorrupt, KVStale
from baton.runtime.failpoints import FAILPOINTS, FailurePlan
from kv_transfer.protocol.frames import Kind
from tests.transfer import faults
from tests.transfer.cluster import FIRST, Cluster, frames_received, transfer_despite
from tests.transfer.conftest import KINDS
from tests.transfer.faults import FaultyLane
from tests.transfer.pools import PATIENCE_S, outcome
from tests.transfer.test_contract_faults import NUM_TOKENS, staged

DAMAGE: dict[str, Callable[[bytes], list[bytes]]] = {
    "bit flip": faults.flip_bit,
    "bit flip in the header": lambda frame: faults.flip_bit(frame, 8 * 20 + 3),
    "bit flip in the magic": lambda frame: faults.flip_bit(frame, 2),
    "truncation": faults.truncate,
    "truncation in the header": lambda frame: [frame[:20]],
    "replay": faults.repeat,
    "loss": faults.lose,
}
TOKEN_ID = bytes((3 << 3, FIRST[0].token_id))  # as END says it: a field's number and its value


@pytest.mark.parametrize("cluster", KINDS, indirect=True)
@pytest.mark.parametrize("damage", DAMAGE)
async def test_one_damaged_frame(cluster: Cluster, damage: str) -> None:
    """It is noticed, and the second try brings the right bytes."""
    async with staged(cluster) as stage:
        stage.lane.receiving = faults.on_nth(Kind.DATA, 1, DAMAGE[damage])
        handle = stage.p.export()
        stage.p.node.finish(handle, FIRST)
        await stage.succeeds(handle)
        stats = stage.d.node.connector.stats
        assert (stats.retries, stats.fetches, stats.failures) == (1, 1, {})


@pytest.mark.parametrize("cluster", KINDS, indirect=True)
@pytest.mark.parametrize("damage", DAMAGE)
async def test_every_frame_damaged(cluster: Cluster, damage: str) -> None:
    """Nothing is used; P keeps its blocks for somebody with a better link, until its lease ends."""
    async with staged(cluster) as stage:
        p, d = stage.p, stage.d
        stage.lane.receiving = faults.on_every(Kind.DATA, DAMAGE[damage])
        handle = p.export()
        p.node.finish(handle, FIRST)
        assert isinstance(await outcome(d.fetch(handle)), KVCorrupt)
        stats = d.node.connector.stats
        assert (stats.retries, stats.fetches, stats.failures) == (1, 0, {"kv_corrupt": 1})
        assert d.pool.num_used == 0
        assert p.node.connector.active_exports == 1
        p.node.clock.advance(p.node.timing.kv_lease_s)
        assert p.node.connector.expire(p.node.clock.monotonic()) == 1
        await p.node.freed()


@pytest.mark.parametrize("cluster", KINDS, indirect=True)
async def test_a_frame_leaves_damaged(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By the exporter's failpoint, in a parcel of its own: every lane carries it."""
    proof = tmp_path / "proof"
    monkeypatch.setattr(FAILPOINTS, "_plan", FailurePlan("kv.first:1:corrupt", proof))
    async with staged(cluster) as stage:
        p, stats = stage.p.node, stage.d.node.connector.stats
        handle = stage.p.export()
        fetch = asyncio.create_task(stage.succeeds(handle))
        assert p.connector.publish(handle, 0, NUM_TOKENS)
        await frames_received(stage.d.node, 1)
        p.finish(handle, FIRST)
        await fetch
        assert proof.read_text().endswith("kv.first 1 corrupt\n")
        own = stats.lanes[stage.lane.name]
        assert (own.corrupt, own.retries, own.fetches) == (1, 1, 1)


@pytest.mark.parametrize("cluster", ["memory", "stream-unix", "dist"], indirect=True)
@pytest.mark.parametrize("kind", [Kind.DATA, Kind.END])
async def test_what_is_looked_at_before_it_is_used(cluster: Cluster, kind: Kind) -> None:
    """KV in another precision, and END with its first tokens: neither goes straight into a pool.
    One bit is wrong, of a value or a token id, with which all can still be read."""

    def damage(frame: bytes) -> list[bytes]:
        at = len(frame) - 1 if kind is Kind.DATA else frame.index(TOKEN_ID) + 1
        return faults.flip_bit(frame, 8 * at)

    lane = FaultyLane(cluster.new_lane(), receiving=faults.on_nth(kind, 0, damage))
    p, d = await cluster.pair(lane, dtype="float32")
    await transfer_despite(p, d)
    stats = d.connector.stats
    assert (stats.retries, stats.corrupt, lane.num_in_pool) == (1, 1, 0)


@pytest.mark.parametrize("cluster", KINDS, indirect=True)
async def test_frames_of_two_layers_change_places(cluster: Cluster) -> None:
    """Each says what it is: they may come in any order."""
    async with staged(cluster) as stage:
        waiting: list[bytes] = []
        order: list[bytes] = []

        def swap(index: int, frame: bytes) -> list[bytes]:
            """The first two DATA frames, of two layers."""
            if faults.kind_of(frame) is not Kind.DATA or len(order) >= 2:
                return [frame]
            order.append(frame)
            if len(order) == 1:
                waiting.append(frame)
                return []
            return [frame, *waiting]

        stage.lane.receiving = swap
        handle = stage.p.export()
        stage.p.node.finish(handle, FIRST)
        await stage.succeeds(handle)
        assert len(order) == 2
        assert order[0] != order[1]
        assert stage.d.node.connector.stats.retries == 0


@pytest.mark.parametrize("cluster", KINDS, indirect=True)
async def test_frames_of_one_layer_change_places(cluster: Cluster) -> None:
    """The later rows first are refused, and the second try brings all of them."""
    async with staged(cluster) as stage:
        p, swap = stage.p.node, faults.SwapOfLayer(0)
        stage.lane.receiving = faults.on_every(Kind.DATA, swap)
        handle = stage.p.export()
        fetch = asyncio.create_task(stage.succeeds(handle))
        for upto, seen in ((NUM_TOKENS // 2, swap.holding), (NUM_TOKENS, swap.swapped)):
            assert p.connector.publish(handle, 0, upto)
            assert await asyncio.to_thread(seen.wait, PATIENCE_S)
        p.finish(handle, FIRST)
        await fetch
        stats = stage.d.node.connector.stats
        assert (stats.retries, stats.fetches, stats.failures) == (1, 1, {})


@pytest.mark.parametrize("cluster", KINDS, indirect=True)
async def test_frames_of_an_older_epoch(cluster: Cluster) -> None:
    """The very frames that were right for epoch 1, of the same export, are none of epoch 2's."""
    async with staged(cluster) as stage:
        p, d = stage.p, stage.d
        old: list[bytes] = []
        stage.lane.receiving = faults.on_every(Kind.DATA, lambda f: old.append(f) or [f])
        handle = p.export()
        p.node.finish(handle, FIRST)
        blocks = d.allocate()
        ready = await d.node.connector.fetch(handle, 1, blocks, hold=True)
        d.unref(blocks)
        replayed = 0

        def replay(frame: bytes) -> list[bytes]:
            nonlocal replayed
            replayed += 1
            return [old[(replayed - 1) % len(old)]]

        stage.lane.receiving = faults.on_every(Kind.DATA, replay)
        assert isinstance(await outcome(d.fetch(handle, 2)), KVCorrupt)
        assert replayed >= 2, "also the second try"
        stage.lane.receiving = faults.intact
        assert isinstance(await outcome(d.fetch(handle, 1)), KVStale), "epoch 2 has spoken"
        await stage.succeeds(handle, 2)
        assert ready.held is not None
        await ready.held.release()
