"""Pace: how much of the event loop's time one tenant's large requests take from the others.

Parsing a JSON body cannot be interrupted, and a thread that parses holds up the others as well. So
a tenant that has kept the loop busy waits before its next large body is read, until that work was
at most SHARE of the time. It waits only while other tenants have requests here, or had some a
moment ago. Times are seconds of one monotonic clock and are passed in.
"""

from __future__ import annotations

from typing import Final

SHARE: Final = 0.05
LARGE_BYTES: Final = 64 << 10  # smaller bodies take less than a millisecond
BYTES_PER_S: Final = 200e6  # of a large one, about; what it took is settled afterwards
LONGEST_WAIT_S: Final = 10.0
COMPANY_S: Final = 5.0  # so long ago is a moment


class Pace:
    """Of all tenants of one router."""

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
