"""Plain counters and histograms say at the scrape what prometheus-client's own would."""

from __future__ import annotations

import prometheus_client as reference
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from baton.runtime.metrics import counter, histogram, render
from router.tallies import Counter, Histogram

BOUNDS = (0.001, 0.5, 1.0, 2.5, 10)
VALUES = st.one_of(st.sampled_from(BOUNDS), st.floats(0.0, 20.0))
MODELS = st.sampled_from(["a", 'b"\n', "c"])


@given(st.lists(st.tuples(MODELS, VALUES)))
def test_a_histogram_reads_like_the_library_s(seen: list[tuple[str, float]]) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    own = Histogram(histogram("waits", "Waits", "seconds", ("model",), BOUNDS), ours)
    known = reference.Histogram("waits", "Waits", ["model"], buckets=BOUNDS, registry=theirs)
    for model, value in seen:
        own.labels(model).observe(value)
        known.labels(model).observe(value)
    assert render(ours) == render(theirs)


@given(st.lists(st.tuples(MODELS, st.sampled_from(["p", "d"]), st.integers(0, 10))))
def test_a_counter_reads_like_the_library_s(seen: list[tuple[str, str, int]]) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    own = Counter(counter("tokens", "Tokens", "tokens", ("model", "role")), ours)
    known = reference.Counter("tokens", "Tokens", ["model", "role"], registry=theirs)
    for model, role, amount in seen:
        own.labels(model, role).inc(amount)
        known.labels(model, role).inc(amount)
    assert render(ours) == render(theirs)


def test_one_without_labels_is_there_from_the_start() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    Histogram(histogram("waits", "Waits", "seconds", (), BOUNDS), ours).labels()
    reference.Histogram("waits", "Waits", buckets=BOUNDS, registry=theirs)
    assert render(ours) == render(theirs)
