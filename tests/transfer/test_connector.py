"""What the connector adds to its lanes: life, limits, counters; the grpc lane's own failures."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence

import grpc
import pytest

from baton.engine.state.stats import EngineStats
from baton.node.metrics import NodeFigures, values_of
from baton.protocol.errors import ConfigError, InternalError, KVLost, KVStale
from baton.protocol.handles import LaneAddress, NodeLoad
from baton.protocol.kv_spec import LayerSpec
from baton.runtime.timing import Timing
from kv_transfer.lanes.grpc_stream import GrpcLane
from kv_transfer.lanes.memory import MemoryFabric, MemoryLane
from kv_transfer.protocol.base import Incoming, KVConnector
from kv_transfer.protocol.frames import Buffer
from kv_transfer.protocol.lending import Loan
from kv_transfer.stats import NO_LANE
from tests.block_lists import held
from tests.transfer.pools import (
    BOOT_D,
    PATIENCE_S,
    SECRET,
    Node,
    fill_random,
    outcome,
    request_of,
    snapshot,
    unreachable,
)


class Lending(MemoryLane):
    """base.LendingLane, as far as its exporter is concerned."""

    def __init__(self) -> None:
        super().__init__(MemoryFabric())
        self.told: list[bool] = []

    def let_go(self) -> None:
        pass

    def want_back(self, wanted: bool) -> None:
        self.told.append(wanted)

    def lends(self, address: LaneAddress) -> bool:
        return False

    def borrow(self, address: LaneAddress, pages: Sequence[int]) -> Loan:
        raise KVLost("nothing is lent here")


@pytest.fixture
async def start() -> AsyncIterator[Callable]:
    nodes: list[Node] = []

    async def start_node(lane, **settings) -> Node:
        node = Node(lane, **settings)
        nodes.append(node)
        await node.connector.start()
        return node

    yield start_node
    for node in nodes:
        await node.connector.stop()


async def test_an_ended_lease_counts_for_the_lane_that_asked_last(start) -> None:
    fabric = MemoryFabric()
    p = await start(MemoryLane(fabric))
    d = await start(MemoryLane(fabric), boot_id=BOOT_D)
    handles = [p.connector.export(request_of(name), 0, p.pick(8), 8) for name in ("a", "b", "c")]
    for handle in handles:
        p.finish(handle)
    await d.connector.fetch(handles[0], 1, d.pick(8))  # acknowledged: its lease ends no more
    await d.connector.fetch(handles[1], 1, d.pick(8), hold=True)
    await p.freed()
    p.clock.advance(p.timing.kv_lease_s)
    assert p.connector.expire(p.clock.monotonic()) == 2
    lanes = p.connector.stats.lanes
    assert {name: lane.expired for name, lane in lanes.items()} == {"memory": 1, NO_LANE: 1}
    assert p.connector.stats.expired_leases == 2
    shown = values_of(NodeFigures(NodeLoad(), EngineStats(), p.connector.stats))
    assert shown["baton_kv_lane_expired_leases"] == {("memory",): 1, (NO_LANE,): 1}


async def test_the_connector_is_what_the_nodes_expect(start) -> None:
    node = await start(MemoryLane(MemoryFabric()))
    connector: KVConnector = node.connector
    endpoint = connector.endpoint()
    assert endpoint.boot_id == node.boot_id
    assert endpoint.lanes == (LaneAddress("memory", node.boot_id),)
    assert endpoint.format.block_size == node.block_size
    assert SECRET not in repr(node.connector)


async def test_who_drains_wants_its_pages_back_for_good(start) -> None:
    lane = Lending()
    node = await start(lane)
    for wanted in (True, False):
        node.connector.want_back(wanted)
    node.connector.drain()
    node.connector.want_back(False)
    assert lane.told == [True, False, True, True]


async def test_before_the_start_there_is_no_endpoint() -> None:
    node = Node(MemoryLane(MemoryFabric()))
    with pytest.raises(InternalError, match="not been started"):
        node.connector.export(request_of(), 0, held([0]), 1)
    await node.connector.stop()


async def test_too_few_blocks_are_our_own_fault(start) -> None:
    node = await start(MemoryLane(MemoryFabric()))
    with pytest.raises(InternalError, match="1 blocks do not hold 9"):
        node.connector.export(request_of(), 0, held([0]), 9)
    handle = node.connector.export(request_of(), 0, held([0, 1]), 9)
    with pytest.raises(InternalError, match="1 blocks do not hold 9"):
        await node.connector.fetch(handle, 1, held([3]))


async def test_a_failure_that_meets_a_cancellation_is_seen(start, monkeypatch) -> None:
    """Both at once: the caller hears of the cancellation, nobody misses the other's error."""
    node = await start(MemoryLane(MemoryFabric()))
    other = await start(MemoryLane(MemoryFabric()), boot_id=BOOT_D)
    handle = node.connector.export(request_of(), 0, held([0, 1]), 9)
    unseen: list[dict] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unseen.append(context))
    fetching: list[asyncio.Task] = []

    async def broken(*_: object) -> None:
        asyncio.get_running_loop().call_soon(fetching[0].cancel)
        raise KVLost("gone")

    monkeypatch.setattr(other.connector._fetches, "_converse", broken)
    fetching.append(asyncio.create_task(other.connector.fetch(handle, 1, held([0, 1]))))
    await asyncio.wait(fetching)
    assert fetching.pop().cancelled()
    gc.collect()
    assert unseen == []


