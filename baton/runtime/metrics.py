"""Prometheus metrics shared by all processes: how they are kept and rendered, and a node's own.

Own names are `baton_*`; where vLLM has a name for the same thing it is exported too, so that
vLLM's Grafana board works. Every process has its own registry (never prometheus-client's global).
A router's metrics are in router/metrics/router.py.

Nodes do not push: `NodeMetrics` asks its sources at scrape time, so that the engine counts in plain
integers and pays nothing for being watched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from prometheus_client import CollectorRegistry, Histogram, disable_created_metrics
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from baton.protocol.handles import NodeLoad

# Each counter would bring a second series that says when it began. The library only knows a switch
# for the whole process.
disable_created_metrics()

CONTENT_TYPE: Final = CONTENT_TYPE_LATEST
# Seconds; vLLM's buckets, finer below 10 ms because a small model on a CPU is that fast.
TTFT_BUCKETS: Final = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0,
)  # fmt: skip
TPOT_BUCKETS: Final = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5,
    5.0, 10.0,
)  # fmt: skip
E2E_BUCKETS: Final = (
    0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0,
    60.0, 120.0, 240.0, 480.0,
)  # fmt: skip
TRANSFER_BUCKETS: Final = (
    0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0,
)  # fmt: skip


def render(registry: CollectorRegistry) -> bytes:
    """The registry in Prometheus' text format, for a body of CONTENT_TYPE."""
    return generate_latest(registry)


@dataclass(frozen=True, slots=True)
class EngineTotals:
    """What an engine has counted since its start."""

    steps: int = 0
    steps_ahead: int = 0  # planned while the one before ran
    prefill_chunks: int = 0  # computed; more than one per prompt = chunked prefill
    prompt_tokens: int = 0  # computed, prefix hits excluded
    generation_tokens: int = 0
    prefix_queries: int = 0  # prompt tokens looked up in the prefix map
    prefix_hits: int = 0  # of which found
    preemptions: int = 0
    swapped_out_blocks: int = 0  # copied to host memory
    swapped_in_blocks: int = 0
    forks: int = 0  # block tables shared by parallel samples and beams
    copied_blocks: int = 0  # copies on write
    window_freed_blocks: int = 0  # left behind by sliding windows
    export_refusals: int = 0  # steps that left a prompt waiting for export room
    drafted_tokens: int = 0  # speculation: proposed
    accepted_tokens: int = 0  # of which right
    replayed_tokens: int = 0  # known output tokens, computed one by one again
    pooled_prompts: int = 0  # whose hidden states were asked for
    pooled_tokens: int = 0  # of these
    # Requests asked to leave, by how much of their KV did ("whole", ...) or why none did.
    departures: Mapping[str, int] = field(default_factory=dict[str, int])
    left_behind_tokens: int = 0  # of those that left: KV to be computed again
    busy_seconds: float = 0.0  # of steps
    read_bytes: float = 0.0  # that these needed to read, at least: weights and KV
    flops: float = 0.0  # and to compute


@dataclass(frozen=True, slots=True)
class LaneTotals:
    """What a KV connector has counted of one lane since its start."""

    sent_bytes: int = 0
    received_bytes: int = 0
    adopted_bytes: int = 0  # read where they lie
    sent_frames: int = 0
    received_frames: int = 0
    fetches: int = 0  # that ended well
    fetch_seconds: float = 0.0  # of these
    tails: int = 0  # hand-overs acknowledged here
    tail_seconds: float = 0.0  # from token 1 (or a later FETCH) to the acknowledgement
    corrupt_frames: int = 0
    retries: int = 0
    fallbacks: int = 0  # conversations that went on to the next lane
    connections: int = 0
    reused_connections: int = 0
    expired_leases: int = 0  # by the lane of the export's last FETCH; "none": nobody asked for it


