"""RetryBudget: how many second tries a router may make, so that retries never become the load.

One bucket for all requests. Each request that begins puts a tenth of a try in; each retry takes one
out. A trickle by time lets a router with little traffic retry, too. The caller
(router/request/dispatch.py) takes no retry from the budget for a request whose node has died,
drains or hangs, nor for a request whose client has seen a token. The budget limits the other
retries: after refusals and failures by nodes that live. An overload causes these, and second tries
would make the overload worse.
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
    RowsLost,
    Unavailable,
)


@dataclass(frozen=True, slots=True)
class BudgetSettings:
    """`share`: tries that each request adds to the budget. `burst`: the most tries in the budget,
    and those at the start. `trickle_s`: seconds in which one more try comes by time alone."""

    share: float = 0.1
    burst: float = 10.0
    trickle_s: float = 10.0


def is_free(error: BatonError) -> bool:
    """Whether a retry after `error` takes nothing from the retry budget.

    True if a node was lost, gave the request back, or could not be reached by another node: that is
    no sign of overload. False for a KV time-out, which is one.
    """
    gone = GivenBack | KVLost | KVStale | NodeLost | RowsLost | Unavailable
    return isinstance(error, gone)


def is_momentary(error: BatonError) -> bool:
    """Whether the same request may succeed in a moment: after a refusal, a node's failure, or a
    missed deadline."""
    return error.retryable or isinstance(error, DeadlineExceeded)


class RetryBudget:
    """The bucket of retries. `granted` and `refused` count retries, for metrics and tests."""

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
        """Note that a request begins: it adds `share` of a try to the budget."""
        self._left = min(self._settings.burst, self._left + self._settings.share)

    def take(self) -> bool:
        """Take one retry from the budget; return False if there is none."""
        self._trickle()
        if self._left < 1:
            self.refused += 1
            return False
        self._left -= 1
        self.granted += 1
        return True

    def spend(self, error: BatonError) -> None:
        """Take one retry from the budget; raise `error` if there is none."""
        if not self.take():
            raise error

    def _trickle(self) -> None:
        now = self._clock.monotonic()
        came = (now - self._at) / self._settings.trickle_s
        self._left, self._at = min(self._settings.burst, self._left + came), now
