"""vLLM's metrics that Baton has no own name for, so that vLLM's Grafana boards show data.

Those with an own name are aliased in router/metrics/router.py. Times are the router's: prefill is
from the first submission to a node to token 1, decode from there to the last token. docs/metrics.md
lists all of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from baton.protocol.adapters import adapter_name
from baton.protocol.handles import NodeRecord
from baton.protocol.sampling import SamplingParams
from baton.runtime.metrics import E2E_BUCKETS, TTFT_BUCKETS, cache_usage
from router.tallies import Histogram

if TYPE_CHECKING:
    from router.services import RouterServices

_MODEL: Final = "model_name"
# vLLM's: 1, 2, 5, 10, ... tokens.
TOKEN_BUCKETS: Final = tuple(
    base * 10**power for power in range(6) for base in (1, 2, 5) if base * 10**power <= 200_000
)
N_BUCKETS: Final = (1, 2, 5, 10, 20)
PREEMPTION_BUCKETS: Final = (1, 2, 3, 4, 5, 10, 20)


@dataclass(frozen=True, slots=True)
class Finished:
    """One request that ended well. Times: seconds of the router's clock."""

    params: SamplingParams | None
    prompt_tokens: int
    output_tokens: int
    arrival: float
    dispatched: float | None
    first: float | None
    last: float
    preemptions: int = 0


class VllmOfModel:
    """The same of one model: labels are looked up once."""

    def __init__(self, by: VllmMetrics, model: str) -> None:
        self._prompt = by.prompt.labels(model)
        self._output = by.output.labels(model)
        self._most = by.most.labels(model)
        self._n = by.n.labels(model)
        self._max_tokens = by.max_tokens.labels(model)
        self._preemptions = by.preemptions.labels(model)
        self._prefill = by.prefill.labels(model)
        self._decode = by.decode.labels(model)
        self._inference = by.inference.labels(model)

    def ended(self, done: Finished) -> None:
        """Count one request."""
        self._prompt.observe(done.prompt_tokens)
        self._output.observe(done.output_tokens)
        self._preemptions.observe(done.preemptions)
        samples = 1
        if done.params is not None:
            samples = done.params.n
            self._n.observe(samples)
            self._max_tokens.observe(done.params.max_tokens)
        self._most.observe(-(-done.output_tokens // samples))
        began = done.arrival if done.dispatched is None else done.dispatched
        if done.first is not None:
            self._prefill.observe(max(0.0, done.first - began))
            self._decode.observe(max(0.0, done.last - done.first))
            self._inference.observe(max(0.0, done.last - began))


class VllmMetrics:
    """The histograms of requests, registered in `registry`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def histogram(name: str, text: str, buckets: Sequence[float]) -> Histogram:
            return Histogram(f"vllm:{name}", text, [_MODEL], buckets=buckets, registry=registry)

        self.prompt = histogram("request_prompt_tokens", "Tokens of a prompt", TOKEN_BUCKETS)
        self.output = histogram("request_generation_tokens", "Tokens generated", TOKEN_BUCKETS)
        self.most = histogram(
            "request_max_num_generation_tokens", "Tokens of a request's output", TOKEN_BUCKETS
        )
        self.n = histogram("request_params_n", "Samples asked for", N_BUCKETS)
        self.max_tokens = histogram(
            "request_params_max_tokens", "Most tokens asked for", TOKEN_BUCKETS
        )
        self.preemptions = histogram(
            "request_num_preemptions", "How often a request lost its place", PREEMPTION_BUCKETS
        )
        self.prefill = histogram(
            "request_prefill_time_seconds", "From a node to token 1", TTFT_BUCKETS
        )
        self.decode = histogram(
            "request_decode_time_seconds", "From token 1 to the last", E2E_BUCKETS
        )
        self.inference = histogram(
            "request_inference_time_seconds", "From a node to the last token", E2E_BUCKETS
        )


def watch(services: RouterServices) -> None:
    """Show the nodes under the name that clients use, as vLLM's boards select by it."""

    def nodes() -> list[NodeRecord]:
        names = services.config.served_model_name
        records = services.registry.records()
        return [replace(record, model=names[0]) if names else record for record in records]

    def running_adapters() -> set[str]:
        live = services.dispatcher.live()
        return {adapter_name(request.adapter) for request, _ in live if request.adapter}

    services.metrics.watch_nodes(nodes)
    services.metrics.watch_adapters(running_adapters)


class NodeInfo(Collector):
    """Of each node, at scrape time: vLLM's cache_config_info, gpu_cache_usage_perc (the older name
    of kv_cache_usage_perc), and lora_requests_info where there are adapters."""

    def __init__(
        self, nodes: Callable[[], Sequence[NodeRecord]], adapters: Callable[[], set[str]]
    ) -> None:
        self._nodes = nodes
        self._adapters = adapters

    def collect(self) -> Iterable[Metric]:
        nodes = self._nodes()
        labels = [_MODEL, "node", "role"]
        usage = GaugeMetricFamily("vllm:gpu_cache_usage_perc", "KV blocks in use", labels=labels)
        more = ["block_size", "num_gpu_blocks", "cache_dtype"]
        config = GaugeMetricFamily("vllm:cache_config_info", "Sizes", labels=[*labels, *more])
        for node in nodes:
            values = [node.model, node.node_id, node.role.value]
            usage.add_metric(values, cache_usage(node.load))
            blocks, dtype = str(node.load.total_blocks), node.endpoint.format.dtype
            config.add_metric([*values, str(node.block_size), blocks, dtype], 1)
        yield usage
        yield config
        known = {adapter_name(id_) for node in nodes for id_ in node.adapters}
        if known:
            yield self._lora(nodes[0].model, known)

    def _lora(self, model: str, known: set[str]) -> Metric:
        labels = [_MODEL, "max_lora", "running_lora_adapters", "waiting_lora_adapters"]
        found = GaugeMetricFamily("vllm:lora_requests_info", "Adapters in use", labels=labels)
        running = ",".join(sorted(self._adapters()))
        found.add_metric([model, str(len(known)), running, ""], time.time())
        return found
