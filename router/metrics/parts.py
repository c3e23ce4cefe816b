"""Prometheus metrics of a router's parts: the gate, the store, the nodes' health, the retries.

The parts count in plain numbers, which are read at scrape time. Only the gate's waits are a
histogram, which is updated at each wait.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from itertools import product

from prometheus_client import CollectorRegistry

from baton.protocol.handles import Role
from baton.runtime.metrics import Values
from router.metrics.metric_list import ROUTER
from router.nodes.policy import NodeSnapshot
from router.nodes.registry import NodeRegistry
from router.request.gate.gate import Gate
from router.request.retry_budget import RetryBudget
from router.store.guard import StoreGuard
from router.tallies import Histogram


class NodeState(enum.StrEnum):
    """What a router may do with a node; a label in the metrics."""

    READY = "ready"
    LEAVING = "draining"  # or asleep: it takes no new requests
    STALLED = "stalled"  # its engine makes no progress
    SHUNNED = "quarantined"  # or its group of ranks is not whole
    AWAY = "away"  # known, and not connected


@dataclass(frozen=True, slots=True)
class WatchedParts:
    """The parts whose counters are exported."""

    store: StoreGuard
    registry: NodeRegistry
    retries: RetryBudget


def watch_failures(registry: CollectorRegistry, watched: WatchedParts) -> None:
    """Export the counters of store, nodes and retries in `registry`. Call it once per router."""
    ROUTER.watch(registry, lambda: _of_failures(watched))
    ROUTER.watch(registry, lambda: _of_nodes(watched.registry))


def _of_failures(watched: WatchedParts) -> dict[str, Values]:
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
    """Return in how many different precisions the nodes of a role compute, as they report."""
    mine = [each for each in registry.records() if each.role is role and each.precision]
    return len({(each.precision, each.deterministic) for each in mine})


def _of_nodes(registry: NodeRegistry) -> dict[str, Values]:
    states = dict.fromkeys(product((role.value for role in Role), NodeState), 0)
    for snapshot in (*registry.snapshots(), *registry.snapshots(encoding=True)):
        states[snapshot.role.value, _state(snapshot)] += 1
    live: dict[tuple[str, ...], float] = {}
    for status in registry.statuses():
        if status.record is not None:
            role = status.record.role.value
            states[role, NodeState.AWAY] += not status.connected
            live[role, status.record.node_id] = status.assigned
    return {
        "baton_router_nodes": {(role, state.value): n for (role, state), n in states.items()},
        "baton_node_live_requests": live,
    }


def _state(snapshot: NodeSnapshot) -> NodeState:
    if snapshot.load.stalled:
        return NodeState.STALLED
    if snapshot.shunned:
        return NodeState.SHUNNED
    return NodeState.READY if snapshot.takes_requests else NodeState.LEAVING


def watch_gate(registry: CollectorRegistry, gate: Gate) -> None:
    """Export the numbers of `gate` in `registry`. Call it once per gate."""
    waits = Histogram(ROUTER["baton_admission_wait_seconds"], registry)
    gate.stats.waits.append(waits.labels().observe)
    ROUTER.watch(registry, lambda: _of_gate(gate))


def _of_gate(gate: Gate) -> dict[str, Values]:
    queue, stats = gate.queue, gate.stats
    waiting = queue.queued_by_tenant()
    tenants = waiting.keys() | stats.served.keys() | {""}
    return {
        "baton_admission_live": queue.num_live,
        "baton_admission_queued_tokens": queue.queued_tokens,
        "baton_admission_queue_length": {(name,): waiting.get(name, 0) for name in tenants},
        "baton_admission_drain_tokens_per_second": queue.tokens_per_s or 0.0,
        "baton_admission_admitted": queue.stats.admitted,
        "baton_admission_waited": queue.stats.queued,
        "baton_admission_cancelled": queue.stats.cancelled,
        "baton_admission_refused": {
            (reason.value,): count for reason, count in queue.stats.refused.items()
        },
        "baton_slo_requests": {
            (slo, outcome): count
            for slo, counts in (("ttft", stats.ttft), ("tpot", stats.tpot))
            for outcome, count in (
                ("met", counts.met), ("missed", counts.missed), ("refused", counts.refused),
            )
        },
        "baton_tenant_tokens": {(tenant,): served for tenant, served in stats.served.items()},
    }  # fmt: skip
