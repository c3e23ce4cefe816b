"""Idle for an hour, then a request: known from elsewhere to hang. The nodes' hour is virtual."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from baton.protocol.sampling import SamplingParams
from tests.cluster import PATIENT, Cluster, Plan, cluster
from tests.tiny_models import make_tiny_model
from tests.waiting import eventually

PROMPTS = ([5, 6, 7, 8, 9, 10, 11, 12], [20, 21, 22, 23, 24])
PARAMS = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
TIMING = replace(PATIENT, heartbeat_s=0.02)
STRIDE_S = 45.0  # below the time after which a node without heartbeats counts as hanging


class JumpingClock:
    """The real one, and what a test has added."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead_s


async def pass_an_hour(c: Cluster, clock: JumpingClock) -> None:
    """In strides, a heartbeat of every node in each, answered by its engine."""
    while clock.ahead_s < 3600.0:
        clock.ahead_s += STRIDE_S
        before = [member.node.shell.progress.beats for member in c.members]

        async def beaten(before: list[int] = before) -> bool:
            now = [member.node.shell.progress for member in c.members]
            return all(
                one.beats > other and one.silent_s < STRIDE_S / 2
                for one, other in zip(now, before, strict=True)
            )

        await eventually(beaten)
        assert not any(member.node.shell.progress.stalled for member in c.members)


async def test_a_request_after_an_idle_hour_is_like_any_other(tmp_path: Path) -> None:
    model = make_tiny_model("llama", tmp_path / "model")
    clock = JumpingClock()
    async with cluster(Plan(model, timing=TIMING, clock=clock)) as c:
        first = [result.token_ids for result in await c.generate(PROMPTS, PARAMS)]
        [prefill], [decode] = c.prefill, c.decode
        connections = decode.transfers.lanes["grpc"].connections
        await pass_an_hour(c, clock)
        again = await c.generate(PROMPTS, PARAMS)
        assert [result.token_ids for result in again] == first
        assert [result.retries for result in again] == [0, 0]
        assert decode.transfers.lanes["grpc"].connections > connections, "old ones were let go"
        assert c.router.registry.health.stats.deaths == 0
        assert prefill.transfers.exports == decode.transfers.fetches == 4
        await c.settle()
