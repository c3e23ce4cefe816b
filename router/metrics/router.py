"""The router's Prometheus metrics: latencies and counts of its own requests.

Each request has one RequestMeter, which counts tokens as they are shown. Names and meanings are in
router/metrics/metric_list.py. What a node knows of itself is on the node's own page.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from prometheus_client import CollectorRegistry

from baton.protocol.errors import (
    Cancelled,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    NodeLost,
    Overloaded,
    Unavailable,
)
from baton.protocol.events import SpanName
from baton.protocol.handles import NodeRecord
from baton.protocol.sampling import SamplingParams
from baton.runtime.metrics import Values, render
from baton.text.pieces import PieceStats
from router.metrics.metric_list import ROUTER
from router.metrics.vllm import Finished, VllmMetrics, VllmOfModel, adapter_info
from router.nodes.migration import MigrationStats
from router.request.trace import RequestTrace
from router.tallies import Counter, Histogram

GOOD_ENDS: Final = ("stop", "length")
# vLLM's words for where the KV of a prompt's tokens came from.
COMPUTED: Final = "local_compute"
CACHED: Final = "local_cache_hit"
# Shown from the start, because a counter that has no series yet cannot rise. Other codes may come.
FAILURES: Final = (
    Cancelled, DeadlineExceeded, InternalError, InvalidRequest, NodeLost, Overloaded, Unavailable,
)  # fmt: skip


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
        self.handover_parts = {name: part.labels(model) for name, part in by.handover_parts.items()}
        self.prompt_tokens = by.prompt_tokens.labels(model)
        self.generation_tokens = by.generation_tokens.labels(model)
        self.retries = by.retries.labels(model)
        self.prefix_queries = by.prefix_queries.labels(model)
        self.prefix_hits = by.prefix_hits.labels(model)
        self.computed = by.sources.labels(model, COMPUTED)
        self.cached = by.sources.labels(model, CACHED)
        for reason in GOOD_ENDS:
            by.success.labels(model, reason)
        for each in FAILURES:
            by.failure.labels(model, each.code)


@dataclass(frozen=True, slots=True)
class _Instruments:
    """All instruments that requests and their answers write."""

    first_token: Histogram
    inter_token: Histogram
    per_token: Histogram
    e2e: Histogram
    queue: Histogram
    handover: Histogram
    handover_parts: dict[str, Histogram]
    prompt_tokens: Counter
    generation_tokens: Counter
    success: Counter
    failure: Counter
    retries: Counter
    prefix_queries: Counter
    prefix_hits: Counter
    sources: Counter
    nodes: Counter
    pooling: Counter
    http_requests: Counter
    http_seconds: Histogram


class RouterMetrics:
    """All metrics of one router process, in its own registry."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._nodes: Callable[[], Sequence[NodeRecord]] = tuple
        self._migrations: Callable[[], MigrationStats] = MigrationStats
        self._adapters: Callable[[], Mapping[str, set[str]]] = dict[str, set[str]]
        self._live = 0
        self._models: dict[str, _OfModel] = {}
        self.vllm = VllmMetrics(self.registry)
        self.instruments = _instruments(self.registry)
        ROUTER.watch(self.registry, lambda: {"baton_live_requests": self._live})
        ROUTER.watch(self.registry, lambda: _of_migrations(self._migrations()))
        ROUTER.watch(self.registry, lambda: adapter_info(self._nodes(), self._adapters()))

    def watch_nodes(self, nodes: Callable[[], Sequence[NodeRecord]]) -> None:
        """Read from `nodes` at each scrape which models and adapters there are."""
        self._nodes = nodes

    def watch_migrations(self, migrations: Callable[[], MigrationStats]) -> None:
        """Read the counters of migrations from `migrations` at each scrape."""
        self._migrations = migrations

    def watch_adapters(self, adapters: Callable[[], Mapping[str, set[str]]]) -> None:
        """Read the adapters of requests under way, by the name of their model, from `adapters` at
        each scrape."""
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

    def pooled(self, model: str, tokens: int, outcome: str, retries: int = 0) -> None:
        """Count an embedding or scoring call that is over; `outcome`: "ok" or an error code.
        `retries`: its groups that were sent to another node."""
        self.instruments.pooling.labels(model, outcome).inc()
        mine = self.of_model(model)
        mine.prompt_tokens.inc(tokens)
        mine.computed.inc(tokens)
        mine.retries.inc(retries)

    def render(self) -> bytes:
        for node in self._nodes():
            self.of_model(node.model)  # its zeros are shown before its first request
        return render(self.registry)


def watch_pieces(registry: CollectorRegistry, caches: Sequence[PieceStats]) -> None:
    """Export the look-ups and hits of the tokenizers' caches, if there are any, as sums."""
    if not caches:
        return
    ROUTER.watch(
        registry,
        lambda: {
            "baton_tokenizer_cache_queries": sum(stats.asked for stats in caches),
            "baton_tokenizer_cache_hits": sum(stats.kept for stats in caches),
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
        cached = min(trace.cached_tokens, prompt_tokens)
        mine.prefix_hits.inc(cached)
        mine.cached.inc(cached)
        mine.computed.inc(prompt_tokens - cached)
        queue_s = trace.queue_s(self._arrival)
        if queue_s is not None:
            mine.queue.observe(queue_s)
        if trace.handover_s is not None:
            mine.handover.observe(trace.handover_s)
            for name, part_s in trace.handover_parts_s.items():
                mine.handover_parts[name].observe(part_s)
        for role, node in (("prefill", trace.prefill_node), ("decode", trace.decode_node)):
            if node is not None:
                by.nodes.labels(model, role, node).inc()
        if outcome not in GOOD_ENDS:
            by.failure.labels(model, outcome).inc()
            return
        mine.vllm.ended(
            Finished(
                self.params, prompt_tokens, self._tokens, self._arrival, trace.scheduled_at,
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
        handover_parts={
            SpanName.QUEUE: histogram("baton_handover_queue_seconds"),
            SpanName.FETCH: histogram("baton_handover_fetch_seconds"),
            SpanName.FIRST_STEP: histogram("baton_handover_first_step_seconds"),
        },
        prompt_tokens=counter("baton_prompt_tokens"),
        generation_tokens=counter("baton_generation_tokens"),
        success=counter("baton_request_success"),
        failure=counter("baton_request_failure"),
        retries=counter("baton_request_retries"),
        prefix_queries=counter("baton_prefix_cache_queries"),
        prefix_hits=counter("baton_prefix_cache_hits"),
        sources=counter("vllm:prompt_tokens_by_source"),
        nodes=counter("baton_node_requests"),
        pooling=counter("baton_pooling_requests"),
        http_requests=counter("baton_http_requests"),
        http_seconds=histogram("baton_http_request_seconds"),
    )


def _of_migrations(stats: MigrationStats) -> dict[str, Values]:
    """Return the metrics of migrations."""
    return {
        "baton_migrations": {
            ("done",): stats.done, ("given_back",): stats.given_back, ("failed",): stats.failed,
        },
        "baton_migrated_tokens": stats.tokens,
        "baton_migration_seconds": stats.seconds,
    }  # fmt: skip
