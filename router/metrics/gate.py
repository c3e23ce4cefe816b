"""The gate's Prometheus metrics: queue, waits, refusals, service levels, tokens by tenant.

The gate counts in plain numbers; they are read at scrape time. Only the waits are a histogram.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from baton.runtime.metrics import Values
from router.metrics.metric_list import ROUTER
from router.request.gate.gate import Gate
from router.tallies import Histogram


def watch_gate(registry: CollectorRegistry, gate: Gate) -> None:
    """Export `gate` in `registry`. Once per gate."""
    waits = Histogram(ROUTER["baton_admission_wait_seconds"], registry)
    gate.stats.waits.append(waits.labels().observe)
    ROUTER.watch(registry, lambda: _values(gate))


def _values(gate: Gate) -> dict[str, Values]:
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
