"""A node's health is its own engine's progress: noticed when that hangs, never a peer's fault."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from grpc_health.v1 import health_pb2

from baton.node.progress import EngineProgress, ProgressAnswer
from baton.protocol.errors import KVError, error_from_code
from baton.runtime.timing import Timing
from kv_transfer.lanes.memory import MemoryFabric
from tests.fakes import FakeClock, request
from tests.node.fakes import (
    DECODE,
    PATIENCE_S,
    PREFILL,
    Setup,
    TestNode,
    connected,
    running_node,
    running_pair,
)
from tests.node.test_heartbeat import health_of

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
# Far above what a busy machine does to a step of a fake model.
SETUP = Setup(options={"stall_s": 1.0})
IDLE = ProgressAnswer(steps=5, has_work=False, held_up=False)
BUSY = ProgressAnswer(steps=5, has_work=True, held_up=False)
WAITS = ProgressAnswer(steps=5, has_work=True, held_up=True)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


def beats(
    progress: EngineProgress, clock: FakeClock, answer: ProgressAnswer | None, waits: bool = False
) -> bool:
    """An hour of heartbeats, each of them answered so; whether that looks like a stall."""
    for _ in range(3600):
        if progress.ask(layers=0) and answer is not None:
            progress.answered(answer, waits)
        clock.advance(1.0)
        if progress.stalled:
            return True
    return False


def test_an_idle_engine_gets_on(clock: FakeClock) -> None:
    assert not beats(EngineProgress(clock, 10.0), clock, IDLE)


def test_no_answer_is_a_stall(clock: FakeClock) -> None:
    progress = EngineProgress(clock, 10.0)
    assert not beats(progress, clock, IDLE)
    began = clock.now
    assert beats(progress, clock, None)
    assert 10.0 <= clock.now - began <= 12.0, "the idle hour before does not count"
    assert progress.silent_s >= 10.0
    progress.answered(replace(IDLE, steps=6), waits_for_others=False)
    assert not progress.stalled, "it was a long step"


def pause(progress: EngineProgress, clock: FakeClock, seconds: int, layers: int) -> None:
    """Heartbeats that hear of nothing new."""
    for _ in range(seconds):
        progress.ask(layers)
        clock.advance(1.0)


def test_a_step_may_take_hours_as_long_as_it_goes_through_layers(clock: FakeClock) -> None:
    progress = EngineProgress(clock, 10.0)
    for layers in range(1000):
        pause(progress, clock, 9, layers)  # no answer: all in one step
        assert not progress.stalled


def test_who_is_known_to_be_slow_has_more_time(clock: FakeClock) -> None:
    progress = EngineProgress(clock, 10.0)
    for layers in range(3):
        pause(progress, clock, 8, layers)
    progress.ask(4)
    assert progress.limit_s == 24.0, "three times the longest pause"
    pause(progress, clock, 23, 4)
    assert not progress.stalled
    pause(progress, clock, 2, 4)
    assert progress.stalled
    progress.ask(5)
    assert not progress.stalled
    assert progress.limit_s == 24.0, "a stall is no measure of a machine"


def test_answers_without_steps_are_a_stall_unless_others_hold_it_up(clock: FakeClock) -> None:
    assert beats(EngineProgress(clock, 10.0), clock, BUSY)
    assert not beats(EngineProgress(clock, 10.0), clock, WAITS, waits=True)
    assert beats(EngineProgress(clock, 10.0), clock, WAITS, waits=False), (
        "nobody will ever free a block"
    )


def test_a_heartbeat_that_stops_is_a_stall(clock: FakeClock) -> None:
    progress = EngineProgress(clock, 10.0)
    progress.ask(layers=0)
    progress.answered(IDLE, waits_for_others=False)
    clock.advance(11.0)
    assert progress.stalled, "the event loop hangs: whoever asks is on another thread"


async def until_health(node: TestNode, status: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while await health_of(node.node.address) != status:
            pass


async def test_an_engine_that_hangs_is_known_everywhere_and_recovers() -> None:
    async with running_node(PREFILL, MemoryFabric(), SETUP) as node, connected(node) as router:
        assert (node.node.gets_on, node.node.takes_work) == (True, True)
        await router.until_load(lambda load: not load.stalled)
        node.runner.step_gate.close()
        await router.prefill(request("r"))
        await node.runner.step_gate.reached()
        await router.until_load(lambda load: load.stalled)
        assert node.node.shell.record().load.stalled
        assert node.node.shell.progress.silent_s >= 1.0
        await until_health(node, NOT_SERVING)
        assert (node.node.gets_on, node.node.takes_work) == (False, False)
        # Whoever leaves it then finds it usable again: nothing of the request is left.
        await router.abort("r")
        await router.heard()  # else token 1 may come before the abort is read, and its export stays
        node.runner.step_gate.open()
        await router.until_load(lambda load: not load.stalled)
        await until_health(node, SERVING)
        await node.until_idle()
        node.node.shell.begin_drain()
        assert (node.node.gets_on, node.node.takes_work) == (True, False)


async def test_heartbeats_come_although_nothing_changes() -> None:
    """Routers take silence for a stall."""
    async with running_node(DECODE, MemoryFabric()) as node, connected(node) as router:
        for _ in range(5):
            step = await router.next_step()
            assert step.load is not None


async def test_a_dead_prefill_node_leaves_its_decode_node_healthy() -> None:
    setup = Setup(
        timing=Timing(heartbeat_s=0.05, kv_lease_s=60.0, connect_s=5.0, kv_progress_s=0.5),
        options={"stall_s": 2.0},
    )
    async with running_pair(setup, setup) as pair:
        pair.p.runner.layer_gate.close()  # P hangs in the middle of the prompt
        await pair.to_p.prefill(request("r"))
        handle = await pair.to_p.handle_of("r")
        await pair.to_d.decode(request("r"), handle)
        await pair.to_d.until(lambda: pair.to_d.subscribed("r"))
        await pair.to_p.until_load(lambda load: load.stalled)
        assert await health_of(pair.d.node.address) == SERVING, "a peer's stall is no stall"
        stopping = asyncio.create_task(pair.p.node.stop())  # and now it is gone, the gate closed:
        failure = await pair.to_d.failure_of("r")  # else the KV might arrive before the end
        pair.p.runner.layer_gate.open()
        await stopping
        assert isinstance(error_from_code(failure.code, failure.message), KVError)
        assert await health_of(pair.d.node.address) == SERVING
        assert pair.d.node.gets_on
        await pair.to_d.decode(request("local"))
        assert await pair.to_d.all_tokens("local")
        assert not pair.to_d.load.stalled
        await pair.d.until_idle()
