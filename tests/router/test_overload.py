"""Overload in simulated time: goodput stays, and one tenant's flood is its own."""

from __future__ import annotations

import pytest

from router.request.gate.admission import Reason
from router.tenants.keys import Grant
from tests.router.overload import goodput, simulate

FLOOD, SMALL, HEAVY = Grant("flood", "flood"), Grant("small", "small"), Grant("heavy", "heavy", 3.0)


@pytest.fixture(scope="module")
def peak() -> float:
    """Requests per second, the best there is."""
    return max(goodput(simulate({FLOOD: rate})) for rate in (12.0, 14.0, 16.0, 18.0))


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_goodput_at_three_times_the_load_stays_at_its_peak(seed: int, peak: float) -> None:
    overloaded = simulate({FLOOD: 3 * peak}, seed=seed)
    assert goodput(overloaded) >= 0.9 * peak
    admitted = [job for job in overloaded.jobs if job.first_at is not None]
    assert overloaded.refused == len(overloaded.jobs) - len(admitted)
    # Nearly nobody is let in for nothing: whoever gets a token gets it in time.
    assert sum(job.good for job in admitted) >= 0.97 * len(admitted)
    assert overloaded.queue.stats.refused[Reason.SLO] == overloaded.refused
    assert (overloaded.queue.num_live, overloaded.queue.num_queued) == (0, 0)


def test_without_admission_it_would_collapse(peak: float) -> None:
    """The yardstick: the same cluster, everything sent on as it comes."""
    assert goodput(simulate({FLOOD: 3 * peak}, gated=False)) < 0.1 * peak


@pytest.mark.parametrize("seed", [1, 2])
def test_goodput_stays_where_tokens_come_later_than_promised(seed: int, peak: float) -> None:
    """A busy router, a busy network: without a margin, nearly all are let in a bit too late."""
    lag_s = (0.3, 0.6)
    overloaded = simulate({FLOOD: 3 * peak}, seed=seed, lag_s=lag_s)
    assert goodput(overloaded) >= 0.9 * peak
    assert 0.3 < overloaded.ttft_error.seconds < 0.8
    heedless = simulate({FLOOD: 3 * peak}, seed=seed, lag_s=lag_s, learns=False)
    assert goodput(heedless) < 0.7 * peak


def test_below_capacity_nobody_is_refused_and_hardly_anybody_waits(peak: float) -> None:
    easy = simulate({FLOOD: 0.6 * peak})
    assert easy.refused == 0
    assert all(job.good for job in easy.jobs)
    assert easy.queue.stats.queued <= 0.05 * len(easy.jobs)


def test_a_flood_does_not_touch_a_small_tenant(peak: float) -> None:
    overloaded = simulate({FLOOD: 3 * peak, SMALL: 0.2 * peak})
    small = [job for job in overloaded.jobs if job.grant is SMALL]
    assert sum(job.good for job in small) >= 0.95 * len(small)
    assert goodput(overloaded) >= 0.9 * peak


def test_two_floods_share_by_weight(peak: float) -> None:
    overloaded = simulate({FLOOD: 2 * peak, HEAVY: 2 * peak})
    served = dict.fromkeys((FLOOD, HEAVY), 0)
    for job in overloaded.jobs:
        if job.first_at is not None:
            served[job.grant] += job.prompt + job.output
    assert served[HEAVY] / served[FLOOD] == pytest.approx(3.0, rel=0.15)
    assert goodput(overloaded) >= 0.9 * peak
