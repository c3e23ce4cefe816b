"""bench.overload: the search for the peak, what counts as what, how the limits are told."""

from __future__ import annotations

import pytest

from bench.load import LoadTarget, open_client
from bench.measure import Sample, SloLimits
from bench.overload import Ask, OverloadFound, OverloadOptions, find_peak, measure

CAPACITY = 20.0
SLO = SloLimits(ttft_s=1.0, tpot_s=0.1)


def sheds(kept: float) -> Ask:
    """A server that keeps this share of its goodput beyond its capacity."""

    async def ask(rate: float) -> OverloadFound:
        good = rate if rate <= CAPACITY else kept * CAPACITY
        return OverloadFound(
            rate, good, int(rate * 10), int(good * 10), 0, int((rate - good) * 10), 0
        )

    return ask


async def test_the_peak_is_found_and_passed() -> None:
    tried = await find_peak(sheds(0.95), 2.0)
    rates = [found.rate for found in tried]
    assert rates == sorted(rates)
    best = max(tried, key=lambda found: found.goodput)
    assert CAPACITY / 1.4 <= best.goodput <= CAPACITY
    assert len(tried) - 1 - tried.index(best) == 2, "two worse ones behind it"


@pytest.mark.parametrize(("kept", "passes"), [(0.97, True), (0.5, False)])
async def test_the_overload_is_compared_with_the_peak(kept: float, passes: bool) -> None:
    found = await measure(sheds(kept), OverloadOptions(rounds=3))
    assert found["overload"]["rate"] == pytest.approx(3 * found["peak"]["goodput"])
    assert found["kept"] is passes
    assert found["share"] == pytest.approx(kept * CAPACITY / found["peak"]["goodput"])


def test_what_became_of_each_request() -> None:
    good = Sample(0.0, 0.0, [0.5, 0.55], output_tokens=2)
    late = Sample(0.0, 0.0, [1.5, 1.55], output_tokens=2)
    slow = Sample(0.0, 0.0, [0.5, 1.5], output_tokens=2)
    shed = Sample(0.0, 0.0, error="StreamError: HTTP 429: at its limit")
    gone = Sample(0.0, 0.0, error="StreamError: HTTP 503: cannot be kept now")
    broken = Sample(0.0, 0.0, error="ReadTimeout: ")
    found = OverloadFound.of(3.0, 2.0, [good, late, slow, shed, gone, broken], SLO)
    assert (found.good, found.late, found.refused, found.failed) == (1, 2, 2, 1)
    assert found.goodput == 0.5


async def test_the_limits_travel_in_headers() -> None:
    target = LoadTarget("http://127.0.0.1:1", api_key="k", headers=(("x-slo-ttft-ms", "1000"),))
    async with open_client(target) as client:
        assert client.headers["x-slo-ttft-ms"] == "1000"
        assert client.headers["authorization"] == "Bearer k"
