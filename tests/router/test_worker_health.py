"""What a supervisor knows of its workers: what each one's health port says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from baton.protocol.clock import SystemClock
from baton.runtime.health_port import Health, health_port
from router.workers import Worker

HOST = "127.0.0.1"


@dataclass
class FakeProcess:
    returncode: int | None = None


def worker(port: int | None) -> Worker:
    process: Any = FakeProcess()
    return Worker(0, (), process, {} if port is None else {"health_port": port})


async def test_a_worker_is_asked_how_it_is() -> None:
    health = Health(SystemClock(), 60.0)
    async with health_port(health, HOST, 0):
        one = worker(health.port)
        await one.ask(HOST)
        assert (one.gets_on, one.takes_work) == (True, False)
        health.started(lambda: True, lambda: True)
        await one.ask(HOST)
        assert (one.gets_on, one.takes_work) == (True, True)
        health.started(lambda: False, lambda: True)
        await one.ask(HOST)
        assert (one.gets_on, one.takes_work) == (False, False)
    health.started(lambda: True, lambda: True)
    await one.ask(HOST)  # a process that does not answer hangs
    assert (one.gets_on, one.takes_work) == (False, False)


async def test_one_that_starts_or_has_ended_is_not_asked() -> None:
    starting = worker(None)
    await starting.ask(HOST)
    assert (starting.gets_on, starting.takes_work) == (True, False)
    ended = worker(9)
    ended.process = FakeProcess(returncode=1)  # type: ignore[assignment]
    await ended.ask(HOST)
    assert (ended.gets_on, ended.takes_work) == (True, False)
