"""Rates for admission: token buckets, how fast a queue drains, and the mean length of answers.

Pure arithmetic; times are seconds of one monotonic clock and are passed in.
"""

from __future__ import annotations

import math
from typing import Final

DRAIN_MEMORY_S: Final = 5.0  # time constant with which earlier departures fade
LEAST_DRAIN_S: Final = 0.05  # with less queued time than this the rate is not known
LONGEST_TICK_S: Final = 2.0  # nodes report each second: in a longer tick this process stood still
OUTPUT_MEMORY: Final = 100  # how many requests the mean answer length looks back


class TokenBucket:
    """`per_minute` tokens a minute, of which at most a minute's worth is saved up. It may fall into
    debt: tokens that a request used beyond its estimate are paid back before the next request is
    let in."""

    def __init__(self, per_minute: float, now: float) -> None:
        self._capacity = per_minute
        self._per_s = per_minute / 60
        self._level = per_minute
        self._at = now

    def take(self, tokens: float, now: float) -> float:
        """Take `tokens` and return 0, or take nothing and return the seconds until they are there.

        A request for more tokens than the bucket can hold waits for a full bucket and leaves a
        debt.
        """
        self._refill(now)
        missing = min(tokens, self._capacity) - self._level
        if missing > 1e-9 * self._capacity:
            return missing / self._per_s
        self._level -= tokens
        return 0.0

    def give_back(self, tokens: float, now: float) -> None:
        """Correct an estimate: put `tokens` back, or take more if `tokens` is negative."""
        self._refill(now)
        self._level = min(self._capacity, self._level + tokens)

    def wait_s(self, now: float) -> float:
        """Return the seconds until the bucket holds at least one token."""
        return max(0.0, 1.0 - self.level(now)) / self._per_s

    def level(self, now: float) -> float:
        self._refill(now)
        return self._level

    def _refill(self, now: float) -> None:
        self._level = min(self._capacity, self._level + max(0.0, now - self._at) * self._per_s)
        self._at = max(self._at, now)


class DrainRate:
    """Tokens per second that leave a queue while it is not empty; the last rate stays known
    afterwards.

    The past fades only when tokens leave the queue, never by mere waiting. So the rate is right
    also for a queue that one request leaves every half minute; it does not sink to nothing in
    between.
    """

    def __init__(self) -> None:
        self._served = 0.0
        self._busy_s = 0.0
        self._since_s = 0.0  # queued time since something left
        self._at: float | None = None

    def tick(self, now: float, queued: bool) -> None:
        """Note that time has passed until `now`. `queued`: somebody was waiting all that time."""
        if queued and self._at is not None and now > self._at:
            self._since_s += min(now - self._at, LONGEST_TICK_S)
        self._at = now

    def add(self, tokens: float) -> None:
        """Note that requests of `tokens` have left the queue."""
        fading = math.exp(-self._since_s / DRAIN_MEMORY_S)
        self._served = self._served * fading + tokens
        self._busy_s = self._busy_s * fading + self._since_s
        self._since_s = 0.0

    @property
    def tokens_per_s(self) -> float | None:
        """The drain rate; None until enough time and departures have been measured."""
        busy_s = self._busy_s + self._since_s
        if busy_s < LEAST_DRAIN_S or self._served <= 0:
            return None
        return self._served / busy_s


class AnswerLength:
    """Moving mean of the output tokens of a sample. `mean` is None before the first answer."""

    def __init__(self) -> None:
        self.mean: float | None = None

    def add(self, tokens: float) -> None:
        if self.mean is None:
            self.mean = tokens
        else:
            self.mean += (tokens - self.mean) / OUTPUT_MEMORY

    def expect(self, limit: int, samples: int) -> float:
        """Return the expected output tokens of a request with `samples` samples of at most `limit`
        tokens each."""
        each = limit if self.mean is None else min(limit, self.mean)
        return each * samples
