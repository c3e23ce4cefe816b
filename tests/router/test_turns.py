"""Turns: a tenant never holds all places, waits are fair, and who gives up leaves no trace."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest

from baton.protocol.errors import Overloaded
from router.tenants.keys import Grant
from router.tenants.turns import (
    COMPANY_S,
    LARGE_BYTES,
    LONGEST_WAIT_S,
    MAX_WAITING,
    SHARE,
    Pace,
    Place,
    Turns,
)

A, B, C = (Grant(name=name, tenant=name) for name in "abc")


@dataclass
class Clock:
    now: float = 0.0

    def monotonic(self) -> float:
        return self.now


async def settle() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


def taking(turns: Turns, grant: Grant, cost_s: float = 1.0) -> asyncio.Task[Place]:
    return asyncio.create_task(turns.take(grant, cost_s))


async def test_one_place_is_left_to_others() -> None:
    turns = Turns(3, Clock())
    held = [await turns.take(A, 1.0), await turns.take(A, 1.0)]
    third = taking(turns, A)
    await settle()
    assert not third.done()
    other = await asyncio.wait_for(turns.take(B, 1.0), 1)  # at once, whatever A waits for
    held[0].give_back()
    await settle()
    assert third.done()
    for place in (held[1], other, third.result()):
        place.give_back()
    assert turns.num_waiting == 0


async def test_those_that_wait_are_served_by_what_they_used() -> None:
    """A's work takes ten times as long as it was thought to: B gets its turns meanwhile."""
    clock = Clock()
    turns = Turns(2, clock)
    order: list[str] = []

    async def work(grant: Grant, took_s: float) -> None:
        place = await turns.take(grant, 1.0)
        order.append(grant.name)
        await settle()
        clock.now += took_s
        place.give_back()

    blocker, other = await turns.take(C, 1.0), await turns.take(Grant(tenant="d"), 1.0)
    tasks = [asyncio.create_task(work(A, 10.0)) for _ in range(3)]
    tasks += [asyncio.create_task(work(B, 1.0)) for _ in range(3)]
    await settle()
    blocker.give_back()
    await asyncio.gather(*tasks)
    assert order[:4] == ["a", "b", "b", "b"]
    other.give_back()


async def test_a_flood_is_refused_and_others_are_not() -> None:
    turns = Turns(2, Clock())
    first = await turns.take(A, 1.0)
    waiting = [taking(turns, A) for _ in range(MAX_WAITING)]
    await settle()
    with pytest.raises(Overloaded) as caught:
        await turns.take(A, 1.0)
    assert caught.value.retry_after_s
    (await turns.take(B, 1.0)).give_back()
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert turns.num_waiting == 0
    first.give_back()
    (await turns.take(A, 1.0)).give_back()


async def test_who_is_cancelled_as_its_turn_comes_gives_it_on() -> None:
    turns = Turns(1, Clock())
    held = await turns.take(A, 1.0)
    leaving, next_one = taking(turns, B), taking(turns, C)
    await settle()
    held.give_back()  # B's turn
    leaving.cancel()
    await settle()
    assert next_one.done()
    next_one.result().give_back()
    # And one that has given up in the same instant before its turn.
    held = await turns.take(A, 1.0)
    leaving, next_one = taking(turns, B), taking(turns, C)
    await settle()
    leaving.cancel()
    held.give_back()
    await settle()
    next_one.result().give_back()
    assert turns.num_waiting == 0


# ---- large bodies ----


def test_large_bodies_keep_their_distance_in_company() -> None:
    pace = Pace()
    pace.seen("a", 0.0)
    assert pace.reserve("a", 8 << 20, 0.0) == 0.0
    assert pace.reserve("a", 8 << 20, 0.0) == 0.0  # alone: as fast as it likes
    pace.seen("b", 0.0)
    assert pace.reserve("a", 8 << 20, 0.0) == 0.0
    waits = [pace.reserve("a", 8 << 20, 0.0) for _ in range(3)]
    assert 0 < waits[0] < waits[1] < waits[2]
    assert pace.reserve("a", LARGE_BYTES - 1, 0.0) == 0.0  # a small one
    assert pace.reserve("b", 8 << 20, 0.0) == 0.0  # another tenant's
    pace.spent("a", 8 << 20, 1.0, 0.0)  # it was slower to read than was thought
    assert pace.reserve("a", 8 << 20, 0.0) > waits[2] + 0.9 / SHARE
    assert pace.reserve("a", 8 << 20, 0.0) > LONGEST_WAIT_S
    assert pace.reserve("a", 8 << 20, COMPANY_S + 1) == 0.0  # b has gone
