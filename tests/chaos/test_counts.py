"""Counting sees what has come, by kind, and nothing else."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections import Counter
from pathlib import Path

from prometheus_client import CollectorRegistry

from baton.runtime.metrics import render
from baton.runtime.task_metrics import watch_tasks
from tests.chaos.counts import Vitals, descriptors_of, grown, tasks_in, threads_of


async def vitals() -> Vitals:
    registry, pid = CollectorRegistry(), os.getpid()
    watch_tasks(registry, asyncio.get_running_loop())
    tasks = tasks_in(render(registry).decode())
    return Vitals(pid, descriptors_of(pid), threads_of(pid), tasks)


def name_it(thread: threading.Thread, name: str) -> None:
    """For the kernel, as gRPC does it with its own; before Python 3.14 a thread's name is not."""
    Path(f"/proc/self/task/{thread.native_id}/comm").write_text(name)


async def test_what_has_come_is_named_and_what_may_be_kept_is_not(tmp_path: Path) -> None:
    async def sleeper(until: asyncio.Event) -> None:
        await until.wait()

    before, until, stop = await vitals(), asyncio.Event(), threading.Event()
    assert grown(before, before, {}) == {}
    file = tmp_path / "held"
    task = asyncio.create_task(sleeper(until))
    thread = threading.Thread(target=stop.wait)
    thread.start()
    name_it(thread, "counted")
    with socket.socket(), file.open("w"):
        more = await vitals()
    stop.set()
    thread.join()
    until.set()
    await task
    came = set(grown(before, more, {}).values())
    assert more.descriptors["socket"] >= 1
    assert f"descriptors {file}: 0 became 1" in came
    assert "threads counted: 0 became 1" in came
    assert any(each.startswith("tasks ") and "sleeper: 0 became 1" in each for each in came)
    kept = grown(before, more, {"counted": 1, str(file): 1}).values()
    assert not any("counted" in each or str(file) in each for each in kept)


def test_less_is_no_growth() -> None:
    one = Vitals(1, Counter(socket=2), Counter(python=3), Counter({"run": 1}))
    none = Vitals(1, Counter(), Counter(), Counter())
    assert grown(one, none, {}) == {}
    came = grown(none, one, {"socket": 2, "python": 3})
    assert came == {"tasks run": "tasks run: 0 became 1"}