def test_a_token_beyond_a_frame_stops_the_start() -> None:
    huge = (LayerSpec(1024, 1024, 1024),)

    async def build() -> None:
        Node(MemoryLane(MemoryFabric()), layers=huge, num_blocks=1, block_size=1)

    with pytest.raises(ConfigError, match="layer 0"):
        asyncio.run(build())


async def test_budget_and_counters(start) -> None:
    fabric = MemoryFabric()
    p = await start(MemoryLane(fabric))
    d = await start(MemoryLane(fabric), boot_id=BOOT_D)
    token_bytes = sum(layer.token_bytes("bfloat16") for layer in p.layers)
    handles = [p.connector.export(request_of(f"r{i}"), 0, p.pick(10 + i), 10 + i) for i in (0, 1)]
    assert p.connector.active_exports == 2
    assert p.connector.export_bytes == 21 * token_bytes
    p.finish(handles[0])
    await d.connector.fetch(handles[0], 1, d.pick(10), 4)
    await p.freed(1)
    assert p.connector.export_bytes == 11 * token_bytes
    assert p.connector.stats.bytes_sent == {"memory": 6 * token_bytes}
    assert d.connector.stats.bytes_received == {"memory": 6 * token_bytes}
    assert d.connector.stats.fetch_seconds >= 0.0
    assert len({handle.secret for handle in handles}) == 2


async def test_an_export_after_the_stop_frees_itself(start) -> None:
    node = await start(MemoryLane(MemoryFabric()))
    await node.connector.stop()
    handle = node.connector.export(request_of(), 0, held([0]), 4)
    assert [why for _, _, why in node.released] == ["exporter stops"]
    assert not node.connector.publish(handle, 0, 4)
    assert node.connector.active_exports == 0


async def test_a_node_may_fetch_from_itself(start) -> None:
    node = await start(MemoryLane(MemoryFabric()))
    fill_random(node.arena, 1)
    handle = node.connector.export(request_of(), 0, held([0, 1]), 12)
    node.finish(handle)
    await node.connector.renew(handle)
    await node.connector.fetch(handle, 1, held([5, 6]))
    await node.freed()
    page = node.arena.page_bytes
    pool = snapshot(node.arena)
    assert pool[:8] == pool[5 * page :][:8] != bytes(8)
    with pytest.raises(KVStale):
        await node.connector.renew(handle)


async def test_cancelling_a_queued_conversation(start) -> None:
    """Cancelled before its thread came up: nothing is opened, nothing is left behind."""
    fabric = MemoryFabric()
    p = await start(MemoryLane(fabric))
    d = await start(MemoryLane(fabric), boot_id=BOOT_D)
    handle = p.connector.export(request_of(), 0, p.pick(8), 8)
    fetch = asyncio.create_task(d.connector.fetch(handle, 1, d.pick(8)))
    await asyncio.sleep(0)
    fetch.cancel()
    with pytest.raises(asyncio.CancelledError):
        await fetch
    await d.connector.release(handle, "changed my mind")
    await p.freed()


# ---- the grpc lane ------------------------------------------------------------------------------
async def test_a_taken_port_stops_the_start(start) -> None:
    node = await start(GrpcLane(Timing()))
    port = int(node.connector.endpoint().lanes[0].address.rpartition(":")[2])
    second = Node(GrpcLane(Timing(), port=port), boot_id=BOOT_D)
    with pytest.raises(ConfigError, match=str(port)):
        await second.connector.start()
    await second.connector.stop()


