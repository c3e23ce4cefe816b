"""Prometheus metrics of resumable requests: begun, adopted, given up; who reads them, from where.

Plain counters, written by runs.py and adoption.py and read at scrape time. Readers are not
requests: latencies and tokens of a request are counted once, by its run (router/metrics/router.py).
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from router.tallies import counters


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
    registry.register(_Runs(runs))


class _Runs(Collector):
    def __init__(self, runs: Watched) -> None:
        self._runs = runs

    def collect(self) -> Iterable[Metric]:
        stats = self._runs.stats
        for name, text, value in (
            ("baton_resumable_live", "Resumable requests that run here", self._runs.num_live),
            ("baton_resumable_readers", "Answers to them under way", stats.readers),
        ):
            yield GaugeMetricFamily(name, text, value)
        yield from counters(
            ("baton_resumable_begun", "Resumable requests taken on", stats.begun),
            ("baton_resumable_adopted", "Taken over from routers that are gone", stats.adopted),
            ("baton_resumable_adopted_tokens", "Tokens in their logs", stats.adopted_tokens),
            ("baton_resumable_not_adopted", "Claimed, and given up again", stats.not_adopted),
            ("baton_resumable_abandoned", "Cancelled, for nobody read them", stats.abandoned),
            ("baton_resumable_lost", "Taken over by another router", stats.lost),
        )
        readings = CounterMetricFamily(
            "baton_resumable_readings", "Answers told from a log, by their start", labels=["start"]
        )
        for start, count in stats.readings.items():
            readings.add_metric([start.value], count)
        yield readings
