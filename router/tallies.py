"""Counters and histograms of one event loop: plain numbers, exported when they are asked for.

prometheus-client's own take a lock, a walk over all buckets and a look-up by labels for each
number, and a request has two dozen. Same names, labels and text at the scrape. Not thread-safe.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


def counters(*rows: tuple[str, str, float]) -> Iterable[Metric]:
    """At a scrape, counters that somebody keeps as plain numbers: name, text, count of each."""
    for name, text, count in rows:
        yield CounterMetricFamily(name, text, count)


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
    def __init__(
        self, name: str, text: str, labels: Sequence[str], registry: CollectorRegistry
    ) -> None:
        self._name, self._text, self._labels = name, text, tuple(labels)
        self._counts: dict[tuple[str, ...], Count] = {}
        registry.register(self)

    def labels(self, *values: str) -> Count:
        """The one with these labels; worth keeping where it is needed often."""
        found = self._counts.get(values)
        if found is None:
            assert len(values) == len(self._labels), f"labels of {self._name}"
            found = self._counts[values] = Count()
        return found

    def describe(self) -> Iterable[Metric]:
        return [CounterMetricFamily(self._name, self._text, labels=self._labels)]

    def collect(self) -> Iterable[Metric]:
        family = CounterMetricFamily(self._name, self._text, labels=self._labels)
        for values, count in self._counts.items():
            family.add_metric(values, count.value)
        return [family]


class Histogram(Collector):
    """`buckets`: upper bounds, ascending."""

    def __init__(
        self,
        name: str,
        text: str,
        labels: Sequence[str],
        *,
        buckets: Sequence[float],
        registry: CollectorRegistry,
    ) -> None:
        self._name, self._text, self._labels = name, text, tuple(labels)
        self._buckets = tuple(map(float, buckets))
        self._distributions: dict[tuple[str, ...], Distribution] = {}
        registry.register(self)

    def labels(self, *values: str) -> Distribution:
        """Like Counter.labels."""
        found = self._distributions.get(values)
        if found is None:
            assert len(values) == len(self._labels), f"labels of {self._name}"
            found = self._distributions[values] = Distribution(self._buckets)
        return found

    def describe(self) -> Iterable[Metric]:
        return [HistogramMetricFamily(self._name, self._text, labels=self._labels)]

    def collect(self) -> Iterable[Metric]:
        family = HistogramMetricFamily(self._name, self._text, labels=self._labels)
        names = [*map(floatToGoString, self._buckets), "+Inf"]
        for values, found in self._distributions.items():
            sums = [float(count) for count in accumulate(found.counts)]
            rows = list(zip(names, sums, strict=True))
            family.add_metric(values, buckets=rows, sum_value=found.sum)
        return [family]
