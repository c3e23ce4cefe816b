"""Fairness between tenants for work before the gate: Turns for work in threads and processes, Pace
for work on the event loop.

Turns: who may use one of a few places (threads, processes) next.

    place = await turns.take(grant, cost)       now, or in turn
    place.give_back()                           once

A tenant never holds all places (if there are several), so another tenant finds a place at once.
Waiting work is served by start-time fair queueing, by the seconds that a tenant's work took
(router/tenants/fair_queue.py). How much work may wait is limited for each tenant. Event loop only.

Pace: limits the event loop's time that one tenant's large requests take from other tenants. Parsing
a JSON body cannot be interrupted, and parsing in a thread holds up the loop as well. So a tenant
that has kept the loop busy waits before its next large body is read, until its work was at most
SHARE of the time. It waits only if other tenants had requests here within COMPANY_S.
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

MAX_WAITING: Final = 64  # pieces of work of one tenant
RETRY_S: Final = 1
SHARE: Final = 0.05
LARGE_BYTES: Final = 64 << 10  # smaller bodies take less than a millisecond
BYTES_PER_S: Final = 200e6  # estimated speed of parsing; corrected by the time that it took
LONGEST_WAIT_S: Final = 10.0
COMPANY_S: Final = 5.0


@dataclass(slots=True, eq=False)
class _Turn:
    """One piece of work that waits. `cost`: estimated seconds. `come`: done when its turn comes."""

    id: str
    tenant: str
    weight: float
    cost: float
    come: asyncio.Future[None]
    queued: bool = True


@dataclass(frozen=True, slots=True)
class Place:
    """A place that is taken. `since`: from when on; `cost_s`: estimated seconds of its work."""

    turns: Turns
    tenant: str
    cost_s: float
    since: float

    def give_back(self) -> None:
        self.turns.give_back(self)


class Turns:
    """The places and the work that waits for one. `places`: how many there are; may be changed."""

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
        """Wait for a place for work of about `cost_s` seconds; give it back exactly once.

        Raises Overloaded if too much work of the same tenant waits. Cancelling the wait is safe.
        """
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
            elif not come.cancelled():  # the turn came in the same instant
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
            if not turn.come.done():  # else its caller has just given up
                self._held[turn.tenant] += 1
                turn.come.set_result(None)


class Pace:
    """The pace of each tenant of one router. Times are seconds of one monotonic clock."""

    def __init__(self) -> None:
        self._free_at: dict[str, float] = {}
        self._seen: dict[str, float] = {}

    def seen(self, tenant: str, now: float) -> None:
        """Note that a tenant has a request here now."""
        self._seen.pop(tenant, None)
        self._seen[tenant] = now  # the newest stands last
        while len(self._seen) > 2 and next(iter(self._seen.values())) < now - COMPANY_S:
            del self._seen[next(iter(self._seen))]

    def reserve(self, tenant: str, num_bytes: int, now: float) -> float:
        """Return the seconds until a body of `num_bytes` may be read.

        The tenant's next large bodies wait longer, by the time that this one is expected to take.
        """
        if num_bytes < LARGE_BYTES or not self._in_company(tenant, now):
            return 0.0
        wait_s = max(0.0, self._free_at.get(tenant, 0.0) - now)
        if wait_s <= LONGEST_WAIT_S:
            self._free_at[tenant] = now + wait_s + num_bytes / BYTES_PER_S / SHARE
        return wait_s

    def spent(self, tenant: str, num_bytes: int, busy_s: float, now: float) -> None:
        """Note that a body of `num_bytes` has kept the loop busy for `busy_s`; correct the pace."""
        if num_bytes >= LARGE_BYTES:
            owed = max(now, self._free_at.get(tenant, 0.0))
            more_s = busy_s - num_bytes / BYTES_PER_S
            self._free_at[tenant] = owed + max(0.0, more_s) / SHARE

    def _in_company(self, tenant: str, now: float) -> bool:
        return any(other != tenant and seen > now - COMPANY_S for other, seen in self._seen.items())
