"""FetchAdmission: a bounded queue that decides which hand-over may reserve blocks next.

Life of a ticket: ticket() -> admit(ticket, reserve) -> ... fetch ... -> release(ticket). One
that waits here holds no blocks: its KV stays in the prefill node's leased memory. The queue is
strictly first come, first served, so that short prompts never starve a long one. All that may
reserve do so in one call between two steps of the engine: in a call of its own each would wait for
a step. A fetch that can begin at once receives KV while the prefill computes it. It is as slow as
the prefill, and takes none of the few slots. A fetch that had to wait (or whose prefill is known to
be over) runs at line rate and needs a slot. Event loop only, but for `reserve`.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol, TypeVar

from baton.engine.core.engine import Engine
from baton.engine.state.interface import Reservation
from baton.protocol.errors import Overloaded

T = TypeVar("T")
MOST_AT_ONCE: Final = 8  # reservations between two steps: each hashes a prompt, and streams wait
Reserve = Callable[[Engine], Reservation | None]
"""Reserves blocks on the engine thread; None = no room now."""


class CallEngine(Protocol):
    """EngineThread.call."""

    def __call__(self, function: Callable[[Engine], T], /) -> Awaitable[T]: ...


@dataclass(slots=True, eq=False)
class FetchTicket:
    """One hand-over's place in the line, then its slot. FetchAdmission alone writes it.

    `found`: the blocks, or the error of `reserve`; `reserve` is None until the owner asks.
    """

    needs_slot: bool
    found: asyncio.Future[Reservation]
    reserve: Reserve | None = None
    has_slot: bool = False
    released: bool = False


class FetchAdmission:
    """The queue and the slots.

    `max_queued` tickets may wait; at most `max_ready` fetches whose bytes are ready run at once.
    `call` runs a function on the engine thread.
    """

    def __init__(self, max_queued: int, max_ready: int, call: CallEngine) -> None:
        self._max_queued = max_queued
        self._call = call
        self._line: deque[FetchTicket] = deque()
        self._active = 0
        self._free_slots = max_ready
        self._changed = asyncio.Event()  # tickets, slots or blocks have come or gone
        self._serving: asyncio.Task[None] | None = None

    @property
    def num_active(self) -> int:
        """The number of fetches that run or wait."""
        return self._active

    @property
    def num_waiting(self) -> int:
        return len(self._line)

    def wake(self) -> None:
        """Let the first in the queue try again: blocks may have become free."""
        self._changed.set()

    def ticket(self, *, ready: bool) -> FetchTicket:
        """Return a ticket at the end of the queue. Raises Overloaded if the queue is full.

        `ready`: the prefill is over.
        """
        if len(self._line) >= self._max_queued:
            raise Overloaded(f"{self._max_queued} hand-overs wait here already")
        ticket = FetchTicket(ready, asyncio.get_running_loop().create_future())
        self._line.append(ticket)
        self._active += 1
        return ticket

    async def admit(self, ticket: FetchTicket, reserve: Reserve) -> Reservation:
        """Wait for the ticket's turn and for room; then return blocks for the hand-over.

        Raises what `reserve` raises. A caller that is cancelled meanwhile gives back what `reserve`
        has reserved.
        """
        ticket.reserve = reserve
        self._changed.set()
        if self._serving is None:
            self._serving = asyncio.get_running_loop().create_task(self._serve())
        return await ticket.found

    def release(self, ticket: FetchTicket) -> None:
        """End the ticket's place in the line and its slot. A second call does nothing."""
        if ticket.released:
            return
        ticket.released = True
        if not ticket.found.cancel() and not ticket.found.cancelled():
            ticket.found.exception()  # else asyncio logs one that nobody has awaited
        if ticket in self._line:
            self._line.remove(ticket)
        self._active -= 1
        self._free_slots += ticket.has_slot
        self._changed.set()

    # ---- inside ----

    async def _serve(self) -> None:
        try:
            while self._line:
                self._changed.clear()
                seen, batch = list(self._line), self._may_reserve()
                found: Sequence[Reservation | Exception] = ()
                if batch:
                    try:
                        found = await self._call(partial(_reserve_in_order, batch))
                    except Exception as error:  # noqa: BLE001  the tickets' owners handle it
                        found = [error] * len(batch)
                for ticket, result in zip(batch, found, strict=False):
                    self._settle(ticket, result)
                if len(found) == len(batch) == MOST_AT_ONCE:
                    continue
                for ticket in seen:  # those that are in the line still have waited
                    ticket.needs_slot |= ticket.reserve is not None
                await self._changed.wait()
        finally:
            self._serving = None

    def _settle(self, ticket: FetchTicket, found: Reservation | Exception) -> None:
        if ticket in self._line:
            self._line.remove(ticket)  # also if its owner has gone: it must not reserve again
        if ticket.found.done():
            return  # the owner gives back what was reserved
        if isinstance(found, Exception):
            ticket.found.set_exception(found)
            return
        ticket.has_slot = ticket.needs_slot
        self._free_slots -= ticket.has_slot
        ticket.found.set_result(found)

    def _may_reserve(self) -> list[FetchTicket]:
        """Return the tickets at the head of the line that may reserve now, with the free slots."""
        batch: list[FetchTicket] = []
        free = self._free_slots
        for ticket in itertools.islice(self._line, MOST_AT_ONCE):
            if ticket.found.done():
                continue  # its owner has gone, and will release it
            if ticket.reserve is None or (ticket.needs_slot and not free):
                break
            free -= ticket.needs_slot
            batch.append(ticket)
        return batch


def _reserve_in_order(
    batch: Sequence[FetchTicket], engine: Engine
) -> list[Reservation | Exception]:
    """Return what the tickets get, up to the first one for which there is no room."""
    found: list[Reservation | Exception] = []
    for ticket in batch:
        assert ticket.reserve is not None, "it has asked"
        try:
            reservation = ticket.reserve(engine)
        except Exception as error:  # noqa: BLE001  the ticket's owner handles it
            found.append(error)
            continue
        if reservation is None:
            break
        found.append(reservation)
    return found
