"""Leases by export sequence number. Callers pass in the time: no clock, no thread, no timer."""

from __future__ import annotations


class Leases:
    """Until when each export is held (monotonic seconds). A lapsed lease never comes back."""

    def __init__(self, lease_s: float) -> None:
        self.lease_s = lease_s
        self._until: dict[int, float] = {}

    def grant(self, export_seq: int, now: float) -> None:
        self._until[export_seq] = now + self.lease_s

    def renew(self, export_seq: int, now: float) -> bool:
        """Extend a held lease to `now` + lease_s; False if it has lapsed or was never granted."""
        if not self.held(export_seq, now):
            return False
        self._until[export_seq] = now + self.lease_s
        return True

    def held(self, export_seq: int, now: float) -> bool:
        until = self._until.get(export_seq)
        return until is not None and now < until

    def drop(self, export_seq: int) -> None:
        self._until.pop(export_seq, None)

    def due(self, now: float) -> list[int]:
        """Return the exports whose lease has lapsed by `now`, the lowest number first."""
        return sorted(seq for seq, until in self._until.items() if until <= now)

    def next_expiry(self) -> float | None:
        return min(self._until.values(), default=None)
