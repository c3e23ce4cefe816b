"""Patience: how long to wait for the store's answer, by how long its answers took of late.

A slow store is not away: on a busy machine it may take a second for what takes a millisecond
elsewhere. If the router gave up each time, the store would count as away again and again. So a call
waits for MARGIN times the longest answer of late, but at least `least_s` and at most `most_s`. A
wait in vain counts as an answer that took so long, so the next wait is twice as long. The longest
answer fades by half in HALF_LIFE_S.
"""

from __future__ import annotations

from typing import Final

from baton.protocol.clock import Clock

MARGIN: Final = 2.0
HALF_LIFE_S: Final = 60.0


class Patience:
    def __init__(self, clock: Clock, least_s: float, most_s: float) -> None:
        self._clock = clock
        self._least_s = least_s
        self.most_s = max(least_s, most_s)
        self._longest_s = 0.0
        self._at = clock.monotonic()

    @property
    def seconds(self) -> float:
        """How many seconds to wait for an answer now."""
        return min(self.most_s, max(self._least_s, MARGIN * self._faded()))

    def took(self, seconds: float) -> None:
        """Note that an answer took `seconds`, or did not come within this time."""
        if MARGIN * seconds > self._least_s and seconds > self._faded():
            self._longest_s, self._at = seconds, self._clock.monotonic()

    def _faded(self) -> float:
        if not self._longest_s:
            return 0.0
        return self._longest_s * 0.5 ** ((self._clock.monotonic() - self._at) / HALF_LIFE_S)
