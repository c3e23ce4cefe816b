"""The contract of every lane, second half: leases, releases, dead peers, damage on the way."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace

import pytest

from baton.protocol.errors import KVLost, KVStale, KVTimeout
from baton.runtime.timing import Timing
from kv_transfer.connector import TransferOptions
from kv_transfer.protocol.frames import Kind
from kv_transfer.stats import TransferStats
from tests.transfer import faults
from tests.transfer.cluster import (
    FIRST,
    IMPATIENT,
    Cluster,
    frames_received,
    transfer_despite,
)
from tests.transfer.conftest import KINDS, TWO_SIDED, WAYS
from tests.transfer.faults import FaultyLane
from tests.transfer.pools import (
    BOOT_D,
    BOOT_E,
    PATIENCE_S,
    expect_bytes,
    fill_untouched,
    outcome,
    request_of,
    snapshot,
)


# ---- leases ------------------------------------------------------------------------------------
async def test_the_lease_ends_in_mid_stream(cluster: Cluster) -> None:
    p, d = await cluster.pair()
    handle = p.connector.export(request_of(), 0, p.pick(16), 16)
    fetch = asyncio.create_task(d.connector.fetch(handle, 1, d.pick(16)))
    assert p.connector.publish(handle, 0, 16)
    await frames_received(d, 1)
    p.clock.advance(p.timing.kv_lease_s)
    assert not p.connector.publish(handle, 1, 16)  # lapsed is over, also before anybody swept
    assert p.connector.expire(p.clock.monotonic()) == 1
    p.connector.complete(handle, FIRST)
    assert isinstance(await outcome(fetch), KVStale | KVTimeout)
    await p.freed()
    assert p.connector.stats.expired_leases == 1


@pytest.mark.parametrize("cluster", WAYS, indirect=True)
async def test_a_lapsed_lease_is_not_served_before_the_sweep(cluster: Cluster) -> None:
    p, d = await cluster.pair()
    handle = p.connector.export(request_of(), 0, p.pick(16), 16)
    p.finish(handle)
    p.clock.advance(p.timing.kv_lease_s)
    assert isinstance(await outcome(d.connector.fetch(handle, 1, d.pick(16))), KVStale)
    assert isinstance(await outcome(d.connector.renew(handle)), KVStale)


async def test_renewing_keeps_it(cluster: Cluster) -> None:
    p, d = await cluster.pair()
    target = d.pick(16)
    handle = p.connector.export(request_of(), 0, p.pick(16), 16)
    p.finish(handle)
    for _ in range(5):
        p.clock.advance(0.9 * p.timing.kv_lease_s)
        assert p.connector.expire(p.clock.monotonic()) == 0
        await d.connector.renew(handle)
    assert (await d.connector.fetch(handle, 1, target)).num_tokens == 16
    await p.freed()


@pytest.mark.parametrize("cluster", WAYS, indirect=True)
async def test_a_waiting_fetch_renews_by_itself(cluster: Cluster) -> None:
    """The lease is short, the exporter's clock runs ahead at each renewal that arrives."""
    p, d = await cluster.pair()
    handle = replace(p.connector.export(request_of(), 0, p.pick(16), 16), lease_ms=30)
    renewed = asyncio.Event()
    loop = asyncio.get_running_loop()
    table = p.connector._table
    renew = table.renew

    def spy(export_seq: int, secret: bytes, epoch: int) -> None:
        renew(export_seq, secret, epoch)
        loop.call_soon_threadsafe(renewed.set)

    table.renew = spy  # type: ignore[method-assign]
    fetch = asyncio.create_task(d.connector.fetch(handle, 1, d.pick(16)))
    for _ in range(3):
        renewed.clear()
        await asyncio.wait_for(renewed.wait(), PATIENCE_S)
        p.clock.advance(0.7 * p.timing.kv_lease_s)
        p.connector.expire(p.clock.monotonic())
        renewed.clear()
        await asyncio.wait_for(renewed.wait(), PATIENCE_S)
    p.finish(handle)
    assert (await fetch).num_tokens == 16
    await p.freed()


@pytest.mark.parametrize("cluster", WAYS, indirect=True)
async def test_an_unclaimed_export_is_freed_by_the_lease_watch(cluster: Cluster) -> None:
    """With the real timer of the connector and nothing but time."""
    p = await cluster.node(timing=Timing(kv_lease_s=0.05))
    blocks = p.pick(16)
    handle = p.connector.export(request_of(), 0, blocks, 16)
    p.clock.advance(0.05)
    await p.freed()
    assert p.released == [(handle, blocks, "the lease is over")]


