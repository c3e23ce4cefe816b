"""EngineThread: calls between steps, reports,
failing steps, cancellation without leaks, stopping."""

from __future__ import annotations

import asyncio
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest

from baton.engine.core.engine import Engine
from baton.engine.state.interface import Reservation, Task
from baton.engine.thread import EngineThread, StepReport
from baton.protocol.errors import InvalidRequest, Unavailable
from baton.protocol.events import BlockEventKind
from tests.block_lists import held
from tests.engine.driving import PROMPT, assert_all_free, expected, tokens_of
from tests.fakes import FakeHooks, FakeRunner, fake_engine, request

TIMEOUT_S = 10


@dataclass
class Running:
    engine: Engine
    runner: FakeRunner
    hooks: FakeHooks
    thread: EngineThread
    reports: queue.SimpleQueue[StepReport]

    def collect(self, until: Callable[[StepReport], bool]) -> list[StepReport]:
        """Reports up to the first one that `until` likes."""
        seen = [self.reports.get(timeout=TIMEOUT_S)]
        while not until(seen[-1]):
            seen.append(self.reports.get(timeout=TIMEOUT_S))
        return seen


def ended(name: str) -> Callable[[StepReport], bool]:
    return lambda report: any(
        event.request_id == name and event.finish_reason for event in report.events
    )


@pytest.fixture
def running() -> Iterator[Running]:
    reports: queue.SimpleQueue[StepReport] = queue.SimpleQueue()
    hooks = FakeHooks()
    engine, runner = fake_engine(num_blocks=8, hooks=hooks)
    thread = EngineThread(engine, reports.put)
    thread.start()
    yield Running(engine, runner, hooks, thread, reports)
    thread.stop()


async def test_a_request_from_call_to_its_last_report(running: Running) -> None:
    asked = request("a", PROMPT)
    await running.thread.call(lambda engine: engine.add(asked))
    reports = running.collect(ended("a"))
    events = [event for report in reports for event in report.events]
    assert tokens_of(events) == expected(asked)
    kinds = [event.kind for report in reports for event in report.block_events]
    assert BlockEventKind.STORED in kinds
    assert reports[0].load.running == 1
    assert reports[-1].load.running == 0
    assert reports[-1].load.free_blocks == 8


async def test_what_can_wait_until_the_engine_is_idle_does(
    running: Running, caplog: pytest.LogCaptureFixture
) -> None:
    busy: list[bool] = []

    def rest() -> None:
        busy.append(running.engine.has_work)
        raise RuntimeError("no harm done")

    running.engine.active = replace(running.engine.active, when_idle=rest)
    for name in ("a", "b"):
        await running.thread.call(lambda engine, name=name: engine.add(request(name, PROMPT)))
        running.collect(ended(name))
    await running.thread.call(lambda _: None)  # it ran between the last step and this
    assert busy == [False, False]
    assert caplog.text.count("what an idle engine does failed") == 2


async def test_calls_return_and_raise_what_the_function_does(running: Running) -> None:
    assert await running.thread.call(lambda engine: engine.pool.num_blocks) == 8
    names: list[str] = []
    await running.thread.call(lambda _: names.append(threading.current_thread().name))
    assert names == ["engine"]
    with pytest.raises(InvalidRequest):
        await running.thread.call(lambda engine: engine.add(request(prompt=())))


async def test_a_failing_step_is_told_and_the_engine_lives_on(running: Running) -> None:
    running.runner.fail_for.add("bad")
    await running.thread.call(lambda engine: engine.add(request("bad", PROMPT, epoch=3)))
    (report,) = running.collect(lambda report: bool(report.failed))
    (failed,) = report.failed
    assert (failed.request_id, failed.epoch, failed.code) == ("bad", 3, "internal")
    assert "fake model" not in failed.message, "what is inside stays inside"
    assert not failed.retryable
    assert report.events == []
    await running.thread.call(lambda engine: engine.add(request("good", PROMPT)))
    running.collect(ended("good"))
    await running.thread.call(assert_all_free)


