"""Margin: how much later than promised token 1 has come lately, to be planned for.

A request that waits is let in as late as its service level allows. Under overload that is nearly
all of them, so a promise that is a little too good makes nearly all of them late: the goodput is
gone although the queue did as it was told. The error of the promises is therefore learnt, as TCP
learns its time-out: mean and mean deviation, the newest counting most. No I/O, no clock.
"""

from __future__ import annotations

from typing import Final

GAIN: Final = 0.1  # weight of the newest error
DEVIATIONS: Final = 2.0
MOST: Final = 0.5  # of a request's slack: whoever comes while nobody waits is never refused by it


class Margin:
    """Errors are seconds: from admission to token 1, less what nodes promised at admission."""

    def __init__(self) -> None:
        self._mean = 0.0
        self._deviation = 0.0

    def observe(self, error_s: float) -> None:
        difference = error_s - self._mean
        self._mean += GAIN * difference
        self._deviation += GAIN * (abs(difference) - self._deviation)

    @property
    def seconds(self) -> float:
        return max(0.0, self._mean + DEVIATIONS * self._deviation)

    def of(self, slack_s: float) -> float:
        """What a request with so much time to wait should not count on."""
        return min(self.seconds, MOST * max(0.0, slack_s))
