"""Prometheus metrics of every process: how they are declared, collected and rendered.

A process declares each of its metrics once, in a list: a router in router/metrics/metric_list.py, a
node in baton/node/metric_list.py. Its collectors take names, help texts and labels from there, and
docs/metrics.md is generated from both lists (tools/metrics_page.py).

Own names are `baton_*`. A metric for which vLLM has a name is also exported under that name, so
that vLLM's Grafana board works. Every process has its own registry (never prometheus-client's
global one). Numbers are read at scrape time, so counting costs the same whether scraped or not.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final, NamedTuple

from prometheus_client import CollectorRegistry, disable_created_metrics
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from baton.protocol.handles import NodeLoad

# prometheus-client adds a second series to each counter, with its start time. The library can
# switch that off only for the whole process.
disable_created_metrics()

# For every scraper: in OpenMetrics, which Prometheus 2 prefers, prometheus-client writes the colon
# of vLLM's names as an underscore.
CONTENT_TYPE: Final = CONTENT_TYPE_PLAIN_0_0_4
# Bounds in seconds, for GPUs and CPUs (docs/metrics.md): all of vLLM's, which begin at 10 ms for
# a token and at 0.3 s for a queue; finer ones below, and none more than 2.5 times the one before.
TTFT_BUCKETS: Final = (
    0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25,
    0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0, 1280.0, 2560.0,
)  # fmt: skip
TPOT_BUCKETS: Final = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0015, 0.002, 0.0025, 0.004, 0.005, 0.0075, 0.01, 0.015, 0.02,
    0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0,
)  # fmt: skip
E2E_BUCKETS: Final = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0,
    15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 3840.0, 7680.0,
)  # fmt: skip
QUEUE_BUCKETS: Final = (0.0001, 0.00025, 0.0005, *E2E_BUCKETS)
TRANSFER_BUCKETS: Final = (
    0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0,
    10.0, 20.0, 50.0, 100.0,
)  # fmt: skip


class MetricKind(enum.StrEnum):
    """The Prometheus types in use."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Sums(NamedTuple):
    """A histogram's value.

    `up_to` lists (bound as text, number of values up to it); the last bound is `+Inf`.
    """

    up_to: Sequence[tuple[str, float]]
    total: float

    @classmethod
    def of(cls, bounds: Sequence[float], counts: Sequence[int], total: float) -> Sums:
        """Return the value of `counts[i]` numbers up to `bounds[i]` and above the bound before; the
        last count is of numbers beyond all bounds.
        """
        shown = [*map(floatToGoString, bounds), "+Inf"]
        return cls(list(zip(shown, map(float, accumulate(counts)), strict=True)), total)


Value = float | Sums
# A metric without labels has one value; one with labels has a value for each tuple of label values.
Values = Value | Mapping[tuple[str, ...], Value]


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """The declaration of one metric.

    `name`: without the `_total` that scrapes add to a counter. `meaning`: the help text. `buckets`:
    upper bounds of a histogram; empty = it has only sum and count. `aliases`: other names under
    which the same values are exported, directly after the first.
    """

    kind: MetricKind
    name: str
    meaning: str
    unit: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    aliases: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """All names, as scrapes show them."""
        end = "_total" if self.kind is MetricKind.COUNTER else ""
        return tuple(name + end for name in (self.name, *self.aliases))

    def families(self, values: Values, fixed: tuple[str, ...] = ()) -> Iterator[Metric]:
        """Yield what a scrape shows, under each name.

        `fixed` are label values that come first in all series.
        """
        if not isinstance(values, Mapping):
            values = {(): values}
        for name in (self.name, *self.aliases):
            family = _FAMILIES[self.kind](name, self.meaning, labels=self.labels)
            for labels, value in values.items():
                _add(family, (*fixed, *labels), value)
            yield family


_Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily
_FAMILIES: Final[dict[MetricKind, type[_Family]]] = {
    MetricKind.COUNTER: CounterMetricFamily,
    MetricKind.GAUGE: GaugeMetricFamily,
    MetricKind.HISTOGRAM: HistogramMetricFamily,
}


