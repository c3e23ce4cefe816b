"""Loans: an exporter's pages that are used where they lie, and until when that is safe.

The exporter keeps them for as long as their lease is held. A renewal that it confirms has moved the
end of the lease to at least the time at which it was asked plus the lease, by the one clock that
both processes of a host have: until then nobody else gets the pages, whatever becomes of us. Later
they are safe only if the exporter is dead: then nobody writes them any more.

Not here: mapping memory (shm.py), renewing (fetches.py).
"""

from __future__ import annotations

from baton.protocol.clock import Clock
from kv_transfer.protocol.base import Loan


class Promise:
    """Until when an export is kept. Written on the event loop, read on any thread."""

    def __init__(self, clock: Clock, lease_s: float) -> None:
        self._clock = clock
        self._lease_s = lease_s
        self._until = -1.0  # monotonic seconds: nothing is promised yet
        self._loan: Loan | None = None

    def renewed(self, asked_at: float) -> None:
        """A renewal asked for at `asked_at` (before it was sent) has been confirmed."""
        self._until = max(self._until, asked_at + self._lease_s)

    def left(self) -> float:
        """Seconds for which it holds yet, whatever becomes of the exporter; 0 if it does not."""
        return max(0.0, self._until - self._clock.monotonic())

    def covers(self, loan: Loan) -> None:
        self._loan = loan

    def holds(self) -> bool:
        """Whether the exporter keeps the blocks still, or has died with them."""
        if self._until < 0:
            return False
        return self._clock.monotonic() < self._until or (
            self._loan is not None and self._loan.orphaned()
        )
