"""Prometheus metrics of what goes wrong around a router: its store, its nodes, second tries.

Read at scrape time from the counters of store/guard.py, store/catch_up.py, nodes/health.py and
retry_budget.py, and from the nodes' records.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from baton.protocol.handles import Role
from router.nodes.registry import NodeRegistry
from router.request.retry_budget import RetryBudget
from router.store.guard import StoreGuard
from router.tallies import counters


@dataclass(frozen=True, slots=True)
class WatchedParts:
    """Where the numbers are."""

    store: StoreGuard
    registry: NodeRegistry
    retries: RetryBudget


def watch_failures(registry: CollectorRegistry, watched: WatchedParts) -> None:
    """Export them in `registry`. Once per router."""
    registry.register(_Failures(watched))


class _Failures(Collector):
    def __init__(self, watched: WatchedParts) -> None:
        self._watched = watched

    def collect(self) -> Iterable[Metric]:
        store, late = self._watched.store.stats, self._watched.store.catch_up.stats
        yield GaugeMetricFamily("baton_store_away", "1 while the store is away", float(store.away))
        yield from counters(
            ("baton_store_outages", "Times the store went away", store.outages),
            ("baton_store_skipped", "Calls not made, or failed, with it away", store.skipped),
            ("baton_store_refused", "Requests fenced or gapped in the store", store.refused),
            ("baton_store_late_requests", "Requests that caught up", late.requests),
            ("baton_store_late_tokens", "Tokens logged after an outage", late.tokens),
            ("baton_store_dropped_tokens", "Tokens that no log will have", late.dropped),
        )
        registry, retries = self._watched.registry, self._watched.retries
        health = registry.health.stats
        yield from counters(
            ("baton_node_deaths", "Sessions with nodes that broke", health.deaths),
            ("baton_node_stalls", "Of these, ended by the watchdog", health.stalls),
            ("baton_node_quarantines", "Nodes put in quarantine", health.quarantines),
            ("baton_node_panics", "Times most nodes were unhealthy", health.panics),
            ("baton_stale_events", "Events of requests that had moved on", health.stale_events),
        )
        precisions = GaugeMetricFamily(
            "baton_node_precisions",
            "Precisions that nodes of a role compute in; with more than one, failovers may change"
            " tokens",
            labels=["role"],
        )
        for role in Role:
            told = [record for record in registry.records() if record.precision]
            mine = [record for record in told if record.role is role]
            found = {(record.precision, record.deterministic) for record in mine}
            precisions.add_metric([role.value], len(found))
        yield precisions
        spent = CounterMetricFamily(
            "baton_retry_budget", "Second tries after refusals", labels=["outcome"]
        )
        spent.add_metric(["granted"], retries.granted)
        spent.add_metric(["refused"], retries.refused)
        yield spent
