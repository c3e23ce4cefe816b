"""The lanes that must pass the contract: a new lane joins `cluster`'s parameters."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest

from baton.timing import Timing
from kv_transfer.base import Lane
from kv_transfer.grpc_stream import GrpcLane
from kv_transfer.memory import MemoryFabric, MemoryLane
from kv_transfer.stats import TransferStats
from tests.transfer.cluster import (
    FRAME_ARRIVED,
    Cluster,
)


@pytest.fixture(params=["memory", "grpc"])
async def cluster(request: pytest.FixtureRequest) -> AsyncIterator[Cluster]:
    fabric = MemoryFabric()

    def new_lane() -> Lane:
        return MemoryLane(fabric) if request.param == "memory" else GrpcLane(Timing())

    async with AsyncExitStack() as stack:
        yield Cluster(new_lane, stack)


@pytest.fixture(autouse=True)
def announce_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    count = TransferStats.received

    def received(self: TransferStats, lane: str, num_bytes: int) -> None:
        count(self, lane, num_bytes)
        with FRAME_ARRIVED:
            FRAME_ARRIVED.notify_all()

    monkeypatch.setattr(TransferStats, "received", received)
