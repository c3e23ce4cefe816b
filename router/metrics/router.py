"""The router's Prometheus metrics: latencies and counts of requests, the nodes' load as seen here.

Each request has one RequestMeter, which counts tokens as they are shown. Names and meanings are in
router/metrics/metric_list.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from prometheus_client import CollectorRegistry

from baton.protocol.handles import NodeLoad, NodeRecord
from baton.protocol.sampling import SamplingParams
from baton.runtime.metrics import Sums, Values, cache_usage, render
from baton.text.pieces import PieceStats
from router.metrics.metric_list import ROUTER
from router.metrics.vllm import Finished, VllmMetrics, VllmOfModel, node_info
from router.nodes.migration import MigrationStats
from router.request.trace import RequestTrace
from router.tallies import Counter, Histogram


class _OfModel:
    """The instruments of one model, whose labels are looked up once."""

    def __init__(self, by: _Instruments, vllm: VllmMetrics, model: str) -> None:
        self.vllm = VllmOfModel(vllm, model)
        self.first_token = by.first_token.labels(model)
        self.inter_token = by.inter_token.labels(model)
        self.per_token = by.per_token.labels(model)
        self.e2e = by.e2e.labels(model)
        self.queue = by.queue.labels(model)
        self.handover = by.handover.labels(model)
        self.prompt_tokens = by.prompt_tokens.labels(model)
        self.generation_tokens = by.generation_tokens.labels(model)
        self.retries = by.retries.labels(model)
        self.prefix_queries = by.prefix_queries.labels(model)
        self.prefix_hits = by.prefix_hits.labels(model)


@dataclass(frozen=True, slots=True)
class _Instruments:
    """All instruments that requests write."""

    first_token: Histogram
    inter_token: Histogram
    per_token: Histogram
    e2e: Histogram
    queue: Histogram
    handover: Histogram
    prompt_tokens: Counter
    generation_tokens: Counter
    success: Counter
    failure: Counter
    retries: Counter
    prefix_queries: Counter
    prefix_hits: Counter
    nodes: Counter
    pooling: Counter


class RouterMetrics:
    """All metrics of one router process, in its own registry."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._nodes: Callable[[], Sequence[NodeRecord]] = tuple
        self._migrations: Callable[[], MigrationStats] = MigrationStats
        self._adapters: Callable[[], set[str]] = set
        self._live = 0
        self._models: dict[str, _OfModel] = {}
        self.vllm = VllmMetrics(self.registry)
        self.instruments = _instruments(self.registry)
        ROUTER.watch(self.registry, lambda: _of_nodes(self._nodes(), self._live))
        ROUTER.watch(self.registry, lambda: _of_migrations(self._migrations()))
        ROUTER.watch(self.registry, lambda: node_info(self._nodes(), self._adapters()))

    def watch_nodes(self, nodes: Callable[[], Sequence[NodeRecord]]) -> None:
        """Read the load of the nodes from `nodes` at each scrape."""
        self._nodes = nodes

    def watch_migrations(self, migrations: Callable[[], MigrationStats]) -> None:
        """Read the counters of migrations from `migrations` at each scrape."""
        self._migrations = migrations

    def watch_adapters(self, adapters: Callable[[], set[str]]) -> None:
        """Read the adapters of requests under way from `adapters` at each scrape."""
        self._adapters = adapters

    @property
    def live(self) -> int:
        """How many requests are under way on this router."""
        return self._live

    def begin(self, model: str, arrival: float) -> RequestMeter:
        """Return the meter of a request that came in at `arrival` (router's clock); `end` it."""
        self._live += 1
        return RequestMeter(self, model, arrival)

    def ended(self) -> None:
        self._live -= 1

    def of_model(self, model: str) -> _OfModel:
        found = self._models.get(model)
        if found is None:
            found = self._models[model] = _OfModel(self.instruments, self.vllm, model)
        return found

    def pooled(self, model: str, tokens: int, outcome: str) -> None:
        """Count an embedding or scoring call that is over; `outcome`: "ok" or an error code."""
        self.instruments.pooling.labels(model, outcome).inc()
        self.instruments.prompt_tokens.labels(model).inc(tokens)

    def render(self) -> bytes:
        return render(self.registry)


def watch_pieces(registry: CollectorRegistry, stats: PieceStats) -> None:
    """Export the tokenizer's cache look-ups and hits. Call it once per tokenizer."""
    ROUTER.watch(
        registry,
        lambda: {
            "baton_tokenizer_cache_queries": stats.asked,
            "baton_tokenizer_cache_hits": stats.kept,
        },
    )


