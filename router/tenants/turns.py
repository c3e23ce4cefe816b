"""Work before the gate, fair between tenants: Turns off the event loop, Pace on it.

Turns: who may use one of a few places next (threads, processes).

    place = await turns.take(grant, cost)       now, or in turn
    place.give_back()                           once

A tenant never holds all places, so another one finds a place at once. Waiting work is served by
start-time fair queueing, by the seconds that a tenant's work took (router/tenants/fair_queue.py).
How much work may wait is limited for each tenant. Event loop only.

Pace: how much of the event loop's time one tenant's large requests take from the others. Parsing a
JSON body cannot be interrupted, and a thread that parses holds up the others as well. So a tenant
that has kept the loop busy waits before its next large body is read, until that work was at most
SHARE of the time. It waits only while other tenants have requests here, or had some a moment ago.
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
SHARE: Final = 0.05
LARGE_BYTES: Final = 64 << 10  # smaller bodies take less than a millisecond
BYTES_PER_S: Final = 200e6  # of a large one, about; what it took is settled afterwards
LONGEST_WAIT_S: Final = 10.0
COMPANY_S: Final = 5.0  # so long ago is a moment


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


class Pace:
    """Of all tenants of one router. Times are seconds of one monotonic clock and are passed in."""

    def __init__(self) -> None:
        self._free_at: dict[str, float] = {}
        self._seen: dict[str, float] = {}

    def seen(self, tenant: str, now: float) -> None:
        """It has a request here."""
        self._seen.pop(tenant, None)
        self._seen[tenant] = now  # the newest stands last
        while len(self._seen) > 2 and next(iter(self._seen.values())) < now - COMPANY_S:
            del self._seen[next(iter(self._seen))]

    def reserve(self, tenant: str, num_bytes: int, now: float) -> float:
        """Seconds until a body of so many bytes may be read; bodies that come after it wait for
        longer."""
        if num_bytes < LARGE_BYTES or not self._in_company(tenant, now):
            return 0.0
        wait_s = max(0.0, self._free_at.get(tenant, 0.0) - now)
        if wait_s <= LONGEST_WAIT_S:
            self._free_at[tenant] = now + wait_s + num_bytes / BYTES_PER_S / SHARE
        return wait_s

    def spent(self, tenant: str, num_bytes: int, busy_s: float, now: float) -> None:
        """A request with such a body has kept the loop busy for so long."""
        if num_bytes >= LARGE_BYTES:
            owed = max(now, self._free_at.get(tenant, 0.0))
            more_s = busy_s - num_bytes / BYTES_PER_S
            self._free_at[tenant] = owed + max(0.0, more_s) / SHARE

    def _in_company(self, tenant: str, now: float) -> bool:
        return any(other != tenant and seen > now - COMPANY_S for other, seen in self._seen.items())
