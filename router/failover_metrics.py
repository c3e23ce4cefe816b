"""Prometheus metrics of failover: what nodes said too late, and what the store's fences refused.

Plain numbers, counted where it happens, are read at scrape time. Retries and migrations are in
router/metrics.py, replayed tokens in the nodes' own metrics.
"""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from router.ledger import StoreStats
from router.node_session import SessionStats


def watch_failover(registry: CollectorRegistry, sessions: SessionStats, store: StoreStats) -> None:
    """Export both in `registry`. Once per router."""
    registry.register(_Failover(sessions, store))


class _Failover(Collector):
    def __init__(self, sessions: SessionStats, store: StoreStats) -> None:
        self._sessions = sessions
        self._store = store

    def collect(self) -> Iterable[Metric]:
        yield CounterMetricFamily(
            "baton_late_events",
            "Events of nodes that no longer had the request; dropped",
            self._sessions.late_events,
        )
        yield CounterMetricFamily(
            "baton_store_refused_writes",
            "Writes that the store answered with a fence, a gap, an unknown record",
            self._store.refused,
        )