async def test_the_advertised_host_is_what_peers_are_told(start) -> None:
    node = await start(GrpcLane(Timing(), advertise_host="kv.example"))
    assert node.connector.endpoint().lanes[0].address.startswith("kv.example:")
    six = await start(GrpcLane(Timing(), advertise_host="::1"), boot_id=BOOT_D)
    assert six.connector.endpoint().lanes[0].address.startswith("[::1]:")


async def test_nobody_at_the_address(start) -> None:
    node = await start(GrpcLane(Timing()))
    d = await start(GrpcLane(Timing()), boot_id=BOOT_D)
    handle = unreachable(node.connector.export(request_of(), 0, held([0]), 8))
    error = await outcome(d.connector.fetch(handle, 1, held([0])))
    assert isinstance(error, KVLost)


async def test_a_peer_that_comes_back_is_found_at_once(start) -> None:
    """A failed channel is given up, so gRPC's backoff does not hide the new process."""
    d = await start(GrpcLane(Timing()), boot_id=BOOT_D)
    first = await start(GrpcLane(Timing()))
    address = first.connector.endpoint().lanes[0].address
    handle = first.connector.export(request_of(), 0, held([0]), 8)
    await first.connector.stop()
    for _ in range(3):
        assert isinstance(await outcome(d.connector.fetch(handle, 1, held([0]))), KVLost)
    again = await start(GrpcLane(Timing(), port=int(address.rpartition(":")[2])), boot_id="0b" * 16)
    error = await outcome(d.connector.fetch(handle, 1, held([0])))
    assert isinstance(error, KVStale), "the address lives, but it is another process"
    assert again.connector.endpoint().lanes[0].address == address


async def test_who_says_nothing_is_hung_up_on(start) -> None:
    """A caller that never greets does not keep a thread."""
    node = await start(GrpcLane(Timing()), timing=Timing(kv_progress_s=0.1))
    address = node.connector.endpoint().lanes[0].address
    async with grpc.aio.insecure_channel(address) as channel:
        call = channel.stream_stream("/baton.kv.v1.KVTransfer/Transfer")()
        assert await asyncio.wait_for(call.code(), PATIENCE_S) is grpc.StatusCode.CANCELLED


async def test_garbage_is_answered_with_an_error(start) -> None:
    node = await start(GrpcLane(Timing()))
    address = node.connector.endpoint().lanes[0].address
    async with grpc.aio.insecure_channel(address) as channel:
        call = channel.stream_stream("/baton.kv.v1.KVTransfer/Transfer")()
        await call.write(b"GET / HTTP/1.1")
        answer = await asyncio.wait_for(call.read(), PATIENCE_S)
        assert isinstance(answer, bytes)
        assert answer[:4] == b"BKV1"
        assert answer[4] == 4  # ERR
        call.cancel()
    assert node.connector.stats.corrupt == 1


async def test_what_grpc_cannot_send_ends_the_call() -> None:
    """Both sides are told at once; nobody waits for a deadline."""
    ended = threading.Event()

    def serve(lane: str, peer: Incoming) -> Iterator[Buffer]:
        peer.on_closed(ended.set)
        yield bytearray(b"gRPC takes nothing but bytes")

    lane = GrpcLane(Timing())
    wire = lane.open(lane.start("0a" * 16, serve))
    try:
        receiving = asyncio.to_thread(wire.receive)
        assert isinstance(await outcome(receiving), KVLost)
        assert await asyncio.to_thread(ended.wait, PATIENCE_S)
    finally:
        await asyncio.to_thread(lane.stop)


# ---- the memory lane ----------------------------------------------------------------------------
def test_an_address_that_nobody_has() -> None:
    wire = MemoryLane(MemoryFabric()).open(LaneAddress("memory", "nowhere"))
    with pytest.raises(KVLost, match="nowhere"):
        wire.receive()
    with pytest.raises(KVLost, match="nowhere"):
        wire.send(b"x")


def test_closed_conversations_call_back_at_once() -> None:
    closed: list[int] = []

    def serve(lane: str, peer: Incoming):
        assert peer.receive(PATIENCE_S) is None
        peer.on_closed(lambda: closed.append(1))
        yield b"last"

    fabric = MemoryFabric()
    lane = MemoryLane(fabric)
    lane.start("here", serve)
    wire = MemoryLane(fabric).open(LaneAddress("memory", "here"))
    wire.finish()
    assert [wire.receive(), wire.receive()] == [b"last", None]
    lane.stop()
    lane.stop()
    assert closed == [1]
