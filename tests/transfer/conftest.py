"""The lanes that must pass the contract: a new lane joins `cluster`'s parameters."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from baton.runtime.timing import Timing
from baton.runtime.tls import TlsFiles
from kv_transfer.lanes.dist import DistLane, DistSettings
from kv_transfer.lanes.grpc_stream import GrpcLane
from kv_transfer.lanes.memory import MemoryFabric, MemoryLane
from kv_transfer.lanes.nixl_agent import load
from kv_transfer.lanes.shm_arena import ShmArena
from kv_transfer.lanes.stream import StreamLane, StreamLaneOptions
from kv_transfer.protocol.base import Lane
from kv_transfer.stats import TransferStats
from tests.transfer.certificates import make_files
from tests.transfer.cluster import FRAME_ARRIVED, Cluster
from tests.transfer.direct_lanes import nixl_lane, shm_lane
from tests.transfer.stream_bench import Bench

TWO_SIDED = ("memory", "grpc", "grpc-tls", "stream-tcp", "stream-unix", "stream-tls", "dist")
DIRECT = ("shm", "nixl")
# One of each kind, for what does not depend on how a lane's connections are made:
# @pytest.mark.parametrize("cluster", KINDS, indirect=True)
KINDS = ("memory", "grpc", "stream-unix", "dist", "shm", "nixl")
# One of each way that bytes take, for what happens above the lanes.
WAYS = ("memory", "shm")


@pytest.fixture(params=[*TWO_SIDED, *DIRECT])
async def cluster(
    request: pytest.FixtureRequest, tmp_path: Path, tls: TlsFiles
) -> AsyncIterator[Cluster]:
    fabric = MemoryFabric()
    arenas: list[ShmArena] = []
    if request.param == "nixl" and load() is None:
        pytest.skip("the extra `nixl` is not installed")

    def memory_lane() -> Lane:
        return MemoryLane(fabric)

    makers: dict[str, Callable[[], Lane]] = {
        "memory": memory_lane,
        "grpc": lambda: GrpcLane(Timing()),
        "grpc-tls": lambda: GrpcLane(Timing(), tls=tls),
        "stream-tcp": lambda: StreamLane(Timing(), StreamLaneOptions(unix=False)),
        "stream-unix": lambda: StreamLane(Timing(), StreamLaneOptions(tcp=False)),
        "stream-tls": lambda: StreamLane(Timing(), StreamLaneOptions(unix=False, tls=tls)),
        # inline_bytes: the small frames of the tests take the way of big ones
        "dist": lambda: DistLane(Timing(), DistSettings(inline_bytes=500)),
        "shm": lambda: shm_lane(memory_lane, tmp_path, arenas),
        "nixl": lambda: nixl_lane(memory_lane, Timing()),
    }
    async with AsyncExitStack() as stack:
        yield Cluster(makers[request.param], stack)
    for arena in arenas:
        arena.close()


@pytest.fixture(scope="session")
def tls(tmp_path_factory: pytest.TempPathFactory) -> TlsFiles:
    """A node's certificate of the deployment's CA."""
    return make_files(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="session")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> TlsFiles:
    """The same of somebody else's CA."""
    return make_files(tmp_path_factory.mktemp("stranger"))


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.close()


@pytest.fixture
def quick() -> Iterator[Bench]:
    """One whose deadlines are short."""
    bench = Bench(timing=Timing(kv_progress_s=0.2, connect_s=1.0))
    yield bench
    bench.close()


@pytest.fixture(autouse=True)
def announce_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    count = TransferStats.received

    def received(self: TransferStats, lane: str, num_bytes: int) -> None:
        count(self, lane, num_bytes)
        with FRAME_ARRIVED:
            FRAME_ARRIVED.notify_all()

    monkeypatch.setattr(TransferStats, "received", received)
