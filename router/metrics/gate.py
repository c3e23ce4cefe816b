"""The gate's Prometheus metrics: queue, waits, refusals, service levels, tokens by tenant.

The gate counts in plain numbers; they are read at scrape time. Only the waits are a histogram.
"""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from baton.runtime.metrics import TTFT_BUCKETS
from router.request.gate.gate import Gate
from router.tallies import Histogram


def watch_gate(registry: CollectorRegistry, gate: Gate) -> None:
    """Export `gate` in `registry`. Once per gate."""
    waits = Histogram(
        "baton_admission_wait_seconds",
        "Waits for room of requests that were let in; 0 for none",
        (),
        buckets=(0.0001, *TTFT_BUCKETS),
        registry=registry,
    )
    gate.stats.waits.append(waits.labels().observe)
    registry.register(_Admission(gate))


class _Admission(Collector):
    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    def collect(self) -> Iterable[Metric]:
        queue, stats = self._gate.queue, self._gate.stats
        yield GaugeMetricFamily("baton_admission_live", "Requests that were let in", queue.num_live)
        yield GaugeMetricFamily(
            "baton_admission_queued_tokens", "Estimated tokens that wait", queue.queued_tokens
        )
        waiting = GaugeMetricFamily(
            "baton_admission_queue_length", "Requests that wait for room", labels=["tenant"]
        )
        by_tenant = queue.queued_by_tenant()
        for tenant in by_tenant.keys() | stats.served.keys() | {""}:
            waiting.add_metric([tenant], by_tenant.get(tenant, 0))
        yield waiting
        yield GaugeMetricFamily(
            "baton_admission_drain_tokens_per_second",
            "How fast the queue drains, as last seen; 0 before",
            queue.tokens_per_s or 0.0,
        )
        yield CounterMetricFamily(
            "baton_admission_admitted", "Requests let in", queue.stats.admitted
        )
        yield CounterMetricFamily(
            "baton_admission_waited", "Of these, after a wait", queue.stats.queued
        )
        yield CounterMetricFamily(
            "baton_admission_cancelled", "Clients that left while they waited",
            queue.stats.cancelled,
        )  # fmt: skip
        for name in ("baton_admission_refused", "vllm:admission_rejections"):
            refused = CounterMetricFamily(name, "Requests refused", labels=["reason"])
            for reason, count in queue.stats.refused.items():
                refused.add_metric([reason.value], count)
            yield refused
        slo = CounterMetricFamily(
            "baton_slo_requests",
            "Requests with a service level of their own, by what became of it",
            labels=["slo", "outcome"],
        )
        for name, counts in (("ttft", stats.ttft), ("tpot", stats.tpot)):
            slo.add_metric([name, "met"], counts.met)
            slo.add_metric([name, "missed"], counts.missed)
            slo.add_metric([name, "refused"], counts.refused)
        yield slo
        tokens = CounterMetricFamily(
            "baton_tenant_tokens", "Prompt and output tokens served", labels=["tenant"]
        )
        for tenant, served in stats.served.items():
            tokens.add_metric([tenant], served)
        yield tokens
