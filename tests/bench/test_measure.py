"""The arithmetic of the benchmark, on numbers that can be checked by hand."""

from __future__ import annotations

import pytest

from bench.measure import Sample, SloLimits, percentile, summarize
from bench.serve import parse, ratios, rows_of, table_of
from bench.workload import WorkloadSpec, plan_requests

SLO = SloLimits(ttft_s=0.5, tpot_s=0.1)


def sample(planned: float, pieces: list[float], tokens: int, error: str | None = None) -> Sample:
    ended = pieces[-1] if pieces else planned
    return Sample(planned, planned + 0.01, list(pieces), ended, 10, tokens, error)


def test_times_of_one_request() -> None:
    one = sample(1.0, [1.2, 1.3, 1.5], 3)
    assert one.ttft_s == pytest.approx(0.2)  # from the planned arrival
    assert one.tpot_s == pytest.approx(0.15)
    assert one.itl_s == pytest.approx([0.1, 0.2])
    assert sample(1.0, [1.2], 1).tpot_s is None


def test_percentiles_interpolate() -> None:
    values = [0.0, 10.0, 20.0, 30.0]
    assert percentile(values, 0.5) == 15.0
    assert percentile(values, 0.9) == pytest.approx(27.0)
    assert percentile([7.0], 0.99) == 7.0


@pytest.mark.parametrize(
    ("made", "good"),
    [
        (sample(0.0, [0.4, 0.5], 2), True),
        (sample(0.0, [0.6, 0.7], 2), False),  # first token late
        (sample(0.0, [0.1, 0.3], 2), False),  # slow afterwards
        (sample(0.0, [0.4], 1), True),  # nothing afterwards
        (sample(0.0, [0.1, 0.15], 2, "broke off"), False),
        (sample(0.0, [], 0), False),
    ],
)
def test_slo(made: Sample, good: bool) -> None:
    assert SLO.met_by(made) is good


def test_summary() -> None:
    samples = [
        sample(0.0, [0.2, 0.3], 2),
        sample(1.0, [1.8, 2.0], 2),
        sample(1.5, [], 0, "HTTP 503"),
    ]
    summary = summarize("x", samples, SLO, handover_s=0.004)
    assert (summary.requests, summary.failed, summary.good) == (3, 1, 1)
    assert summary.duration_s == 2.0
    assert summary.request_rate == 1.0
    assert summary.token_rate == 2.0
    assert summary.goodput == 0.5
    assert summary.handover_ms == 4.0
    assert summary.ttft is not None
    assert summary.ttft.p50 == pytest.approx(500.0)
    assert summary.max_lateness_ms == pytest.approx(10.0)
    assert summary.as_json()["goodput"] == 0.5


def test_a_run_is_a_column() -> None:
    summary = summarize("x", [sample(0.0, [0.2, 0.3], 2)], SLO)
    rows = rows_of(summary)
    assert rows["TTFT p90"] == "200.0"
    assert rows["TPOT p50"] == "100.0"
    assert rows["hand-over, mean"] == "-"
    assert len(table_of([summary, summary]).columns) == 3


def test_nothing_succeeded() -> None:
    summary = summarize("x", [sample(0.0, [], 0, "refused")], SLO)
    assert rows_of(summary)["TTFT p50"] == "-"
    assert summary.ttft is None
    assert summary.token_rate == 0.0


def test_ratios_pair_the_rounds() -> None:
    fast, slow = [sample(0.0, [0.1, 0.2], 2)], [sample(0.0, [0.2, 0.4], 2)]
    runs = [("apart", fast), ("colocated", slow), ("apart", slow), ("colocated", slow)]
    found = ratios([summarize(label, samples, SLO) for label, samples in runs])
    assert found["ttft p50"] == pytest.approx({"median": 0.75, "min": 0.5, "max": 1.0})
    assert found["tokens/s"] == pytest.approx({"median": 1.5, "min": 1.0, "max": 2.0})


def test_a_workload_is_a_function_of_its_spec() -> None:
    spec = WorkloadSpec(200, rate=10.0, input_words=20, output_tokens=8, shared_prefix_words=5)
    planned = plan_requests(spec)
    assert planned == plan_requests(spec)
    assert [request.at_s for request in planned] == sorted(request.at_s for request in planned)
    assert planned[-1].at_s == pytest.approx(20.0, rel=0.3)  # 200 arrivals at 10 per second
    assert all(4 <= request.max_tokens <= 12 for request in planned)
    prefixes = {tuple(str(request.prompt).split()[:5]) for request in planned}
    assert len(prefixes) == 1
    assert len({str(request.prompt).split()[5] for request in planned}) == 200


def test_rate_zero_sends_all_at_once() -> None:
    spec = WorkloadSpec(5, rate=0.0, input_words=2, output_tokens=2, length_spread=0.0)
    assert {request.at_s for request in plan_requests(spec)} == {0.0}
    assert {request.max_tokens for request in plan_requests(spec)} == {2}


def test_flags_after_the_dashes_go_to_up() -> None:
    options, flags = parse(["--compare", "--rounds", "2", "--", "--dtype", "float32"])
    assert options.compare
    assert options.rounds == 2
    assert flags == ["--dtype", "float32"]
