"""Which lane two nodes take, what happens when it does not lead anywhere, and kept connections."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import replace

import pytest

from baton.protocol.errors import KVLost, KVRefused
from baton.protocol.handles import KVHandle, LaneAddress
from baton.runtime.timing import Timing
from baton.runtime.tls import TlsFiles
from kv_transfer.lanes.grpc_stream import GrpcLane
from kv_transfer.lanes.stream import StreamLane, StreamLaneOptions
from kv_transfer.protocol.base import Incoming, Lane, Serve
from kv_transfer.protocol.frames import Buffer, Kind
from kv_transfer.stats import LaneStats
from tests.transfer import faults
from tests.transfer.certificates import believing
from tests.transfer.cluster import Cluster, transfer
from tests.transfer.pools import (
    BOOT_D,
    BOOT_P,
    Node,
    fill_random,
    outcome,
    request_of,
)

TCP_ONLY = StreamLaneOptions(unix=False)


def stream(options: StreamLaneOptions = TCP_ONLY) -> StreamLane:
    return StreamLane(Timing(), options)


def grpc() -> GrpcLane:
    return GrpcLane(Timing())


@pytest.fixture
async def nodes() -> AsyncIterator[Cluster]:
    async with AsyncExitStack() as stack:
        yield Cluster(stream, stack)


async def start(nodes: Cluster, boot_id: str, *lanes: Lane) -> Node:
    node = await nodes.node(lanes[0], boot_id=boot_id, more_lanes=lanes[1:])
    fill_random(node.arena, 1)
    return node


def used(node: Node) -> dict[str, LaneStats]:
    return {name: lane for name, lane in node.connector.stats.lanes.items() if lane.fetches}


# ---- choice -------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("exporter", "fetcher", "chosen"),
    [
        ((stream, grpc), (stream, grpc), "stream"),
        ((grpc, stream), (stream, grpc), "grpc"),  # the exporter's order, not the fetcher's
        ((stream, grpc), (grpc, stream), "stream"),
        ((stream, grpc), (grpc,), "grpc"),
        ((grpc,), (stream, grpc), "grpc"),
    ],
)
async def test_the_exporters_best_that_the_fetcher_has(
    nodes: Cluster,
    exporter: tuple[Callable[[], Lane], ...],
    fetcher: tuple[Callable[[], Lane], ...],
    chosen: str,
) -> None:
    p = await start(nodes, BOOT_P, *(make() for make in exporter))
    d = await start(nodes, BOOT_D, *(make() for make in fetcher))
    await transfer(p, d, 24)
    assert list(used(d)) == [chosen]
    assert used(d)[chosen].fallbacks == 0


async def test_nothing_in_common_is_refused(nodes: Cluster) -> None:
    p = await start(nodes, BOOT_P, stream())
    d = await start(nodes, BOOT_D, grpc())
    error = await outcome(d.connector.fetch(finished_export(p), 1, d.pick(16)))
    assert isinstance(error, KVRefused)
    assert "no common lane" in error.message


async def test_tls_on_one_side_only_is_out_of_reach(nodes: Cluster, tls: TlsFiles) -> None:
    """For `grpc` as for `stream`; nothing is sent in the clear to find out."""
    p = await start(nodes, BOOT_P, stream(), grpc())
    secured = stream(replace(TCP_ONLY, tls=tls)), GrpcLane(Timing(), tls=tls)
    d = await start(nodes, BOOT_D, *secured)
    for near, far in ((p, d), (d, p)):
        error = await outcome(near.connector.fetch(finished_export(far), 1, near.pick(16)))
        assert isinstance(error, KVLost)
        assert "out of reach" in error.message
        assert near.connector.stats.lanes == {}


def finished_export(p: Node) -> KVHandle:
    handle = p.connector.export(request_of(), 0, p.pick(16), 16)
    p.finish(handle)
    return handle


# ---- the next lane ------------------------------------------------------------------------------
async def fetched_by_grpc(p: Node, d: Node, change: Callable[[KVHandle], KVHandle]) -> None:
    """A fetch of a changed handle falls back once, and the counters say so."""
    handle = finished_export(p)
    ready = await d.connector.fetch(change(handle), 1, d.pick(16))
    assert ready.num_tokens == 16
    assert list(used(d)) == ["grpc"]
    stats = d.connector.stats
    assert stats.lanes["stream"].fallbacks >= 1
    told = {lane: (flow.faults > 0, flow.transfers) for (_, lane), flow in stats.peers.items()}
    assert told == {"stream": (True, 0), "grpc": (False, 1)}, "which lane failed"
    await p.freed()


async def test_a_lane_that_nobody_answers_gives_way(nodes: Cluster) -> None:
    def cut(handle: KVHandle) -> KVHandle:
        first, *others = handle.endpoint.lanes
        lanes = (replace(first, address="127.0.0.1:9"), *others)
        return replace(handle, endpoint=replace(handle.endpoint, lanes=lanes))

    p = await start(nodes, BOOT_P, stream(), grpc())
    d = await start(nodes, BOOT_D, stream(), grpc())
    await fetched_by_grpc(p, d, cut)


async def test_a_lane_at_its_cap_gives_way(nodes: Cluster) -> None:
    p = await start(nodes, BOOT_P, stream(replace(TCP_ONLY, max_connections=0)), grpc())
    d = await start(nodes, BOOT_D, stream(), grpc())
    await fetched_by_grpc(p, d, lambda handle: handle)


async def test_a_lane_that_does_not_believe_us_gives_way(
    nodes: Cluster, tls: TlsFiles, stranger: TlsFiles
) -> None:
    """Only the stream lane has certificates here; the HMAC guards grpc."""
    p = await start(nodes, BOOT_P, stream(replace(TCP_ONLY, tls=tls)), grpc())
    files = believing(stranger, tls)
    d = await start(nodes, BOOT_D, stream(replace(TCP_ONLY, tls=files)), grpc())
    await fetched_by_grpc(p, d, lambda handle: handle)


async def test_a_retry_is_counted_on_the_lane_of_the_damage(nodes: Cluster) -> None:
    damage = faults.on_nth(Kind.DATA, 0, faults.flip_bit)
    p = await start(nodes, BOOT_P, stream(replace(TCP_ONLY, max_connections=0)), grpc())
    d = await start(nodes, BOOT_D, stream(), faults.FaultyLane(grpc(), receiving=damage))
    await fetched_by_grpc(p, d, lambda handle: handle)
    lanes = d.connector.stats.lanes
    assert (lanes["grpc"].corrupt, lanes["grpc"].retries, lanes["stream"].retries) == (1, 1, 0)


async def test_the_only_lane_says_what_was_wrong(nodes: Cluster) -> None:
    p = await start(nodes, BOOT_P, stream(replace(TCP_ONLY, max_connections=0)))
    d = await start(nodes, BOOT_D, stream())
    error = await outcome(d.connector.fetch(finished_export(p), 1, d.pick(16)))
    assert isinstance(error, KVLost)
    assert "0 connections already" in error.message


# ---- kept connections ---------------------------------------------------------------------------
class Counting(StreamLane):
    """Counts the connections that it serves."""

    served = 0

    def start(self, boot_id: str, serve: Serve) -> LaneAddress:
        def counted(lane: str, peer: Incoming) -> Iterator[Buffer]:
            self.served += 1
            return serve(lane, peer)

        return super().start(boot_id, counted)


@pytest.mark.parametrize("kind", ["tcp", "unix", "tls"])
async def test_one_handshake_for_many_fetches(nodes: Cluster, tls: TlsFiles, kind: str) -> None:
    options = {
        "tcp": TCP_ONLY,
        "unix": StreamLaneOptions(tcp=False),
        "tls": replace(TCP_ONLY, tls=tls),
    }[kind]
    lane = Counting(Timing(), options)
    p = await start(nodes, BOOT_P, lane)
    d = await start(nodes, BOOT_D, stream(options))
    for num_tokens in (16, 101, 1, 16):
        await transfer(p, d, num_tokens)
    stats = d.connector.stats.lanes["stream"]
    assert (stats.fetches, stats.connections, stats.reused) == (4, 1, 3)
    assert lane.served == 1


async def test_a_kept_connection_whose_peer_hung_up_is_replaced(nodes: Cluster) -> None:
    lane = Counting(Timing(), TCP_ONLY)
    p = await start(nodes, BOOT_P, lane)
    d = await start(nodes, BOOT_D, stream())
    await transfer(p, d, 16)
    assert lane._server is not None
    for served in list(lane._server._active):
        served.break_()
    await transfer(p, d, 16)
    assert d.connector.stats.lanes["stream"].fetches == 2
    assert d.connector.stats.failures == {}
    assert lane.served == 2