@dataclass(frozen=True, slots=True)
class TransferTotals:
    """What a KV connector has counted since its start."""

    sent_bytes: int = 0
    received_bytes: int = 0
    exports: int = 0
    active_exports: int = 0
    export_bytes: int = 0  # pinned under leases now
    expired_leases: int = 0
    held_back: int = 0  # looks at exports that found no room in the byte budget
    window_bytes: int = 0  # not fetched: no later token would have seen them
    lanes: Mapping[str, LaneTotals] = field(default_factory=dict[str, LaneTotals])
    # By outcome: "ok" or an error code.
    fetches: Mapping[str, int] = field(default_factory=dict[str, int])


@dataclass(frozen=True, slots=True)
class NodeFigures:
    """Everything a node shows at one scrape."""

    load: NodeLoad
    engine: EngineTotals
    transfer: TransferTotals
    limits: tuple[float, float] = (0.0, 0.0)  # bytes/s read, FLOP/s of products; 0 = unknown
    kv_waste: float = 0.0  # share of allocated slots without a token, as of the last heartbeat


class NodeMetrics:
    """A node's metrics: `snapshot` is called at each scrape, on its thread, and must not block."""

    def __init__(
        self, model: str, node_id: str, role: str, snapshot: Callable[[], NodeFigures]
    ) -> None:
        self.registry = CollectorRegistry()
        self._labels = {"model_name": model, "node": node_id, "role": role}
        self.registry.register(_NodeCollector(self._labels, snapshot))
        self._fetch_seconds = Histogram(
            "baton_kv_transfer_seconds",
            "Time from subscribing to an export until every digest was checked",
            list(self._labels),
            buckets=TRANSFER_BUCKETS,
            registry=self.registry,
        ).labels(**self._labels)

    def observe_fetch(self, seconds: float) -> None:
        """A KV fetch ended well after `seconds`. Any thread."""
        self._fetch_seconds.observe(seconds)

    def render(self) -> bytes:
        return render(self.registry)


