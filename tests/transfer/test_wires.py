"""Kept connections and measured links: when they are used, dropped, or believed."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest

from baton.protocol.errors import InternalError, KVLost
from baton.protocol.handles import LaneAddress
from baton.protocol.kv_spec import PoolFormat
from baton.runtime.rotation.deployment_secret import fixed
from baton.runtime.timing import Timing
from kv_transfer.lanes.memory import MemoryFabric, MemoryLane
from kv_transfer.lanes.wires import KEPT_PER_PEER, WirePool
from kv_transfer.links import FAST_LINK, MIN_BYTES, PROBE_EVERY, LinkSpeeds
from kv_transfer.protocol.base import Serve, Wire
from kv_transfer.protocol.identity import Identity, Side
from tests.fakes import FakeClock
from tests.transfer.cluster import FIRST, transfer
from tests.transfer.pools import (
    BOOT_D,
    HYBRID,
    Node,
    fill_random,
    fill_untouched,
    outcome,
    request_of,
)

HELLO = Identity("0a" * 16, "f", PoolFormat(8, "float32"), fixed("s")).hello(
    Side.EXPORTER, b"P" * 16, b"D" * 16
)
KEY = ("memory", "here", "0a" * 16)
IDLE_S = 10.0


@dataclass
class FakeWire:
    finished: int = 0

    def send(self, parcel: bytes) -> None:
        raise AssertionError("nobody speaks here")

    def receive(self) -> bytes | None:
        raise AssertionError("nobody listens here")

    def finish(self) -> None:
        self.finished += 1

    def cancel(self) -> None:
        raise AssertionError("nothing is broken here")


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def pool(clock: FakeClock) -> WirePool:
    return WirePool(clock, IDLE_S)


def test_the_youngest_is_taken_first_and_once(pool: WirePool) -> None:
    wires = [FakeWire(), FakeWire()]
    for wire in wires:
        pool.give(KEY, wire, HELLO)
    taken = [pool.take(KEY), pool.take(KEY), pool.take(KEY)]
    assert [kept.wire for kept in taken if kept] == [wires[1], wires[0]]
    assert taken[0] is not None
    assert taken[0].peer is HELLO
    assert pool.take(("grpc", *KEY[1:])) is None


def test_idle_ones_are_dropped_in_time(pool: WirePool, clock: FakeClock) -> None:
    old, young = FakeWire(), FakeWire()
    pool.give(KEY, old, HELLO)
    clock.advance(0.6 * IDLE_S)
    pool.give(KEY, young, HELLO)
    clock.advance(0.4 * IDLE_S)
    assert pool.take(("memory", "elsewhere", "0b" * 16)) is None, "any look prunes all peers"
    assert (old.finished, young.finished) == (1, 0)
    kept = pool.take(KEY)
    assert kept is not None
    assert kept.wire is young


def test_nobody_has_to_come_for_the_old_ones_to_go(pool: WirePool, clock: FakeClock) -> None:
    """They may hold what a dead peer has left: memory, over lane shm."""
    wire = FakeWire()
    pool.give(KEY, wire, HELLO)
    pool.drop_old()
    assert not wire.finished
    clock.advance(IDLE_S)
    pool.drop_old()
    assert wire.finished == 1


def test_no_more_than_a_few_are_kept(pool: WirePool) -> None:
    wires = [FakeWire() for _ in range(KEPT_PER_PEER + 2)]
    for wire in wires:
        pool.give(KEY, wire, HELLO)
    assert sum(wire.finished for wire in wires) == 2


def test_a_closed_pool_keeps_nothing(pool: WirePool) -> None:
    wires = [FakeWire(), FakeWire()]
    pool.give(KEY, wires[0], HELLO)
    pool.close()
    pool.close()
    pool.give(KEY, wires[1], HELLO)
    assert [wire.finished for wire in wires] == [1, 1]
    assert pool.take(KEY) is None


# ---- a kept connection that is dead -------------------------------------------------------------
@dataclass
class HangUpLane:
    """A memory lane whose connections can be hung up on from outside."""

    inner: MemoryLane
    wires: list[Wire] = field(default_factory=list[Wire])
    name: str = "memory"
    direct: bool = False

    def start(self, boot_id: str, serve: Serve) -> LaneAddress:
        return self.inner.start(boot_id, serve)

    def reaches(self, address: LaneAddress) -> bool:
        return True

    def open(self, address: LaneAddress) -> Wire:
        self.wires.append(self.inner.open(address))
        return self.wires[-1]

    def stop(self) -> None:
        self.inner.stop()


async def test_a_connection_that_died_while_it_was_kept() -> None:
    """Nobody notices but the counters: the conversation begins again on a fresh one."""
    fabric = MemoryFabric()
    lane = HangUpLane(MemoryLane(fabric))
    p, d = Node(MemoryLane(fabric)), Node(lane, boot_id=BOOT_D)
    for node in (p, d):
        await node.connector.start()
    fill_random(p.arena, 1)
    fill_untouched(d.arena)
    await transfer(p, d, 16)
    lane.wires[0].cancel()
    await transfer(p, d, 16)
    stats = d.connector.stats.lanes["memory"]
    assert (stats.connections, stats.reused, stats.fallbacks) == (2, 1, 0)
    assert len(lane.wires) == 2
    # A fresh one that fails is a failure: there is nothing better to try.
    await asyncio.to_thread(p.lane.stop)
    handle = p.connector.export(request_of("r9"), 0, p.pick(8), 8)
    p.finish(handle, FIRST)
    assert isinstance(await outcome(d.connector.fetch(handle, 1, d.pick(8))), KVLost)
    for node in (p, d):
        await node.connector.stop()


async def test_an_idle_connection_is_hung_up_on_by_the_exporter() -> None:
    """A fetcher that forgets does not keep a thread of the exporter for ever."""
    fabric = MemoryFabric()
    p = Node(MemoryLane(fabric), timing=Timing(kv_progress_s=0.05))
    d = Node(MemoryLane(fabric), boot_id=BOOT_D)
    for node in (p, d):
        await node.connector.start()
    await transfer(p, d, 16)
    threads = list(p.lane._active.values())  # type: ignore[attr-defined]
    assert len(threads) == 1
    await asyncio.to_thread(threads[0].join, 10.0)
    assert not threads[0].is_alive()
    await transfer(p, d, 16)
    for node in (p, d):
        await node.connector.stop()


async def test_only_the_ranks_of_one_group_are_joined() -> None:
    node = Node(MemoryLane(MemoryFabric()))
    await node.connector.start()
    endpoint = node.connector.endpoint()
    with pytest.raises(InternalError, match="not the ranks of one group"):
        node.connector.join_group([endpoint, endpoint])
    await node.connector.stop()


async def test_ranks_with_recurrent_state_have_one_connector() -> None:
    node = Node(MemoryLane(MemoryFabric()), layers=HYBRID)
    await node.connector.start()
    with pytest.raises(InternalError, match="hand over no recurrent state"):
        node.connector.join_group([node.connector.endpoint()])
    await node.connector.stop()


# ---- links --------------------------------------------------------------------------------------
def test_an_unknown_link_is_taken_for_fast() -> None:
    links = LinkSpeeds()
    assert links.speed("p") is None
    assert links.codec("p") == "raw"


def test_small_fetches_say_nothing() -> None:
    links = LinkSpeeds()
    links.observe("p", MIN_BYTES - 1, 1.0)
    links.observe("p", MIN_BYTES, 0.0)
    assert links.speed("p") is None


def test_the_average_follows() -> None:
    links = LinkSpeeds()
    links.observe("p", 1 << 30, 1.0)
    assert links.codec("p") == "int8"
    for _ in range(12):
        links.observe("p", 1 << 33, 1.0)
    assert links.speed("p") == pytest.approx(1 << 33, rel=0.02)
    assert links.codec("p") == "raw"
    assert links.codec("other") == "raw"


def test_a_slow_link_is_tried_again_exactly_now_and_then() -> None:
    links = LinkSpeeds()
    links.observe("p", int(FAST_LINK / 2), 1.0)
    codecs = [links.codec("p") for _ in range(2 * PROBE_EVERY)]
    assert codecs.count("raw") == 2
    assert codecs[PROBE_EVERY - 1] == "raw"
