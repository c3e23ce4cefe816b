"""Token buckets, drain rates and answer lengths against a clock that the test moves."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.request.gate.rates import AnswerLength, DrainRate, TokenBucket


def test_a_bucket_holds_a_minute_and_refills() -> None:
    bucket = TokenBucket(600, now=0.0)
    assert bucket.take(600, 0.0) == 0.0
    assert bucket.take(50, 0.0) == pytest.approx(5.0)
    assert bucket.take(50, 4.9) == pytest.approx(0.1)
    assert bucket.take(50, 5.0) == 0.0
    assert bucket.level(1000.0) == 600


def test_a_request_beyond_the_bucket_needs_a_full_one_and_leaves_a_debt() -> None:
    bucket = TokenBucket(600, now=0.0)
    assert bucket.take(1, 0.0) == 0.0
    assert bucket.take(900, 0.0) == pytest.approx(0.1)
    assert bucket.take(900, 0.1) == 0.0
    assert bucket.level(0.1) == pytest.approx(-300)
    assert bucket.take(10, 0.1) == pytest.approx(31.0)


def test_what_was_not_used_comes_back_and_excess_is_owed() -> None:
    bucket = TokenBucket(600, now=0.0)
    bucket.take(500, 0.0)
    bucket.give_back(400, 0.0)
    assert bucket.level(0.0) == 500
    bucket.give_back(1000, 0.0)
    assert bucket.level(0.0) == 600
    bucket.give_back(-700, 0.0)
    assert bucket.level(0.0) == -100


@given(
    rate=st.integers(1, 100_000),
    asks=st.lists(st.tuples(st.floats(0, 30), st.integers(1, 20_000)), max_size=60),
)
def test_never_more_than_the_rate_and_one_burst(rate: int, asks: list[tuple[float, int]]) -> None:
    """Whatever is asked when: what passes in any time is a minute's worth, the refill meanwhile,
    and at most one request that is larger than the bucket."""
    bucket, now, passed = TokenBucket(rate, 0.0), 0.0, 0.0
    for pause, tokens in asks:
        now += pause
        wait_s = bucket.take(tokens, now)
        assert wait_s >= 0
        if wait_s == 0:
            passed += tokens
        largest = max(tokens for _, tokens in asks)
        assert passed <= rate + rate / 60 * now + max(0, largest - rate) + 1e-3 * rate
        if wait_s > 0:
            # And it keeps its word: after that long it would pass.
            assert bucket.level(now) + wait_s * rate / 60 >= min(tokens, rate) - 1e-3 * rate


def test_the_drain_rate_is_measured_while_there_is_a_queue() -> None:
    drain = DrainRate()
    drain.tick(0.0, queued=False)
    drain.add(1000)  # no queue yet: says nothing
    assert drain.tokens_per_s is None
    drain = DrainRate()
    for tenth in range(200):
        drain.tick(tenth / 10, queued=True)
        drain.add(50)
    assert drain.tokens_per_s == pytest.approx(500, rel=0.05)
    drain.tick(1000.0, queued=False)  # an idle hour changes nothing
    assert drain.tokens_per_s == pytest.approx(500, rel=0.05)
    for tenth in range(200):
        drain.tick(1000 + tenth / 10, queued=True)
        drain.add(10)
    assert drain.tokens_per_s == pytest.approx(100, rel=0.1)


@pytest.mark.parametrize("every_s", [1, 20, 60])
def test_a_queue_that_something_leaves_seldom_has_a_rate(every_s: int) -> None:
    drain = DrainRate()
    rates: list[float] = []
    for second in range(10 * every_s + every_s):
        drain.tick(float(second), queued=True)
        if second and second % every_s == 0:
            drain.add(600 * every_s)
        if second >= every_s:
            assert drain.tokens_per_s is not None
            rates.append(drain.tokens_per_s)
    # Half of it just before the next one is due: it might not come.
    assert 290 <= min(rates) <= max(rates) <= 610


def test_answers_are_expected_to_be_as_long_as_of_late() -> None:
    answers = AnswerLength()
    assert answers.expect(100, 2) == 200
    answers.add(10)
    assert answers.expect(100, 1) == 10
    assert answers.expect(5, 3) == 15
    for _ in range(1000):
        answers.add(40)
    assert math.isclose(answers.expect(100, 1), 40, rel_tol=0.01)
