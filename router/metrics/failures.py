"""Prometheus metrics of what goes wrong around a router: its store, its nodes, second tries.

Read at scrape time from the counters of store/ledger.py, store/catch_up.py, nodes/health.py and
retry_budget.py, and from the nodes' records.
"""

from __future__ import annotations

from dataclasses import dataclass

from prometheus_client import CollectorRegistry

from baton.protocol.handles import Role
from baton.runtime.metrics import Values
from router.metrics.metric_list import ROUTER
from router.nodes.registry import NodeRegistry
from router.request.retry_budget import RetryBudget
from router.store.ledger import StoreGuard


@dataclass(frozen=True, slots=True)
class WatchedParts:
    """Where the numbers are."""

    store: StoreGuard
    registry: NodeRegistry
    retries: RetryBudget


def watch_failures(registry: CollectorRegistry, watched: WatchedParts) -> None:
    """Export them in `registry`. Once per router."""
    ROUTER.watch(registry, lambda: _values(watched))


def _values(watched: WatchedParts) -> dict[str, Values]:
    store, late = watched.store.stats, watched.store.catch_up.stats
    health, retries = watched.registry.health.stats, watched.retries
    return {
        "baton_store_away": float(store.away),
        "baton_store_outages": store.outages,
        "baton_store_skipped": store.skipped,
        "baton_store_refused": store.refused,
        "baton_store_late_requests": late.requests,
        "baton_store_late_tokens": late.tokens,
        "baton_store_dropped_tokens": late.dropped,
        "baton_node_deaths": health.deaths,
        "baton_node_stalls": health.stalls,
        "baton_node_quarantines": health.quarantines,
        "baton_node_panics": health.panics,
        "baton_stale_events": health.stale_events,
        "baton_node_precisions": {
            (role.value,): _num_precisions(watched.registry, role) for role in Role
        },
        "baton_retry_budget": {("granted",): retries.granted, ("refused",): retries.refused},
    }


def _num_precisions(registry: NodeRegistry, role: Role) -> int:
    """How many precisions the nodes of a role have said that they compute in."""
    mine = [each for each in registry.records() if each.role is role and each.precision]
    return len({(each.precision, each.deterministic) for each in mine})