class RequestMeter:
    """Measures one request: its times by the router's clock, and its tokens."""

    def __init__(self, metrics: RouterMetrics, model: str, arrival: float) -> None:
        self._metrics = metrics
        self._model = model
        self._arrival = arrival
        self._first: float | None = None
        self._last: dict[int, float] = {}  # per sample: when its latest token was shown
        self._tokens = 0
        self._by = metrics.of_model(model)
        self._ended = False
        self.params: SamplingParams | None = None  # set by a caller that knows them

    def tokens(self, now: float, count: int, sample: int = 0) -> None:
        """Count `count` new tokens of a sample, shown at `now`."""
        if self._first is None:
            self._first = now
            self._by.first_token.observe(now - self._arrival)
        elif count and sample in self._last:
            self._by.inter_token.observe((now - self._last[sample]) / count)
        self._last[sample] = now
        self._tokens += count

    def end(self, now: float, trace: RequestTrace, prompt_tokens: int, outcome: str) -> None:
        """Write the metrics of a request that is over; `outcome`: finish reason or error code.

        Further calls do nothing.
        """
        if self._ended:
            return
        self._ended = True
        self._metrics.ended()
        by, model, mine = self._metrics.instruments, self._model, self._by
        mine.prompt_tokens.inc(prompt_tokens)
        mine.generation_tokens.inc(self._tokens)
        mine.retries.inc(trace.retries)
        mine.prefix_queries.inc(prompt_tokens)
        mine.prefix_hits.inc(min(trace.cached_tokens, prompt_tokens))
        if trace.dispatched_at is not None:
            mine.queue.observe(max(0.0, trace.dispatched_at - self._arrival))
        if trace.handover_s is not None:
            mine.handover.observe(trace.handover_s)
        for role, node in (("prefill", trace.prefill_node), ("decode", trace.decode_node)):
            if node is not None:
                by.nodes.labels(model, role, node).inc()
        if outcome not in ("stop", "length"):
            by.failure.labels(model, outcome).inc()
            return
        mine.vllm.ended(
            Finished(
                self.params, prompt_tokens, self._tokens, self._arrival, trace.dispatched_at,
                self._first, max(self._last.values(), default=self._arrival), trace.preemptions,
            ),
        )  # fmt: skip
        by.success.labels(model, outcome).inc()
        mine.e2e.observe(now - self._arrival)
        samples = len(self._last)  # samples run concurrently: take the mean of them
        if self._first is not None and self._tokens > samples:
            mean = (now - self._first) * samples / (self._tokens - samples)
            mine.per_token.observe(mean)


def _instruments(registry: CollectorRegistry) -> _Instruments:
    def histogram(name: str) -> Histogram:
        return Histogram(ROUTER[name], registry)

    def counter(name: str) -> Counter:
        return Counter(ROUTER[name], registry)

    return _Instruments(
        first_token=histogram("baton_time_to_first_token_seconds"),
        inter_token=histogram("baton_inter_token_latency_seconds"),
        per_token=histogram("baton_request_time_per_output_token_seconds"),
        e2e=histogram("baton_e2e_request_latency_seconds"),
        queue=histogram("baton_request_queue_time_seconds"),
        handover=histogram("baton_handover_seconds"),
        prompt_tokens=counter("baton_prompt_tokens"),
        generation_tokens=counter("baton_generation_tokens"),
        success=counter("baton_request_success"),
        failure=counter("baton_request_failure"),
        retries=counter("baton_request_retries"),
        prefix_queries=counter("baton_prefix_cache_queries"),
        prefix_hits=counter("baton_prefix_cache_hits"),
        nodes=counter("baton_node_requests"),
        pooling=counter("baton_pooling_requests"),
    )


def _of_nodes(nodes: Sequence[NodeRecord], live: int) -> dict[str, Values]:
    """Return the load metrics of the nodes, one series per node."""
    named = {(each.model, each.node_id, each.role.value): each.load for each in nodes}
    found: dict[str, Values] = {"baton_live_requests": live}
    for name, value_of in _OF_LOAD.items():
        found[name] = {labels: value_of(load) for labels, load in named.items()}
    found["vllm:num_requests_waiting_by_reason"] = {
        (*labels, reason): count
        for labels, load in named.items()
        for reason, count in (("capacity", load.waiting), ("deferred", load.fetching))
    }
    found["vllm:iteration_tokens_total"] = {  # only sum and count are kept
        labels: Sums((("+Inf", load.steps),), load.step_tokens) for labels, load in named.items()
    }
    return found


def _of_migrations(stats: MigrationStats) -> dict[str, Values]:
    """Return the metrics of migrations."""
    return {
        "baton_migrations": {
            ("done",): stats.done, ("given_back",): stats.given_back, ("failed",): stats.failed,
        },
        "baton_migrated_tokens": stats.tokens,
        "baton_migration_seconds": stats.seconds,
    }  # fmt: skip


_OF_LOAD: Final[Mapping[str, Callable[[NodeLoad], float]]] = {
    "vllm:num_requests_running": lambda load: load.running,
    "vllm:num_requests_waiting": lambda load: load.waiting,
    "vllm:num_requests_swapped": lambda load: load.swapped,
    "vllm:kv_cache_usage_perc": cache_usage,
    "baton_kv_blocks_free": lambda load: load.free_blocks,
    "baton_kv_blocks_total": lambda load: load.total_blocks,
    "baton_kv_transfer_fetching": lambda load: load.fetching,
    "baton_kv_transfer_export_bytes": lambda load: load.export_bytes,
    "baton_waiting_tokens": lambda load: load.waiting_tokens,
    "baton_step_seconds": lambda load: load.step_seconds,
    "baton_stalled": lambda load: float(load.stalled),
    "baton_mbu": lambda load: load.mbu,
    "baton_mfu": lambda load: load.mfu,
    "baton_draining": lambda load: float(load.draining),
    # Counters since the node's start, as of its last heartbeat. They have the names of the nodes'
    # own /metrics, unless this router counts the same thing over its own requests.
    "baton_kv_transfer_bytes": lambda load: load.kv_received_bytes,
    "baton_kv_transfer_sent_bytes": lambda load: load.kv_sent_bytes,
    "baton_kv_transfer_fetches": lambda load: load.kv_fetches,
    "baton_kv_transfer_failures": lambda load: load.kv_fetch_failures,
    "vllm:num_preemptions": lambda load: load.preemptions,
    "baton_preemptions": lambda load: load.preemptions,
    "baton_node_prefix_queries": lambda load: load.prefix_query_tokens,
    "baton_node_prefix_hits": lambda load: load.prefix_hit_tokens,
}