async def test_a_posted_function_that_raises_does_no_harm(
    running: Running, caplog: pytest.LogCaptureFixture
) -> None:
    running.thread.post(lambda engine: engine.unpin(held([0])))
    assert await running.thread.call(lambda engine: engine.has_work) is False
    assert "a call on the engine thread failed" in caplog.text


async def test_a_receiver_that_raises_does_no_harm(caplog: pytest.LogCaptureFixture) -> None:
    def receive(report: StepReport) -> None:
        raise RuntimeError("deaf")

    engine, _ = fake_engine()
    thread = EngineThread(engine, receive)
    thread.start()
    done = threading.Event()
    try:
        await thread.call(lambda engine: engine.add(request("a", PROMPT, max_tokens=1)))
        thread.post(lambda _: done.set())
        assert await asyncio.to_thread(done.wait, TIMEOUT_S)
        assert await thread.call(lambda engine: engine.stats.num_finished) == 1
    finally:
        thread.stop()
    assert "the receiver of engine steps failed" in caplog.text


async def test_tokens_that_nobody_heard_of_end_their_request() -> None:
    """Else its client would wait for its deadline: the tokens will not come again."""
    heard: list[StepReport] = []
    told = threading.Event()

    def receive(report: StepReport) -> None:
        if report.events:
            raise RuntimeError("deaf to tokens")
        heard.append(report)
        told.set()

    engine, _ = fake_engine()
    thread = EngineThread(engine, receive)
    thread.start()
    try:
        await thread.call(lambda engine: engine.add(request("a", PROMPT, max_tokens=100)))
        assert await asyncio.to_thread(told.wait, TIMEOUT_S)
        assert await thread.call(lambda engine: engine.has_work) is False
    finally:
        thread.stop()
    (failed,) = heard[0].failed
    assert (failed.request_id, failed.code, failed.retryable) == ("a", "internal", False)
    assert heard[0].load.free_blocks == heard[0].load.total_blocks
    engine.pool.check()


async def test_a_stalled_engine_waits_and_goes_on_when_blocks_come_back(running: Running) -> None:
    def add(engine: Engine) -> None:
        engine.add(request("p1", PROMPT), Task.PREFILL)
        engine.add(request("p2", PROMPT[::-1]), Task.PREFILL)

    await running.thread.call(add)
    running.collect(lambda report: any(event.request_id == "p1" for event in report.events))
    steps = await running.thread.call(lambda engine: engine.stats.num_steps)
    assert steps == 1
    running.thread.post(lambda engine: engine.unpin(running.hooks.admissions[0][1]))
    running.collect(lambda report: any(event.request_id == "p2" for event in report.events))


async def test_a_cancelled_call_undoes_what_it_did(running: Running) -> None:
    entered, leave = threading.Event(), threading.Event()

    def reserve(engine: Engine) -> Reservation | None:
        entered.set()
        assert leave.wait(TIMEOUT_S)
        return engine.reserve(request("d", PROMPT), 19)

    def undo(engine: Engine, reservation: Reservation | None) -> None:
        if reservation is not None:
            engine.cancel(reservation)

    task = asyncio.create_task(running.thread.call(reserve, undo))
    assert await asyncio.to_thread(entered.wait, TIMEOUT_S)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    leave.set()
    # The first call follows `reserve`, which posts its undo; the second one follows the undo.
    await running.thread.call(lambda engine: None)
    await running.thread.call(assert_all_free)


