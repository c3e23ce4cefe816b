"""Prometheus metrics of resumable requests and their readers.

Plain counters, written by router/resumable/runs.py and read at scrape time. A request may have
several readers; its latencies and tokens are counted once, by its run (router/metrics/router.py).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Protocol

from prometheus_client import CollectorRegistry

from baton.runtime.metrics import Values
from router.metrics.metric_list import ROUTER


class Reading(enum.StrEnum):
    """From which event on a reader reads; a label in the metrics."""

    FIRST = "first"  # the reader began the request
    REPLAY = "replay"  # the reader asked again, from the first event
    RESUMED = "resumed"  # the reader asked again, after the event that it saw last


@dataclass(slots=True)
class RunStats:
    """Counters of resumable requests. `readers`: now; `readings`: all readers since the start."""

    begun: int = 0
    adopted: int = 0
    adopted_tokens: int = 0  # tokens in the logs of adopted requests
    not_adopted: int = 0  # requests claimed and given up again: this router cannot serve them
    abandoned: int = 0  # requests cancelled because nobody read them within their grace
    lost: int = 0  # requests that another router has taken
    readers: int = 0
    readings: dict[Reading, int] = field(default_factory=lambda: dict.fromkeys(Reading, 0))


class Watched(Protocol):
    """What is read of Runs (router/resumable/runs.py)."""

    @property
    def stats(self) -> RunStats: ...
    @property
    def num_live(self) -> int: ...


def watch_runs(registry: CollectorRegistry, runs: Watched) -> None:
    """Export the counters of `runs` in `registry`. Call it once per router."""
    ROUTER.watch(registry, lambda: _values(runs))


def _values(runs: Watched) -> dict[str, Values]:
    stats = runs.stats
    return {
        "baton_resumable_live": runs.num_live,
        "baton_resumable_readers": stats.readers,
        "baton_resumable_begun": stats.begun,
        "baton_resumable_adopted": stats.adopted,
        "baton_resumable_adopted_tokens": stats.adopted_tokens,
        "baton_resumable_not_adopted": stats.not_adopted,
        "baton_resumable_abandoned": stats.abandoned,
        "baton_resumable_lost": stats.lost,
        "baton_resumable_readings": {
            (start.value,): count for start, count in stats.readings.items()
        },
    }
