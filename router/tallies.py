"""Counters and histograms of one event loop: plain numbers, exported when they are asked for.

prometheus-client's own take a lock, a walk over all buckets and a look-up by labels for each
number, and a request has two dozen. Same names, labels and text at the scrape. Not thread-safe.
A request of 16 steps takes 26 us here and 79 us there on a busy machine, 11 and 41 us on a quiet
one: 5 % of its 600 us (`python -m bench.own_copies --parts tallies`,
docs/log/2026-11-23-own-copies.md).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from baton.runtime.metrics import MetricSpec, Sums


class Count:
    """A counter with its labels."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def inc(self, amount: float = 1.0) -> None:
        self.value += amount


class Distribution:
    """A histogram with its labels: `counts[i]` numbers up to `bounds[i]`, the last one beyond."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value


class Counter(Collector):
    def __init__(self, spec: MetricSpec, registry: CollectorRegistry) -> None:
        self._spec = spec
        self._counts: dict[tuple[str, ...], Count] = {}
        registry.register(self)

    def labels(self, *values: str) -> Count:
        """The one with these labels; worth keeping where it is needed often."""
        found = self._counts.get(values)
        if found is None:
            assert len(values) == len(self._spec.labels), f"labels of {self._spec.name}"
            found = self._counts[values] = Count()
        return found

    def describe(self) -> Iterable[Metric]:
        return self._spec.families({})

    def collect(self) -> Iterable[Metric]:
        return self._spec.families({labels: each.value for labels, each in self._counts.items()})


class Histogram(Collector):
    def __init__(self, spec: MetricSpec, registry: CollectorRegistry) -> None:
        self._spec = spec
        self._distributions: dict[tuple[str, ...], Distribution] = {}
        registry.register(self)

    def labels(self, *values: str) -> Distribution:
        """Like Counter.labels."""
        found = self._distributions.get(values)
        if found is None:
            assert len(values) == len(self._spec.labels), f"labels of {self._spec.name}"
            found = self._distributions[values] = Distribution(self._spec.buckets)
        return found

    def describe(self) -> Iterable[Metric]:
        return self._spec.families({})

    def collect(self) -> Iterable[Metric]:
        bounds = [*map(floatToGoString, self._spec.buckets), "+Inf"]

        def sums(found: Distribution) -> Sums:
            up_to = map(float, accumulate(found.counts))
            return Sums(list(zip(bounds, up_to, strict=True)), found.sum)

        return self._spec.families({k: sums(each) for k, each in self._distributions.items()})
