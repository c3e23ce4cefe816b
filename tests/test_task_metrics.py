"""Tasks of an event loop are counted by what they run, also from another thread."""

from __future__ import annotations

import asyncio

from prometheus_client import CollectorRegistry

from baton.runtime.metrics import render
from baton.runtime.task_metrics import watch_tasks


async def waits(until: asyncio.Event) -> None:
    await until.wait()


async def test_a_task_is_counted_as_long_as_it_runs() -> None:
    registry, until = CollectorRegistry(), asyncio.Event()
    watch_tasks(registry, asyncio.get_running_loop())
    tasks = [asyncio.create_task(waits(until)) for _ in range(3)]
    assert b'baton_asyncio_tasks{of="waits"} 3.0' in render(registry)
    assert b'{of="waits"} 3.0' in await asyncio.to_thread(render, registry)
    until.set()
    await asyncio.gather(*tasks)
    assert b'of="waits"' not in render(registry)
