"""Attempts: how a client continues over several routers when a connection breaks. No I/O.

A plain call goes to the next router only if no router answered at all. A resumable call is made
again under its request id, with the number of events that it has seen, and continues there. If no
event comes for the length of its grace period, the last failure is raised. Both clients of
baton/client/client.py use this.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from typing import Final

from baton.protocol.errors import BatonError, Cancelled, StoreUnavailable, Unavailable

FIRST_WAIT_S: Final = 0.05
LAST_WAIT_S: Final = 1.0


def addresses_of(given: str | Sequence[str]) -> tuple[str, ...]:
    """Return the addresses of "HOST:PORT,HOST:PORT" or a sequence. Raises ValueError for none."""
    parts = given.split(",") if isinstance(given, str) else given
    found = tuple(part.strip() for part in parts if part.strip())
    if not found:
        raise ValueError("a client needs the address of a router")
    return found


class Attempts:
    """The attempts of one call.

    `index`: the address to ask now. `steps`: the number of events seen of each sample.
    """

    def __init__(
        self,
        num_addresses: int,
        start: int,
        *,
        timeout_s: float,
        grace_s: float,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.index = start
        self.steps: list[int] = []
        self.reconnects = 0
        self._num_addresses = num_addresses
        self._grace_s = grace_s
        self._now = now
        self._deadline = now() + timeout_s
        self._heard_at = now()
        self._wait_s = FIRST_WAIT_S
        self._failed = 0  # failures in a row

    @property
    def remaining_s(self) -> float:
        return max(0.001, self._deadline - self._now())

    def saw(self, sample: int) -> None:
        """Count an event of a sample."""
        self.steps += [0] * (sample + 1 - len(self.steps))
        self.steps[sample] += 1
        self._heard_at = self._now()
        self._wait_s = FIRST_WAIT_S
        self._failed = 0

    def failed(self, error: BatonError, *, nobody: bool, said: bool = True) -> float:
        """Return the seconds to wait before the next attempt, at `index`, or raise `error`.

        `nobody`: no router answered at all. `said`: a router itself sent the error.
        """
        now = self._now()
        self._failed += 1
        passing = nobody or isinstance(error, Unavailable | StoreUnavailable)
        if not said:  # a router that stops breaks its connections
            passing = passing or isinstance(error, Cancelled)
        if self._grace_s:
            goes_on = passing and now - self._heard_at < self._grace_s
        else:
            goes_on = nobody and not self.steps and self._failed < self._num_addresses
        if not goes_on or now >= self._deadline:
            raise error
        self.index = (self.index + 1) % self._num_addresses
        self.reconnects += 1
        if self._failed < self._num_addresses:
            return 0.0  # the next router may answer
        wait_s, self._wait_s = self._wait_s, min(2 * self._wait_s, LAST_WAIT_S)
        return min(wait_s, max(0.0, self._deadline - now))


def draw_request_id() -> str:
    return "gen-" + secrets.token_hex(12)
