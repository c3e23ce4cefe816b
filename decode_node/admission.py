"""FetchAdmission: a bounded queue that decides which hand-over may reserve blocks next.

Life of a ticket: admission.ticket() -> admit(try_reserve) -> ... fetch ... -> release(). A
hand-over that waits here holds no blocks: its KV stays in the prefill node's leased memory. The
queue is strictly first come, first served, so that short prompts never starve a long one. A fetch
that can begin at once receives KV while the prefill computes it. It is as slow as the prefill, and
takes none of the few slots. A fetch that had to wait (or whose prefill is known to be over) runs at
line rate and needs a slot. Event loop only.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable

from baton.engine.state.interface import Reservation
from baton.protocol.errors import Overloaded


class FetchAdmission:
    """The queue and the slots.

    `max_queued` tickets may wait; at most `max_ready` fetches whose bytes are ready run at once.
    """

    def __init__(self, max_queued: int, max_ready: int) -> None:
        self._max_queued = max_queued
        self._line: deque[FetchTicket] = deque()
        self._active = 0
        self._room = asyncio.Event()
        self.slots = asyncio.Semaphore(max_ready)

    @property
    def num_active(self) -> int:
        """The number of fetches that run or wait."""
        return self._active

    @property
    def num_waiting(self) -> int:
        return len(self._line)

    def wake(self) -> None:
        """Let the first in the queue try again: blocks may have become free."""
        self._room.set()

    def ticket(self, *, ready: bool) -> FetchTicket:
        """Return a ticket at the end of the queue. Raises Overloaded if the queue is full.

        `ready`: the prefill is over.
        """
        if len(self._line) >= self._max_queued:
            raise Overloaded(f"{self._max_queued} hand-overs wait here already")
        ticket = FetchTicket(self, ready)
        self._line.append(ticket)
        self._active += 1
        return ticket

    async def wait_for_turn(self, ticket: FetchTicket) -> bool:
        """Wait until `ticket` is first in the queue. Return False if it was first already."""
        if self._line[0] is ticket:
            return False
        await ticket.first.wait()
        return True

    async def reserve(
        self, try_reserve: Callable[[], Awaitable[Reservation | None]]
    ) -> Reservation:
        """Try to reserve now, and again whenever blocks become free, until it succeeds."""
        while True:
            # Cleared before the try, so that blocks freed during the try are not missed.
            self._room.clear()
            reservation = await try_reserve()
            if reservation is not None:
                return reservation
            await self._room.wait()

    def leave_line(self, ticket: FetchTicket) -> None:
        if ticket in self._line:
            self._line.remove(ticket)
            if self._line:
                self._line[0].first.set()

    def finish(self) -> None:
        self._active -= 1


class FetchTicket:
    """One hand-over's place in the queue, then its slot. `release` ends both; twice is safe."""

    def __init__(self, admission: FetchAdmission, ready: bool) -> None:
        self.first = asyncio.Event()
        self._admission = admission
        self._ready = ready
        self._slot = False
        self._released = False

    async def admit(self, try_reserve: Callable[[], Awaitable[Reservation | None]]) -> Reservation:
        """Wait for this ticket's turn and for room; then return blocks for the hand-over."""
        waited = await self._admission.wait_for_turn(self)
        if not (waited or self._ready):
            reservation = await try_reserve()
            if reservation is not None:
                self._admission.leave_line(self)
                return reservation
        await self._admission.slots.acquire()
        self._slot = True
        reservation = await self._admission.reserve(try_reserve)
        self._admission.leave_line(self)
        return reservation

    def release(self) -> None:
        if self._released:
            return
        self._released = True
        self._admission.leave_line(self)
        self._admission.finish()
        if self._slot:
            self._admission.slots.release()
