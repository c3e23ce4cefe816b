"""Second tries are at most a tenth of the requests, and what must go on needs none."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from baton.protocol.errors import (
    BatonError,
    GivenBack,
    InternalError,
    KVCorrupt,
    KVLost,
    KVTimeout,
    NodeLost,
    Overloaded,
    Unavailable,
)
from baton.protocol.messages import SubmitDecode
from router.request.retry_budget import BudgetSettings, RetryBudget, is_free
from tests.router.clients import Client, cluster, first_of
from tests.router.fakes import FakeClock, make_request


def test_a_tenth_of_the_requests_may_be_tried_again() -> None:
    clock = FakeClock()
    budget = RetryBudget(clock, BudgetSettings(burst=10, trickle_s=1e9))
    for _ in range(1000):
        budget.begin()
        budget.take()
    assert budget.granted == pytest.approx(100 + 10, abs=1)
    assert budget.granted + budget.refused == 1000


def test_savings_are_bounded_and_come_back_with_time() -> None:
    clock = FakeClock()
    budget = RetryBudget(clock)
    for _ in range(10_000):
        budget.begin()
    assert sum(budget.take() for _ in range(20)) == 10
    clock.advance(10.0)
    assert budget.take()
    assert not budget.take()


def test_who_needs_no_budget() -> None:
    free = (NodeLost(""), GivenBack(""), Unavailable(""), KVLost(""))
    assert all(is_free(error) for error in free)
    busy = (Overloaded(""), KVCorrupt(""), KVTimeout(""), InternalError(""))
    assert not any(is_free(error) for error in busy)


def test_spending_more_than_there_is_raises_the_failure_itself() -> None:
    budget = RetryBudget(FakeClock(), BudgetSettings(burst=1))
    budget.spend(Overloaded("full"))
    with pytest.raises(BatonError, match="really full"):
        budget.spend(Overloaded("really full"))


async def test_refusals_end_when_the_budget_does_and_deaths_do_not() -> None:
    async with cluster("d1", "d2") as (router, (d1, d2)):
        budget = router.dispatcher.retries
        while budget.take():
            pass
        refused = budget.refused
        client = Client(router, make_request("refused"))
        node = await first_of([d1, d2], SubmitDecode)
        node.fail((await node.hear(SubmitDecode)).request, "overloaded", retryable=True)
        assert isinstance(await client.fails(), Overloaded)
        assert budget.refused == refused + 1
        other = d2 if node is d1 else d1
        assert not other.heard_of(SubmitDecode), "no second try"
        # A node that dies takes nobody along, whatever the budget.
        client = Client(router, make_request("bereaved"))
        node.heard.clear()
        other.heard.clear()
        victim = await first_of([d1, d2], SubmitDecode)
        survivor = d2 if victim is d1 else d1
        await victim.hear(SubmitDecode)
        await victim.stop()
        again = (await survivor.hear(SubmitDecode)).request
        assert again.epoch == 2
        survivor.tokens(again, 0, 41)
        await client.next()
        # Nor does a refusal end what a client has begun to read: the token is worth a retry.
        assert budget.refused == refused + 1
        survivor.finish(again, 1, 42)
        assert await client.done() == [41, 42]


@dataclass
class Outcome:
    good: int = 0
    attempts: int = 0


def storm(budget: RetryBudget | None, clock: FakeClock, tries: int) -> Outcome:
    """A minute of three times what a cluster can do, in virtual time. It pays for its refusals,
    too: a fifth of a request each, and what it cannot pay at once it owes the next second."""
    rng, outcome, capacity = random.Random(1), Outcome(), 100.0
    left = 0.0
    for _ in range(60):
        clock.advance(1.0)
        left = min(0.0, left) + capacity
        due = [tries] * int(3 * capacity)  # tries that each request has left
        if budget is not None:
            for _ in due:
                budget.begin()
        while due:
            request = due.pop(rng.randrange(len(due)))
            outcome.attempts += 1
            if left >= 1 and rng.random() < left / capacity:
                left -= 1
                outcome.good += 1
                continue
            left -= 0.2
            if request > 1 and (budget is None or budget.take()):
                due.append(request - 1)
    return outcome


def test_the_budget_keeps_an_overload_from_feeding_itself() -> None:
    clock = FakeClock()
    bounded = storm(RetryBudget(clock), clock, tries=8)
    unbounded = storm(None, FakeClock(), tries=8)
    without = storm(None, FakeClock(), tries=1)
    requests = 3 * 100 * 60
    assert bounded.attempts <= 1.1 * requests + 20
    assert unbounded.attempts > 3 * requests
    assert unbounded.good < 0.1 * without.good, "the yardstick: retries eat the cluster"
    assert bounded.good > 0.8 * without.good