async def test_a_call_cancelled_before_its_turn_never_runs(running: Running) -> None:
    entered, leave = threading.Event(), threading.Event()
    ran: list[str] = []

    def block(engine: Engine) -> None:
        entered.set()
        assert leave.wait(TIMEOUT_S)

    running.thread.post(block)
    assert await asyncio.to_thread(entered.wait, TIMEOUT_S)
    task = asyncio.create_task(running.thread.call(lambda _: ran.append("late")))
    await asyncio.wait({task}, timeout=0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    leave.set()
    await running.thread.call(lambda _: ran.append("next"))
    assert ran == ["next"]


async def test_stop_refuses_what_waits_and_what_comes_later(running: Running) -> None:
    entered, leave = threading.Event(), threading.Event()

    def block(engine: Engine) -> None:
        entered.set()
        assert leave.wait(TIMEOUT_S)

    running.thread.post(block)
    assert await asyncio.to_thread(entered.wait, TIMEOUT_S)
    waiting = asyncio.create_task(running.thread.call(lambda engine: engine.has_work))
    await asyncio.wait({waiting}, timeout=0)
    stopping = asyncio.create_task(asyncio.to_thread(running.thread.stop))
    await asyncio.wait({stopping}, timeout=0.05)
    assert not stopping.done()
    leave.set()
    await stopping
    with pytest.raises(Unavailable, match="stopped"):
        await waiting
    with pytest.raises(Unavailable, match="stopped"):
        await running.thread.call(lambda engine: engine.has_work)
    running.thread.post(lambda engine: engine.unpin(held([0])))
    running.thread.stop()


def test_a_thread_that_was_never_started_can_be_stopped() -> None:
    engine, _ = fake_engine()
    thread = EngineThread(engine, lambda report: None)
    thread.stop()
    thread.post(lambda engine: engine.unpin(held([0])))
    assert not engine.has_work


class Told:
    """Cores that nobody uses: which `rest` and `take` came, in order, and how often `share` was
    read."""

    num_steps, step_s = 3, 0.0

    def __init__(self) -> None:
        self.calls: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.num_looks = 0

    @property
    def share(self) -> float:
        self.num_looks += 1
        return 1.5

    def rest(self, *, resting: bool) -> None:
        self.calls.put("rests" if resting else "works")

    def take(self, num_prefill_tokens: int = 0, *, exact: bool = False) -> None:
        self.calls.put(f"{'exact ' if exact else ''}step of {num_prefill_tokens}")

    def give_back(self) -> None: ...

    def until(self, name: str) -> list[str]:
        seen = [self.calls.get(timeout=TIMEOUT_S)]
        while seen[-1] != name:
            seen.append(self.calls.get(timeout=TIMEOUT_S))
        return seen


async def test_others_hear_when_the_engine_waits_for_work() -> None:
    engine, _ = fake_engine(num_blocks=8)
    engine.steps.cores = told = Told()  # pyright: ignore[reportAttributeAccessIssue]
    thread = EngineThread(engine, lambda report: None)
    thread.start()
    assert told.until("rests") == ["rests"]
    await thread.call(lambda engine: engine.add(request("a", PROMPT)))
    seen = told.until("rests")
    assert seen[0] == "works"
    assert f"step of {len(PROMPT)}" in seen
    assert engine.stats.num_spare_core_steps == 3
    assert told.step_s == 1.5 * engine.stats.step_seconds
    assert told.num_looks == engine.stats.num_steps, "the next step may change it in between"
    await thread.call(lambda engine: engine.add(request("b", PROMPT, resume="exact")))
    assert f"exact step of {len(PROMPT)}" in told.until("rests")
    thread.stop()
    assert told.until("rests") == ["rests"], "others may have the cores of the dead"


COUNTS = """
import ctypes, queue, sys
from pathlib import Path
import torch
from baton.engine.thread import EngineThread
from baton.engine.core.run_ahead import RunAhead
from tests.fakes import fake_engine
openmp = ctypes.CDLL(next((Path(torch.__path__[0]) / "lib").glob("libgomp*")))
torch.set_num_threads(2)
engine, runner = fake_engine(num_blocks=8)
thread, counts = EngineThread(engine, lambda report: None), queue.SimpleQueue()
thread.start()
thread.post(lambda engine: counts.put(openmp.omp_get_max_threads()))
step = RunAhead(runner, 8).thread.submit(openmp.omp_get_max_threads)
print(counts.get(), step.result())
thread.stop()
"""


def test_threads_that_compute_have_torchs_number_of_threads() -> None:
    """Whatever OpenMP read when it was loaded: kernels of our own ask OpenMP, not torch."""
    told = subprocess.run(
        [sys.executable, "-c", COUNTS], env={**os.environ, "OMP_NUM_THREADS": "3"},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert told.stdout.split() == ["2", "2"]