# ---- release -----------------------------------------------------------------------------------
# On direct lanes the exporter reads nothing: test_direct.py.
@pytest.mark.parametrize("cluster", TWO_SIDED, indirect=True)
async def test_release_waits_for_the_reader(cluster: Cluster) -> None:
    p, d = await cluster.pair()
    reading, go_on = threading.Event(), threading.Event()
    memory = p.connector.memory
    read = memory.read

    def slow_read(*arguments: object) -> object:
        reading.set()
        assert go_on.wait(PATIENCE_S)
        return read(*arguments)  # type: ignore[arg-type]

    memory.read = slow_read  # type: ignore[method-assign]
    handle = p.connector.export(request_of(), 0, p.pick(16), 16)
    p.finish(handle)
    fetch = asyncio.create_task(d.connector.fetch(handle, 1, d.pick(16)))
    await asyncio.to_thread(reading.wait, PATIENCE_S)
    releases = [asyncio.create_task(p.connector.release(handle, "aborted")) for _ in range(2)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert p.released == []
    assert not any(task.done() for task in releases)
    assert not p.connector.publish(handle, 0, 16)
    go_on.set()
    await asyncio.gather(*releases)
    assert [why for _, _, why in p.released] == ["aborted"]
    # On `dist` the end of the pair may overtake the exporter's last word.
    assert isinstance(await outcome(fetch), KVStale | KVLost)
    await p.connector.release(handle, "again")
    await p.freed()


async def test_the_receiver_may_release_without_fetching(cluster: Cluster) -> None:
    p, d = await cluster.pair()
    handle = p.connector.export(request_of(), 0, p.pick(16), 16)
    await d.connector.release(handle, "cancelled")
    assert p.connector.active_exports == 0
    await d.connector.release(handle, "cancelled")
    await p.freed()


async def test_cancelling_a_fetch_leaves_blocks_and_lease_alone(cluster: Cluster) -> None:
    p, d = await cluster.pair()
    target = d.pick(16)
    handle = p.connector.export(request_of(), 0, p.pick(16), 16)
    fetch = asyncio.create_task(d.connector.fetch(handle, 1, target))
    assert p.connector.publish(handle, 0, 16)
    await frames_received(d, 1)
    fetch.cancel()
    with pytest.raises(asyncio.CancelledError):
        await fetch
    before = snapshot(d.arena)
    p.finish(handle)
    assert (await d.connector.fetch(handle, 2, d.pick(16, 7))).num_tokens == 16
    await p.freed()
    assert snapshot(d.arena) != before


@pytest.mark.parametrize("cluster", KINDS, indirect=True)
async def test_a_cancelled_fetch_ends_only_when_its_thread_has_left_the_blocks(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread stands still in the middle: it has written one layer and will look for more."""
    p, d = await cluster.pair()
    loop, writing, go_on = asyncio.get_running_loop(), asyncio.Event(), threading.Event()
    received = TransferStats.received

    def wait_here(stats: TransferStats, lane: str, num_bytes: int) -> None:
        received(stats, lane, num_bytes)
        loop.call_soon_threadsafe(writing.set)
        assert go_on.wait(PATIENCE_S)

    monkeypatch.setattr(TransferStats, "received", wait_here)
    handle = p.connector.export(request_of(), 0, p.pick(16), 16)
    p.finish(handle)
    fetch = asyncio.create_task(d.connector.fetch(handle, 1, d.pick(16)))
    await asyncio.wait_for(writing.wait(), PATIENCE_S)
    for _ in range(2):  # an impatient caller cancels twice
        fetch.cancel()
        done, _ = await asyncio.wait([fetch], timeout=0.05)
        assert not done
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await fetch
    before = snapshot(d.arena)
    await d.connector.stop()  # joins the threads of the data plane
    assert snapshot(d.arena) == before
    assert d.connector.stats.frames_received >= 1


async def test_a_second_receiver_after_the_first_has_died(cluster: Cluster) -> None:
    p, dead = await cluster.pair()
    heir = await cluster.node(boot_id=BOOT_E)
    fill_untouched(heir.arena)
    source, target = p.pick(40), heir.pick(40, 4)
    handle = p.connector.export(request_of(), 0, source, 40)
    fetch = asyncio.create_task(dead.connector.fetch(handle, 1, dead.pick(40)))
    assert p.connector.publish(handle, 0, 40)
    await frames_received(dead, 1)
    await dead.connector.stop()
    assert isinstance(await outcome(fetch), KVLost)
    assert p.released == []
    p.finish(handle, FIRST)
    before = snapshot(heir.arena)
    ready = await heir.connector.fetch(handle, 2, target)
    assert ready.first_tokens == FIRST
    expect_bytes((p, source), (heir, target), 0, 40, before)
    await p.freed()


# ---- the exporter fails -------------------------------------------------------------------------
async def test_the_exporter_goes_in_mid_stream(cluster: Cluster) -> None:
    p, d = await cluster.pair()
    handle = p.connector.export(request_of(), 0, p.pick(16), 16)
    fetch = asyncio.create_task(d.connector.fetch(handle, 1, d.pick(16)))
    assert p.connector.publish(handle, 0, 16)
    await frames_received(d, 1)
    await asyncio.to_thread(p.lane.stop)
    assert isinstance(await outcome(fetch), KVLost)
    assert isinstance(await outcome(d.connector.fetch(handle, 1, d.pick(16))), KVLost)
    assert isinstance(await outcome(d.connector.renew(handle)), KVLost)
    await d.connector.release(handle, "gone anyway")


async def test_stopping_the_exporter_frees_everything(cluster: Cluster) -> None:
    p, d = await cluster.pair()
    handle = p.connector.export(request_of(), 0, p.pick(16), 16)
    fetch = asyncio.create_task(d.connector.fetch(handle, 1, d.pick(16)))
    assert p.connector.publish(handle, 0, 16)
    await frames_received(d, 1)
    await p.connector.stop()
    await p.connector.stop()
    assert isinstance(await outcome(fetch), KVLost)
    assert [why for _, _, why in p.released] == ["exporter stops"]


@pytest.mark.parametrize("cluster", KINDS, indirect=True)
async def test_a_silent_exporter_is_a_timeout(cluster: Cluster) -> None:
    """Nothing comes, not even a sign of life: the answer to FETCH is lost on the way."""
    swallow = faults.on_every(Kind.HELLO, faults.lose)
    lane = FaultyLane(cluster.new_lane(), receiving=swallow)
    p, d = await cluster.pair(lane, timing=IMPATIENT)
    handle = p.connector.export(request_of(), 0, p.pick(16), 16)
    assert isinstance(await outcome(d.connector.fetch(handle, 1, d.pick(16))), KVTimeout)
    assert p.connector.active_exports == 1


@pytest.mark.parametrize("cluster", ["memory", "grpc", "stream-unix"], indirect=True)
async def test_a_slow_prefill_is_no_timeout(cluster: Cluster) -> None:
    """The exporter gives signs of life while it computes."""
    p = await cluster.node(timing=IMPATIENT)
    alive = asyncio.Event()
    count, loop = 0, asyncio.get_running_loop()

    def watch(index: int, frame: bytes) -> list[bytes]:
        nonlocal count
        count += faults.kind_of(frame) is Kind.CONFIRM
        if count == 6:  # twice the progress deadline
            loop.call_soon_threadsafe(alive.set)
        return [frame]

    lane = FaultyLane(cluster.new_lane(), receiving=watch)
    d = await cluster.node(lane, boot_id=BOOT_D, timing=IMPATIENT)
    handle = p.connector.export(request_of(), 0, p.pick(16), 16)
    fetch = asyncio.create_task(d.connector.fetch(handle, 1, d.pick(16)))
    await asyncio.wait_for(alive.wait(), PATIENCE_S)
    assert not fetch.done()
    p.finish(handle)
    assert (await fetch).num_tokens == 16
    await p.freed()


@pytest.mark.parametrize("cluster", KINDS, indirect=True)
@pytest.mark.parametrize("start", [0, 80])
async def test_a_prefill_that_gets_on_slowly_gives_signs_of_life(
    cluster: Cluster, start: int
) -> None:
    """What is published is below a burst, or nothing that this fetcher wants (`start`): it hears
    from the exporter all the same. Each step of the prefill waits for the sign before."""
    p = await cluster.node(timing=IMPATIENT, options=TransferOptions(burst_bytes=1 << 30))
    signs = asyncio.Semaphore(0)
    loop = asyncio.get_running_loop()

    def heard(index: int, frame: bytes) -> list[bytes]:
        if faults.kind_of(frame) in (Kind.CONFIRM, Kind.DATA):
            loop.call_soon_threadsafe(signs.release)
        return [frame]

    patient = Timing(kv_progress_s=PATIENCE_S)
    d = await cluster.node(
        FaultyLane(cluster.new_lane(), receiving=heard), boot_id=BOOT_D, timing=patient
    )
    handle = p.connector.export(request_of(), 0, p.pick(80), 80)
    fetch = asyncio.create_task(d.connector.fetch(handle, 1, d.pick(80, 2), start))
    async with asyncio.timeout(PATIENCE_S / 2):
        for upto in range(1, 5):
            assert all(p.publish_all(handle, upto))
            await signs.acquire()
    p.finish(handle)
    assert (await fetch).num_tokens == 80
    await p.freed()


# ---- damage on the way; of what the exporter says: test_fault_table.py --------------------------
@pytest.mark.parametrize("cluster", WAYS, indirect=True)
@pytest.mark.parametrize("kind", [Kind.HELLO, Kind.FETCH])
async def test_a_damaged_question_is_asked_again(cluster: Cluster, kind: Kind) -> None:
    fault = faults.on_nth(kind, 0, faults.flip_bit)
    p, d = await cluster.pair(FaultyLane(cluster.new_lane(), sending=fault))
    await transfer_despite(p, d)
    assert p.connector.stats.corrupt == 1
