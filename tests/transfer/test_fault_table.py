"""The contract of every lane, sixth part: damage on the way, over real block pools.

As test_contract_faults.py, from where the stage comes: each test proves by counters that its fault
has happened, that no wrong KV was used, and that free + used == total on both sides afterwards. All
rows of the table and their tests: docs/kv_transfer.md.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from baton.errors import KVCorrupt, KVStale
from kv_transfer.frames import Kind
from tests.transfer import faults
from tests.transfer.cluster import FIRST, Cluster
from tests.transfer.conftest import KINDS
from tests.transfer.pools import outcome
from tests.transfer.test_contract_faults import staged

DAMAGE: dict[str, Callable[[bytes], list[bytes]]] = {
    "bit flip": faults.flip_bit,
    "bit flip in the header": lambda frame: faults.flip_bit(frame, 8 * 20 + 3),
    "truncation": faults.truncate,
    "replay": faults.repeat,
    "loss": faults.lose,
}


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
async def test_frames_of_two_layers_change_places(cluster: Cluster) -> None:
    """Each says what it is: they may come in any order. (Two of one layer may not:
    test_contract_failures.py.)"""
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
