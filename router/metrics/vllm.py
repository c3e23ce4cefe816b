"""Metrics of vLLM for which Baton has no name of its own, so that vLLM's Grafana boards show data.

Metrics that Baton also has are aliases in router/metrics/metric_list.py. Times are the router's:
prefill lasts from the end of the waiting before token 1 to token 1, decode from token 1 to the last
token.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec
from prometheus_client import CollectorRegistry

from baton.protocol.adapters import adapter_name
from baton.protocol.handles import NodeRecord
from baton.protocol.sampling import SamplingParams
from baton.runtime.metrics import Values
from router.metrics.metric_list import ROUTER
from router.tallies import Histogram

if TYPE_CHECKING:
    from router.services import RouterServices


class Finished(msgspec.Struct, frozen=True):
    """One request that ended well. Times: seconds of the router's clock."""

    params: SamplingParams | None
    prompt_tokens: int
    output_tokens: int
    arrival: float
    scheduled: float | None
    first: float | None
    last: float
    preemptions: int = 0


class VllmOfModel:
    """The histograms of VllmMetrics for one model, whose labels are looked up once."""

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
        """Add a request that ended well to the histograms."""
        self._prompt.observe(done.prompt_tokens)
        self._output.observe(done.output_tokens)
        self._preemptions.observe(done.preemptions)
        samples = 1
        if done.params is not None:
            samples = done.params.n
            self._n.observe(samples)
            self._max_tokens.observe(done.params.max_tokens)
        self._most.observe(-(-done.output_tokens // samples))
        began = done.arrival if done.scheduled is None else done.scheduled
        if done.first is not None:
            self._prefill.observe(max(0.0, done.first - began))
            self._decode.observe(max(0.0, done.last - done.first))
            self._inference.observe(max(0.0, done.last - began))


class VllmMetrics:
    """The histograms of requests, registered in `registry`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def histogram(name: str) -> Histogram:
            return Histogram(ROUTER[f"vllm:request_{name}"], registry)

        self.prompt = histogram("prompt_tokens")
        self.output = histogram("generation_tokens")
        self.most = histogram("max_num_generation_tokens")
        self.n = histogram("params_n")
        self.max_tokens = histogram("params_max_tokens")
        self.preemptions = histogram("num_preemptions")
        self.prefill = histogram("prefill_time_seconds")
        self.decode = histogram("decode_time_seconds")
        self.inference = histogram("inference_time_seconds")


def watch(services: RouterServices) -> None:
    """Show each model under the name that clients use, by which vLLM's boards select."""
    models, registry = services.models, services.registry

    def nodes() -> list[NodeRecord]:
        return [
            replace(record, model=models.name_of(model.key, registry))
            for model in models.all
            for record in registry.records(model.key)
        ]

    def running_adapters() -> dict[str, set[str]]:
        running: dict[str, set[str]] = {}
        for request, trace in services.dispatcher.live():
            if request.adapter:
                name = models.name_of(trace.model, registry)
                running.setdefault(name, set()).add(adapter_name(request.adapter))
        return running

    services.metrics.watch_nodes(nodes)
    services.metrics.watch_adapters(running_adapters)


def adapter_info(
    nodes: Sequence[NodeRecord], running_adapters: Mapping[str, set[str]]
) -> dict[str, Values]:
    """Return lora_requests_info of this router's requests; empty if no node has adapters."""
    known: dict[str, set[str]] = {}
    for node in nodes:
        names = known.setdefault(node.model, set())
        names |= {adapter_name(id_) for id_ in node.adapters}
    now, found = time.time(), dict[tuple[str, ...], float]()
    for model, names in known.items():
        if names:
            running = ",".join(sorted(running_adapters.get(model, ())))
            found[model, str(len(names)), running, ""] = now
    return {"vllm:lora_requests_info": found} if found else {}