def _add(family: _Family, labels: Sequence[str], value: Value) -> None:
    if isinstance(family, HistogramMetricFamily):
        assert isinstance(value, Sums), f"{family.name} is a histogram"
        family.add_metric(labels, list(value.up_to), value.total)
    else:
        assert not isinstance(value, Sums), f"{family.name} is no histogram"
        family.add_metric(labels, value)


def counter(name: str, meaning: str, unit: str, labels: tuple[str, ...] = ()) -> MetricSpec:
    return MetricSpec(MetricKind.COUNTER, name, meaning, unit, labels)


def gauge(name: str, meaning: str, unit: str, labels: tuple[str, ...] = ()) -> MetricSpec:
    return MetricSpec(MetricKind.GAUGE, name, meaning, unit, labels)


def histogram(
    name: str, meaning: str, unit: str, labels: tuple[str, ...], buckets: tuple[float, ...] = ()
) -> MetricSpec:
    return MetricSpec(MetricKind.HISTOGRAM, name, meaning, unit, labels, buckets)


# Labels of metrics that belong to one node.
OF_NODE: Final = ("model_name", "node", "role")
ASYNCIO_TASKS: Final = gauge(
    "baton_asyncio_tasks", "Tasks of the event loop, by what they run", "tasks", ("of",)
)
# About the files that a process reads again when they change (watched_files.py).
FILES: Final = (
    gauge(
        "baton_file_last_reload_successful",
        "Whether the files of an option could be read as they are now; if not, the old ones serve",
        "1 or 0",
        ("option",),
    ),
    gauge(
        "baton_file_last_reload_success_timestamp_seconds",
        "When the files of an option that are in use were read",
        "seconds since 1970",
        ("option",),
    ),
    gauge(
        "baton_certificate_expiration_timestamp_seconds",
        "When the first certificate of the chain in use ends",
        "seconds since 1970",
        ("option",),
    ),
)
# prometheus-client reads these from /proc; these are its help texts.
KERNEL: Final = (
    gauge("process_virtual_memory_bytes", "Virtual memory size in bytes.", "bytes"),
    gauge("process_resident_memory_bytes", "Resident memory size in bytes.", "bytes"),
    gauge(
        "process_start_time_seconds",
        "Start time of the process since unix epoch in seconds.",
        "seconds since 1970",
    ),
    counter("process_cpu_seconds", "Total user and system CPU time spent in seconds.", "seconds"),
    gauge("process_open_fds", "Number of open file descriptors.", "descriptors"),
    gauge("process_max_fds", "Maximum number of open file descriptors.", "descriptors"),
)
PROCESS: Final = (ASYNCIO_TASKS, *FILES, *KERNEL)  # of every process


class MetricList:
    """All metrics of a kind of process, by name, in the order in which they are documented."""

    def __init__(self, *specs: MetricSpec) -> None:
        self._specs = {spec.name: spec for spec in specs}
        assert len(self._specs) == len(specs), "a metric is declared once"

    def __getitem__(self, name: str) -> MetricSpec:
        return self._specs[name]

    def __iter__(self) -> Iterator[MetricSpec]:
        return iter(self._specs.values())

    def watch(
        self,
        registry: CollectorRegistry,
        values: Callable[[], Mapping[str, Values]],
        fixed: tuple[str, ...] = (),
    ) -> None:
        """Let each scrape of `registry` call `values` (name -> values) on the scrape's thread."""
        registry.register(_Watched(self, values, fixed))


class _Watched(Collector):
    def __init__(
        self,
        metrics: MetricList,
        values: Callable[[], Mapping[str, Values]],
        fixed: tuple[str, ...],
    ) -> None:
        self._metrics = metrics
        self._values = values
        self._fixed = fixed

    def collect(self) -> Iterable[Metric]:
        for name, values in self._values().items():
            yield from self._metrics[name].families(values, self._fixed)


def render(registry: CollectorRegistry) -> bytes:
    """Return the registry in Prometheus' text format, for a body of CONTENT_TYPE."""
    return generate_latest(registry)


def cache_usage(load: NodeLoad) -> float:
    """Return the share of a node's KV blocks in use, 0 to 1."""
    return 1.0 - load.free_blocks / load.total_blocks if load.total_blocks else 0.0
