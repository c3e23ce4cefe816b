"""Exports that a fetch keeps: how long their pages are safe, and their release.

An exporter keeps its pages for as long as their lease is held. A renewal that it confirms moves the
end of the lease to at least the time at which the renewal was asked for, plus the lease. Both
processes of a host read the same clock, so until then nobody else gets the pages, whatever happens
to us. Afterwards the pages are safe only if the exporter is dead, for then nobody writes to them.

Not here: mapping memory (lanes/shm.py), renewing leases (fetches.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from baton.protocol.clock import Clock
from kv_transfer.protocol.base import Loan

LONG_PROMISE: Final = 0.5  # of a lease: the pages can be used without another renewal


class Promise:
    """Until when an export is kept. Written on the event loop, read on any thread."""

    def __init__(self, clock: Clock, lease_s: float) -> None:
        self._clock = clock
        self._lease_s = lease_s
        self._until = -1.0  # monotonic seconds: nothing is promised yet
        self._loan: Loan | None = None

    def renewed(self, asked_at: float) -> None:
        """The exporter has confirmed a renewal that was asked for at `asked_at` or later."""
        self._until = max(self._until, asked_at + self._lease_s)

    def left(self) -> float:
        """Seconds for which the promise still holds, whatever happens to the exporter."""
        return max(0.0, self._until - self._clock.monotonic())

    def is_long(self) -> bool:
        """Does it hold for at least half a lease from now on?"""
        return self.left() >= self._lease_s * LONG_PROMISE

    def covers(self, loan: Loan) -> None:
        """`loan` is of the promised pages: `holds` then asks it whether the exporter is dead."""
        self._loan = loan

    def holds(self) -> bool:
        """Whether the exporter still keeps the blocks, or has died with them."""
        if self._until < 0:
            return False
        return self._clock.monotonic() < self._until or (
            self._loan is not None and self._loan.orphaned()
        )


class HeldFetch:
    """base.HeldExport: an unacknowledged export, which `renewal` renews until it is released.

    `let_go` releases the export at its ranks; `forget` is called once this is over.
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
        # A promise that nobody renews is given up well before its last moment.
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
        """Neither use nor renew it any more; its lease runs out by itself."""
        self._released = True
        self._forget(self)
        if self._loan is not None:
            self._loan.end()
        await end_task(self._renewal)


async def end_task(task: asyncio.Task[None]) -> None:
    """Cancel it and wait for its end. Never raises what it raised."""
    task.cancel()
    await asyncio.wait([task])
