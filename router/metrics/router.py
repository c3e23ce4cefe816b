"""The router's Prometheus metrics: latencies and counts of requests, the nodes' load as seen here.

Each request has one RequestMeter, told of tokens as they are shown. Every histogram exists once and
is exported under Baton's and vLLM's name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from baton.protocol.handles import NodeRecord
from baton.protocol.sampling import SamplingParams
from baton.runtime.metrics import (
    E2E_BUCKETS,
    TPOT_BUCKETS,
    TRANSFER_BUCKETS,
    TTFT_BUCKETS,
    cache_usage,
    iterations,
    render,
    waiting_by_reason,
)
from baton.text.pieces import PieceStats
from router.metrics.vllm import Finished, NodeInfo, VllmMetrics, VllmOfModel
from router.nodes.migration import MigrationStats
from router.request.trace import RequestTrace
from router.tallies import Counter, Histogram, counters

_MODEL: Final = "model_name"
# Own name -> vLLM's names for the same thing (its newer and older ones).
_ALIASES: Final[dict[str, tuple[str, ...]]] = {
    "baton_time_to_first_token_seconds": ("vllm:time_to_first_token_seconds",),
    "baton_inter_token_latency_seconds": (
        "vllm:inter_token_latency_seconds",
        "vllm:time_per_output_token_seconds",
    ),
    "baton_request_time_per_output_token_seconds": ("vllm:request_time_per_output_token_seconds",),
    "baton_e2e_request_latency_seconds": ("vllm:e2e_request_latency_seconds",),
    "baton_request_queue_time_seconds": ("vllm:request_queue_time_seconds",),
    "baton_prompt_tokens": ("vllm:prompt_tokens",),
    "baton_generation_tokens": ("vllm:generation_tokens",),
    "baton_request_success": ("vllm:request_success",),
    "baton_prefix_cache_queries": ("vllm:prefix_cache_queries",),
    "baton_prefix_cache_hits": ("vllm:prefix_cache_hits",),
}


class _OfModel:
    """What every request of one model touches: labels are looked up once."""

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
    """Every instrument that a request touches."""

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
        self._own = CollectorRegistry()
        self.registry = CollectorRegistry()
        self.instruments = _instruments(self._own)
        self._nodes: Callable[[], Sequence[NodeRecord]] = tuple
        self._migrations: Callable[[], MigrationStats] = MigrationStats
        self._adapters: Callable[[], set[str]] = set
        self._live = 0
        self._models: dict[str, _OfModel] = {}
        self.vllm = VllmMetrics(self.registry)
        self.registry.register(_Exported(self._own))
        self.registry.register(_Nodes(self._current_nodes, lambda: self._live))
        self.registry.register(_Migrations(self._current_migrations))
        self.registry.register(NodeInfo(self._current_nodes, self._current_adapters))

    def watch_nodes(self, nodes: Callable[[], Sequence[NodeRecord]]) -> None:
        """Where the load of the nodes is read from at each scrape."""
        self._nodes = nodes

    def watch_migrations(self, migrations: Callable[[], MigrationStats]) -> None:
        """Where the counters of migrations are read from at each scrape."""
        self._migrations = migrations

    def watch_adapters(self, adapters: Callable[[], set[str]]) -> None:
        """Where the adapters of requests under way are read from at each scrape."""
        self._adapters = adapters

    @property
    def live(self) -> int:
        """Requests under way here."""
        return self._live

    def _current_nodes(self) -> Sequence[NodeRecord]:
        return self._nodes()

    def _current_adapters(self) -> set[str]:
        return self._adapters()

    def _current_migrations(self) -> MigrationStats:
        return self._migrations()

    def begin(self, model: str, arrival: float) -> RequestMeter:
        """A request came in at `arrival` (the router's clock). Its meter must be ended."""
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
        """An embedding or scoring call is over; `outcome`: "ok" or the error's code."""
        self.instruments.pooling.labels(model, outcome).inc()
        self.instruments.prompt_tokens.labels(model).inc(tokens)

    def render(self) -> bytes:
        return render(self.registry)


def watch_pieces(registry: CollectorRegistry, stats: PieceStats) -> None:
    """Export what the tokenizer had kept. Once per tokenizer."""
    registry.register(_Pieces(stats))


class _Pieces(Collector):
    def __init__(self, stats: PieceStats) -> None:
        self._stats = stats

    def collect(self) -> Iterable[Metric]:
        yield from counters(
            ("baton_tokenizer_cache_queries", "Characters of chats to encode", self._stats.asked),
            ("baton_tokenizer_cache_hits", "Those whose tokens were kept", self._stats.kept),
        )


class RequestMeter:
    """Times of one request, by the router's clock."""

    def __init__(self, metrics: RouterMetrics, model: str, arrival: float) -> None:
        self._metrics = metrics
        self._model = model
        self._arrival = arrival
        self._first: float | None = None
        self._last: dict[int, float] = {}  # per sample: when its latest token was shown
        self._tokens = 0
        self._by = metrics.of_model(model)
        self._ended = False
        self.params: SamplingParams | None = None  # as asked for, if its front door tells

    def tokens(self, now: float, count: int, sample: int = 0) -> None:
        """`count` new tokens of a sample are shown at `now`."""
        if self._first is None:
            self._first = now
            self._by.first_token.observe(now - self._arrival)
        elif count and sample in self._last:
            self._by.inter_token.observe((now - self._last[sample]) / count)
        self._last[sample] = now
        self._tokens += count

    def end(self, now: float, trace: RequestTrace, prompt_tokens: int, outcome: str) -> None:
        """The request is over; `outcome`: finish reason or error code. Later calls do nothing."""
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
        samples = len(self._last)  # they run side by side: a mean of them
        if self._first is not None and self._tokens > samples:
            mean = (now - self._first) * samples / (self._tokens - samples)
            mine.per_token.observe(mean)


def _instruments(registry: CollectorRegistry) -> _Instruments:
    def histogram(name: str, text: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(name, text, [_MODEL], buckets=buckets, registry=registry)

    def counter(name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, [_MODEL, *labels], registry)

    return _Instruments(
        first_token=histogram(
            "baton_time_to_first_token_seconds", "From arrival to the first token", TTFT_BUCKETS
        ),
        inter_token=histogram(
            "baton_inter_token_latency_seconds", "Between two tokens as shown", TPOT_BUCKETS
        ),
        per_token=histogram(
            "baton_request_time_per_output_token_seconds", "Mean of a request", TPOT_BUCKETS
        ),
        e2e=histogram("baton_e2e_request_latency_seconds", "From arrival to the end", E2E_BUCKETS),
        queue=histogram("baton_request_queue_time_seconds", "From arrival to a node", TTFT_BUCKETS),
        handover=histogram(
            "baton_handover_seconds", "From token 1 to the decode node's first", TRANSFER_BUCKETS
        ),
        prompt_tokens=counter("baton_prompt_tokens", "Tokens of prompts"),
        generation_tokens=counter("baton_generation_tokens", "Tokens shown"),
        success=counter("baton_request_success", "Requests that ended well", "finished_reason"),
        failure=counter("baton_request_failure", "Requests that did not", "code"),
        retries=counter("baton_request_retries", "Retries on other nodes"),
        prefix_queries=counter("baton_prefix_cache_queries", "Prompt tokens looked up"),
        prefix_hits=counter("baton_prefix_cache_hits", "Prompt tokens found on the node"),
        nodes=counter("baton_node_requests", "Requests by the node that ran them", "role", "node"),
        pooling=counter("baton_pooling_requests", "Embeddings, scores: calls", "outcome"),
    )


class _Exported(Collector):
    """The own metrics, each followed by its aliases."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterable[Metric]:
        for metric in self._registry.collect():
            yield metric
            for alias in _ALIASES.get(metric.name, ()):
                copy = Metric(alias, metric.documentation, metric.type)
                copy.samples = [
                    Sample(
                        alias + sample.name.removeprefix(metric.name),
                        sample.labels,
                        sample.value,
                        sample.timestamp,
                        sample.exemplar,
                    )
                    for sample in metric.samples
                ]
                yield copy


class _Nodes(Collector):
    """Load of the nodes at scrape time, one series per node."""

    def __init__(self, nodes: Callable[[], Sequence[NodeRecord]], live: Callable[[], int]) -> None:
        self._nodes = nodes
        self._live = live

    def collect(self) -> Iterable[Metric]:
        yield GaugeMetricFamily("baton_live_requests", "Requests in flight here", self._live())
        nodes = self._nodes()
        labels = [_MODEL, "node", "role"]
        families: list[tuple[GaugeMetricFamily | CounterMetricFamily, _Value]] = [
            (GaugeMetricFamily(name, text, labels=labels), value)
            for name, text, value in _NODE_GAUGES
        ]
        families += [
            (CounterMetricFamily(name, text, labels=labels), value)
            for name, text, value in _NODE_COUNTERS
        ]
        for family, value in families:
            for node in nodes:
                family.add_metric([node.model, node.node_id, node.role.value], value(node))
            yield family
        named = [([node.model, node.node_id, node.role.value], node.load) for node in nodes]
        yield waiting_by_reason(named, labels)
        yield iterations(
            [(values, (load.steps, load.step_tokens)) for values, load in named], labels
        )


class _Migrations(Collector):
    """Running requests that changed their decode node."""

    def __init__(self, stats: Callable[[], MigrationStats]) -> None:
        self._stats = stats

    def collect(self) -> Iterable[Metric]:
        stats = self._stats()
        moved = CounterMetricFamily(
            "baton_migrations", "Requests asked to change their decode node", labels=["outcome"]
        )
        moved.add_metric(["done"], stats.done)
        moved.add_metric(["given_back"], stats.given_back)
        moved.add_metric(["failed"], stats.failed)
        yield moved
        yield CounterMetricFamily("baton_migrated_tokens", "Tokens whose KV moved", stats.tokens)
        yield CounterMetricFamily(
            "baton_migration_seconds", "Until the new node's first token, summed", stats.seconds
        )


_Value = Callable[[NodeRecord], float]
_NODE_GAUGES: Final[tuple[tuple[str, str, _Value], ...]] = (
    ("vllm:num_requests_running", "Requests in the running batch", lambda n: n.load.running),
    ("vllm:num_requests_waiting", "Requests waiting", lambda n: n.load.waiting),
    ("vllm:num_requests_swapped", "Requests swapped to host memory", lambda n: n.load.swapped),
    ("vllm:kv_cache_usage_perc", "KV blocks in use; 1 = all", lambda n: cache_usage(n.load)),
    ("baton_kv_blocks_free", "KV blocks that a request could have", lambda n: n.load.free_blocks),
    ("baton_kv_blocks_total", "KV blocks of the pool", lambda n: n.load.total_blocks),
    ("baton_kv_transfer_fetching", "KV fetches under way or queued", lambda n: n.load.fetching),
    ("baton_kv_transfer_export_bytes", "Bytes under leases", lambda n: n.load.export_bytes),
    ("baton_waiting_tokens", "Prompt tokens not yet computed", lambda n: n.load.waiting_tokens),
    ("baton_step_seconds", "Moving mean of engine steps", lambda n: n.load.step_seconds),
    ("baton_stalled", "1 while its engine makes no progress", lambda n: float(n.load.stalled)),
    ("baton_mbu", "Share of its read bandwidth, last steps", lambda n: n.load.mbu),
    ("baton_mfu", "Share of its matrix products' rate", lambda n: n.load.mfu),
    ("baton_draining", "1 while it takes no new requests", lambda n: float(n.load.draining)),
)
# As of each node's last heartbeat, since its start. Under the names of the nodes' own /metrics, but
# where this router counts the same thing over its requests.
_NODE_COUNTERS: Final[tuple[tuple[str, str, _Value], ...]] = (
    ("baton_kv_transfer_bytes", "KV bytes received", lambda n: n.load.kv_received_bytes),
    ("baton_kv_transfer_sent_bytes", "KV bytes sent", lambda n: n.load.kv_sent_bytes),
    ("baton_kv_transfer_fetches", "KV fetches that ended well", lambda n: n.load.kv_fetches),
    ("baton_kv_transfer_failures", "KV fetches that failed", lambda n: n.load.kv_fetch_failures),
    ("vllm:num_preemptions", "Requests preempted", lambda n: n.load.preemptions),
    ("baton_preemptions", "Requests preempted", lambda n: n.load.preemptions),
    ("baton_node_prefix_queries", "Prompt tokens looked up", lambda n: n.load.prefix_query_tokens),
    ("baton_node_prefix_hits", "Prompt tokens found", lambda n: n.load.prefix_hit_tokens),
)
