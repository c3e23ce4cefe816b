"""Exports that a fetch keeps: how long their pages are safe to read, and their release.

An exporter keeps its pages for as long as their lease is held. A renewal that it confirms moves the
end of the lease to at least the time at which the renewal was asked for, plus the lease. Both
processes of a host read the same clock, so until then nobody else gets the pages, whatever happens
to this process. Afterwards the pages are safe only if the exporter is dead, as nobody writes to
them then.

Mapping memory is in lanes/shm.py, renewing leases in fetches.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from baton.protocol.clock import Clock
from kv_transfer.protocol.lending import Loan

# share of a lease; if so much is left, the pages can be used without another renewal
LONG_PROMISE: Final = 0.5


class Promise:
    """The time until which an export is kept. Written on the event loop, read on any thread."""

    def __init__(self, clock: Clock, lease_s: float) -> None:
        self._clock = clock
        self._lease_s = lease_s
        self._until = -1.0  # monotonic seconds: nothing is promised yet
        self._loan: Loan | None = None

    def renewed(self, asked_at: float) -> None:
        """Note that the exporter has confirmed a renewal that was asked for at `asked_at`
        or later.
        """
        self._until = max(self._until, asked_at + self._lease_s)

    def left(self) -> float:
        """Return the seconds for which the promise still holds, whatever happens to the
        exporter.
        """
        return max(0.0, self._until - self._clock.monotonic())

    def is_long(self) -> bool:
        """Whether the promise holds for at least half a lease from now on."""
        return self.left() >= self._lease_s * LONG_PROMISE

    def covers(self, loan: Loan) -> None:
        """Set the loan of the promised pages: `holds` asks it whether the exporter is dead."""
        self._loan = loan

    def holds(self) -> bool:
        """Whether the exporter still keeps the blocks, or has died with them."""
        if self._until < 0:
            return False
        return self._clock.monotonic() < self._until or (
            self._loan is not None and self._loan.orphaned()
        )


class HeldFetch:
    """Implements base.HeldExport: an export without an ACK; `renewal` renews its lease until its
    release.

    `let_go` releases the export at its ranks. `forget` is called when the export is given up.
    """

    def __init__(
        self,
        renewal: asyncio.Task[None],
        promise: Promise,
        loan: Loan | None,
        let_go: Callable[[], Awaitable[None]],
        forget: Callable[[HeldFetch], None],
    ) -> None:
        self._renewal = renewal
        self._promise = promise
        self._loan = loan
        self._let_go = let_go
        self._forget = forget
        self._released = False

    async def lost(self) -> None:
        await asyncio.wait([self._renewal])

    def wanted(self) -> bool:
        # The blocks are given up well before the last moment of a promise that nobody renews.
        if self._renewal.done() or not self._promise.is_long():
            return True
        return self._loan is not None and self._loan.wanted()

    def safe(self) -> bool:
        return self._promise.holds()

    async def release(self) -> None:
        if not self._released:
            await self.abandon()
            await self._let_go()

    async def abandon(self) -> None:
        """Neither use nor renew the export any more, and send no release: its lease runs out."""
        self._released = True
        self._forget(self)
        if self._loan is not None:
            self._loan.end()
        await end_task(self._renewal)


async def end_task(task: asyncio.Task[None]) -> None:
    """Cancel a task and wait for its end; its exception is not raised."""
    task.cancel()
    await asyncio.wait([task])
