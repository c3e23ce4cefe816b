"""What every process shows of itself: the tasks of its event loop, and what the kernel knows of it.

A task that leaks shows here before it does in memory. Each scrape reads the numbers, on any thread.
"""

from __future__ import annotations

import asyncio
from collections import Counter

from prometheus_client import CollectorRegistry, ProcessCollector

from baton.runtime.metrics import ASYNCIO_TASKS, MetricList, Values


def watch_process(registry: CollectorRegistry, loop: asyncio.AbstractEventLoop) -> None:
    """Export the metrics of PROCESS in `registry`. Once per process."""
    watch_tasks(registry, loop)
    ProcessCollector(registry=registry)


def watch_tasks(registry: CollectorRegistry, loop: asyncio.AbstractEventLoop) -> None:
    """Export `baton_asyncio_tasks{of}` in `registry`. Once per process."""

    def values() -> dict[str, Values]:
        # A coroutine made by Cython may have no name; its task is counted as "unknown".
        names = Counter(
            str(getattr(task.get_coro(), "__qualname__", "unknown"))
            for task in asyncio.all_tasks(loop)
        )
        return {ASYNCIO_TASKS.name: {(name,): count for name, count in sorted(names.items())}}

    MetricList(ASYNCIO_TASKS).watch(registry, values)
