"""Time is passed in as a `Clock`: processes use SystemClock, tests their own (tests/fakes.py)."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    def monotonic(self) -> float:
        """Return seconds. Only differences mean anything, and only within this process."""
        ...


class SystemClock:
    monotonic = staticmethod(time.monotonic)


def remaining_ms(deadline: float | None, clock: Clock) -> int:
    """Return the milliseconds left until `deadline` (at least 1), or 0 for no deadline.

    Messages carry a deadline in this form.
    """
    if deadline is None:
        return 0
    return max(1, int((deadline - clock.monotonic()) * 1000))


def deadline_from_ms(ms: int, clock: Clock) -> float | None:
    return None if ms == 0 else clock.monotonic() + ms / 1000
