"""Turns: who may use one of a few places next (threads, processes), fair between tenants.

    place = await turns.take(grant, cost)       now, or in turn
    place.give_back()                           once

A tenant never holds all places, so another one finds a place at once. Waiting work is served by
start-time fair queueing, by the seconds that a tenant's work took (router/tenants/fair_queue.py).
How much work may wait is limited for each tenant. Event loop only.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass
from typing import Final

from baton.protocol.clock import Clock
from baton.protocol.errors import Overloaded
from router.tenants.fair_queue import FairQueue
from router.tenants.keys import Grant

MAX_WAITING: Final = 64  # of one tenant
RETRY_S: Final = 1


@dataclass(slots=True, eq=False)
class _Turn:
    """One piece of work that waits. `cost`: seconds that it may take."""

    id: str
    tenant: str
    weight: float
    cost: float
    come: asyncio.Future[None]
    queued: bool = True


@dataclass(frozen=True, slots=True)
class Place:
    """One of the places. `since`: when it was taken; `cost_s`: the estimate for its work."""

    turns: Turns
    tenant: str
    cost_s: float
    since: float

    def give_back(self) -> None:
        self.turns.give_back(self)


class Turns:
    """`places`: how many may work at once; whoever makes it may change it."""

    def __init__(self, places: int, clock: Clock) -> None:
        self.places = places
        self._clock = clock
        self._held: Counter[str] = Counter()  # places, by tenant
        self._queue: FairQueue[_Turn] = FairQueue()
        self._waiting: Counter[str] = Counter()
        self._number = 0

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    async def take(self, grant: Grant, cost_s: float) -> Place:
        """A place for work that takes about `cost_s`, to be given back once. Raises Overloaded if
        too much work of the same tenant waits. A caller that gives up waiting leaves no trace."""
        tenant = grant.domain
        if not self._has_room(tenant):
            await self._wait(tenant, grant.weight, cost_s)
        else:
            self._held[tenant] += 1
        return Place(self, tenant, cost_s, self._clock.monotonic())

    def give_back(self, place: Place) -> None:
        took_s = self._clock.monotonic() - place.since
        self._queue.settle(place.tenant, took_s - place.cost_s)
        self._release(place.tenant)

    def _may_go(self, tenant: str) -> bool:
        return self._held[tenant] < max(1, self.places - 1)

    def _has_room(self, tenant: str) -> bool:
        return self._held.total() < self.places and self._may_go(tenant)

    async def _wait(self, tenant: str, weight: float, cost_s: float) -> None:
        if self._waiting[tenant] >= MAX_WAITING:
            message = "too many requests of this key wait to be read"
            raise Overloaded(message, retry_after_s=RETRY_S)
        self._number += 1
        come = asyncio.get_running_loop().create_future()
        turn = _Turn(str(self._number), tenant, weight, cost_s, come)
        self._queue.push(turn)
        self._waiting[tenant] += 1
        try:
            await come
        except asyncio.CancelledError:
            if turn.queued:
                self._queue.remove(turn)
            elif not come.cancelled():  # it came in the same instant
                self._release(tenant)
            raise
        finally:
            self._waiting[tenant] -= 1

    def _release(self, tenant: str) -> None:
        self._held[tenant] -= 1
        if not self._held[tenant]:
            del self._held[tenant]
        while self._held.total() < self.places and self._queue.head(self._may_go) is not None:
            turn = self._queue.pop(self._may_go)
            turn.queued = False
            if not turn.come.done():  # else it has just given up
                self._held[turn.tenant] += 1
                turn.come.set_result(None)