class _NodeCollector(Collector):
    def __init__(self, labels: Mapping[str, str], snapshot: Callable[[], NodeFigures]) -> None:
        self._labels = dict(labels)
        self._snapshot = snapshot

    def describe(self) -> Iterable[Metric]:
        return []  # registered before the engine runs: nothing to ask yet

    def collect(self) -> Iterable[Metric]:
        now = self._snapshot()
        for name, help_text, value in _gauges(now):
            yield self._gauge(name, help_text, value)
        for name, help_text, value in _counters(now):
            yield self._counter(name, help_text, value)
        name, help_text = "baton_kv_transfer_fetches", "KV fetches by outcome"
        yield self._by(name, help_text, "outcome", now.transfer.fetches)
        name, help_text = "baton_departures", "Requests asked to leave, by how much KV left"
        yield self._by(name, help_text, "kv", now.engine.departures)
        yield iterations(
            [
                (
                    list(self._labels.values()),
                    (now.engine.steps, now.engine.prompt_tokens + now.engine.generation_tokens),
                )
            ],
            list(self._labels),
        )
        yield waiting_by_reason([(list(self._labels.values()), now.load)], list(self._labels))
        for name, help_text, value_of in _LANE_COUNTERS:
            yield self._by_lane(name, help_text, value_of, now.transfer.lanes)

    def _gauge(self, name: str, help_text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, help_text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family

    def _counter(self, name: str, help_text: str, value: float) -> Metric:
        family = CounterMetricFamily(name, help_text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family

    def _by(self, name: str, help_text: str, label: str, counts: Mapping[str, int]) -> Metric:
        family = CounterMetricFamily(name, help_text, labels=[*self._labels, label])
        for value, count in sorted(counts.items()):
            family.add_metric([*self._labels.values(), value], count)
        return family

    def _by_lane(
        self,
        name: str,
        help_text: str,
        value_of: Callable[[LaneTotals], float],
        lanes: Mapping[str, LaneTotals],
    ) -> Metric:
        family = CounterMetricFamily(name, help_text, labels=[*self._labels, "lane"])
        for lane, totals in sorted(lanes.items()):
            family.add_metric([*self._labels.values(), lane], value_of(totals))
        return family


# Name, help, value: one series per lane that was used.
_LANE_COUNTERS: Final[tuple[tuple[str, str, Callable[[LaneTotals], float]], ...]] = (
    ("baton_kv_lane_sent_bytes", "KV bytes sent", lambda t: t.sent_bytes),
    ("baton_kv_lane_received_bytes", "KV bytes received and verified", lambda t: t.received_bytes),
    ("baton_kv_lane_adopted_bytes", "KV bytes read where they lie", lambda t: t.adopted_bytes),
    ("baton_kv_lane_sent_frames", "DATA frames sent", lambda t: t.sent_frames),
    ("baton_kv_lane_received_frames", "DATA frames received", lambda t: t.received_frames),
    ("baton_kv_lane_fetches", "KV fetches that ended well", lambda t: t.fetches),
    ("baton_kv_lane_fetch_seconds", "Time of these fetches", lambda t: t.fetch_seconds),
    ("baton_kv_lane_exposed_tails", "Hand-overs acknowledged", lambda t: t.tails),
    ("baton_kv_lane_exposed_tail_seconds", "Token 1 to acknowledgement", lambda t: t.tail_seconds),
    ("baton_kv_lane_corrupt_frames", "Frames refused", lambda t: t.corrupt_frames),
    ("baton_kv_lane_retries", "Fetches begun again after a corrupt frame", lambda t: t.retries),
    ("baton_kv_lane_fallbacks", "Conversations that took the next lane", lambda t: t.fallbacks),
    ("baton_kv_lane_connections", "Connections opened from here", lambda t: t.connections),
    ("baton_kv_lane_reused_connections", "Taken up again", lambda t: t.reused_connections),
    ("baton_kv_lane_expired_leases", "Exports nobody claimed", lambda t: t.expired_leases),
)


def iterations(
    nodes: Sequence[tuple[Sequence[str], tuple[int, int]]], labels: Sequence[str]
) -> Metric:
    """vLLM's histogram of tokens per engine step, of nodes by the values of their labels: steps,
    and tokens of all. Only sum and count are kept."""
    name, text = "vllm:iteration_tokens_total", "Tokens per engine step"
    family = HistogramMetricFamily(name, text, labels=list(labels))
    for values, (steps, tokens) in nodes:
        family.add_metric(list(values), [("+Inf", steps)], tokens)
    return family


def waiting_by_reason(
    nodes: Sequence[tuple[Sequence[str], NodeLoad]], labels: Sequence[str]
) -> Metric:
    """vLLM's: for room on the node ("capacity"), or for KV that is on its way ("deferred")."""
    name, text = "vllm:num_requests_waiting_by_reason", "Requests waiting, by what for"
    family = GaugeMetricFamily(name, text, labels=[*labels, "reason"])
    for values, load in nodes:
        family.add_metric([*values, "capacity"], load.waiting)
        family.add_metric([*values, "deferred"], load.fetching)
    return family


def cache_usage(load: NodeLoad) -> float:
    """Share of a node's KV blocks in use, 0 to 1."""
    return 1.0 - load.free_blocks / load.total_blocks if load.total_blocks else 0.0


def _gauges(now: NodeFigures) -> Iterable[tuple[str, str, float]]:
    load, transfer = now.load, now.transfer
    return (
        ("vllm:num_requests_running", "Requests in the running batch", load.running),
        ("vllm:num_requests_waiting", "Requests waiting to be scheduled", load.waiting),
        ("vllm:kv_cache_usage_perc", "KV blocks in use; 1 = all", cache_usage(load)),
        ("baton_kv_blocks_free", "KV blocks that a request could have", load.free_blocks),
        ("baton_kv_blocks_total", "KV blocks of the pool", load.total_blocks),
        ("baton_kv_waste", "Share of allocated KV slots without a token", now.kv_waste),
        ("vllm:num_requests_swapped", "Requests swapped to host memory", load.swapped),
        ("baton_waiting_tokens", "Prompt tokens not yet computed", load.waiting_tokens),
        ("baton_step_seconds", "Moving mean of the engine's steps", load.step_seconds),
        ("baton_mbu", "Share of the read bandwidth, last steps", load.mbu),
        ("baton_mfu", "Share of the matrix products' rate, last steps", load.mfu),
        ("baton_memory_bandwidth_bytes_per_second", "Measured or given", now.limits[0]),
        ("baton_peak_flops", "Rate of matrix products, measured or given", now.limits[1]),
        ("baton_draining", "1 while the node takes no new requests", float(load.draining)),
        ("baton_kv_transfer_fetching", "KV fetches under way or queued", load.fetching),
        ("baton_kv_transfer_active_exports", "Exports under a lease", transfer.active_exports),
        ("baton_kv_transfer_export_bytes", "Bytes pinned under leases", transfer.export_bytes),
    )


def _counters(now: NodeFigures) -> Iterable[tuple[str, str, float]]:
    engine, transfer = now.engine, now.transfer
    return (
        ("vllm:prompt_tokens", "Prompt tokens computed", engine.prompt_tokens),
        ("vllm:generation_tokens", "Tokens sampled", engine.generation_tokens),
        ("vllm:num_preemptions", "Requests preempted", engine.preemptions),
        ("vllm:prefix_cache_queries", "Prompt tokens looked up", engine.prefix_queries),
        ("vllm:prefix_cache_hits", "Prompt tokens found", engine.prefix_hits),
        ("baton_prompt_tokens", "Prompt tokens computed", engine.prompt_tokens),
        ("baton_generation_tokens", "Tokens sampled", engine.generation_tokens),
        ("baton_preemptions", "Requests preempted", engine.preemptions),
        ("baton_prefix_cache_queries", "Prompt tokens looked up", engine.prefix_queries),
        ("baton_prefix_cache_hits", "Prompt tokens found", engine.prefix_hits),
        ("baton_swapped_out_blocks", "KV blocks copied to the host", engine.swapped_out_blocks),
        ("baton_swapped_in_blocks", "KV blocks copied back", engine.swapped_in_blocks),
        ("baton_forks", "Block tables shared by samples", engine.forks),
        ("baton_copied_blocks", "KV blocks copied on write", engine.copied_blocks),
        ("baton_window_freed_blocks", "KV blocks no token sees", engine.window_freed_blocks),
        ("baton_export_refusals", "Steps without room for an export", engine.export_refusals),
        ("vllm:spec_decode_num_draft_tokens", "Tokens proposed", engine.drafted_tokens),
        ("vllm:spec_decode_num_accepted_tokens", "Of these, right", engine.accepted_tokens),
        ("baton_replayed_tokens", "Output tokens computed again", engine.replayed_tokens),
        ("baton_engine_steps", "Engine steps", engine.steps),
        ("baton_engine_steps_ahead", "Of these, planned ahead", engine.steps_ahead),
        ("baton_engine_busy_seconds", "Time in engine steps", engine.busy_seconds),
        ("baton_read_bytes", "Weights and KV that steps had to read", engine.read_bytes),
        ("baton_flops", "Floating-point operations of steps", engine.flops),
        ("vllm:estimated_read_bytes_per_gpu", "As baton_read_bytes", engine.read_bytes),
        ("vllm:estimated_flops_per_gpu", "As baton_flops", engine.flops),
        ("baton_pooled_prompts", "Prompts turned into vectors", engine.pooled_prompts),
        ("baton_pooled_tokens", "Tokens of these", engine.pooled_tokens),
        ("baton_left_behind_tokens", "Handed on without their KV", engine.left_behind_tokens),
        ("baton_prefill_chunks", "Chunks of prompts computed", engine.prefill_chunks),
        ("baton_kv_transfer_exports", "Exports made", transfer.exports),
        ("baton_kv_transfer_expired_leases", "Exports nobody claimed", transfer.expired_leases),
        ("baton_kv_transfer_held_back", "Looks without room for an export", transfer.held_back),
        ("baton_kv_transfer_window_bytes", "KV no token would see", transfer.window_bytes),
        ("baton_kv_transfer_sent_bytes", "KV bytes sent", transfer.sent_bytes),
        ("baton_kv_transfer_bytes", "KV bytes received and verified", transfer.received_bytes),
    )
