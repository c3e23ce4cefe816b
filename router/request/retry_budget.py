"""RetryBudget: how many second tries a router may make, so that retries never become the load.

One bucket for all requests. Each request that begins puts a tenth of a try in, each retry takes one
out; a trickle by time lets a router with little traffic retry, too. Who needs no budget is the
caller's to say (router/request/dispatch.py): a request whose node has died, drains or hangs, and
one whose client has seen a token, which must go on whatever the load. What is left are refusals and
failures by nodes that live: the very thing an overload makes, and a second try would feed.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.protocol.clock import Clock
from baton.protocol.errors import (
    BatonError,
    DeadlineExceeded,
    GivenBack,
    KVLost,
    KVStale,
    NodeLost,
    Unavailable,
)


@dataclass(frozen=True, slots=True)
class BudgetSettings:
    """`share` of requests that may be retried; `burst`: most tries saved up, and had at the start;
    `trickle_s`: one more each so many seconds."""

    share: float = 0.1
    burst: float = 10.0
    trickle_s: float = 10.0


def is_free(error: BatonError) -> bool:
    """A node that has gone, goes or cannot be reached from another: no sign of overload, and there
    are only so many nodes. KV that comes too slowly is one."""
    gone = GivenBack | KVLost | KVStale | NodeLost | Unavailable
    return isinstance(error, gone)


def is_momentary(error: BatonError) -> bool:
    """The same request may go better in a moment: a refusal, a failure by nodes, a lack of time."""
    return error.retryable or isinstance(error, DeadlineExceeded)


class RetryBudget:
    """`granted` and `refused` count for metrics and tests."""

    def __init__(self, clock: Clock, settings: BudgetSettings | None = None) -> None:
        self._clock = clock
        self._settings = settings or BudgetSettings()
        self._left = self._settings.burst
        self._at = clock.monotonic()
        self.granted = 0
        self.refused = 0

    @property
    def left(self) -> float:
        self._trickle()
        return self._left

    def begin(self) -> None:
        """A request comes in."""
        self._left = min(self._settings.burst, self._left + self._settings.share)

    def take(self) -> bool:
        """May one more request be tried again?"""
        self._trickle()
        if self._left < 1:
            self.refused += 1
            return False
        self._left -= 1
        self.granted += 1
        return True

    def spend(self, error: BatonError) -> None:
        """Raises `error` when the budget is spent: then that is the request's end."""
        if not self.take():
            raise error

    def _trickle(self) -> None:
        now = self._clock.monotonic()
        came = (now - self._at) / self._settings.trickle_s
        self._left, self._at = min(self._settings.burst, self._left + came), now
