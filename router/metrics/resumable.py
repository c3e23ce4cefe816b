"""Prometheus metrics of resumable requests: begun, adopted, given up; who reads them, from where.

Plain counters, written by runs.py and adoption.py and read at scrape time. Readers are not
requests: latencies and tokens of a request are counted once, by its run (router/metrics/router.py).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Protocol

from prometheus_client import CollectorRegistry

from baton.runtime.metrics import Values
from router.metrics.metric_list import ROUTER


class Reading(enum.StrEnum):
    """From where somebody reads; a label in the metrics."""

    FIRST = "first"  # whoever began the request
    REPLAY = "replay"  # asked again, from its first event
    RESUMED = "resumed"  # asked again, after the event seen last


@dataclass(slots=True)
class RunStats:
    """Counters for metrics and tests. `readers`: now; `readings`: in all."""

    begun: int = 0
    adopted: int = 0
    adopted_tokens: int = 0  # found in the logs of those
    not_adopted: int = 0  # claimed, and given up again: this router cannot serve them
    abandoned: int = 0  # nobody read them within their grace
    lost: int = 0  # another router has taken them
    readers: int = 0
    readings: dict[Reading, int] = field(default_factory=lambda: dict.fromkeys(Reading, 0))


class Watched(Protocol):
    """router/resumable/runs.py's Runs."""

    @property
    def stats(self) -> RunStats: ...
    @property
    def num_live(self) -> int: ...


def watch_runs(registry: CollectorRegistry, runs: Watched) -> None:
    """Export them in `registry`. Once per router."""
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
