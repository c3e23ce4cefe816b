"""How many tasks a process' event loop has, by what they run: a leak shows before memory does.

Read at each scrape, on any thread. Not here: descriptors, threads and memory, which the kernel
tells (/proc).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


def watch_tasks(registry: CollectorRegistry, loop: asyncio.AbstractEventLoop) -> None:
    """Export `baton_asyncio_tasks{of}` in `registry`. Once per process."""
    registry.register(_Tasks(loop))


class _Tasks(Collector):
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def collect(self) -> Iterable[Metric]:
        # A coroutine of Cython's may have no name; its task counts all the same.
        names = Counter(
            str(getattr(task.get_coro(), "__qualname__", "unknown"))
            for task in asyncio.all_tasks(self._loop)
        )
        gauge = GaugeMetricFamily(
            "baton_asyncio_tasks", "Tasks of the event loop, by what they run", labels=["of"]
        )
        for name, count in sorted(names.items()):
            gauge.add_metric([name], count)
        yield gauge
