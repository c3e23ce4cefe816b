"""ServiceLevels: what the gate promises of a request's times, and what became of the promises.

A client may limit the time to the first token (TTFT) and the mean time per further token (TPOT).
Nodes say at admission what they expect; the request must leave the queue early enough for that.
Not here: the waiting itself (admission.py), the arithmetic over snapshots (capacity.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from baton.protocol.clock import Clock
from baton.protocol.request import Request
from router.nodes.policy import NodeSnapshot
from router.request.gate.capacity import best_ttft_s, can_keep_tpot
from router.request.trace import RequestTrace

GAIN: Final = 0.1  # weight of the newest error
DEVIATIONS: Final = 2.0
MOST: Final = 0.5  # of the time that a request has: one that need not wait is never refused by it


@dataclass(slots=True)
class SloCounts:
    """Requests that asked for a service level, by what became of it."""

    met: int = 0
    missed: int = 0
    refused: int = 0

    def count(self, *, met: bool) -> None:
        if met:
            self.met += 1
        else:
            self.missed += 1


class TtftError:
    """How much later than the nodes promised token 1 has come lately, in seconds.

    Under overload nearly every request that waits is let in as late as its service level allows. A
    promise that is a little too good then makes nearly all of them late, although the queue works
    as it should. So the gate learns the error of the promises and plans for it, the way TCP learns
    its time-out: from the mean and the mean deviation, where the newest error counts most. Pure.
    """

    def __init__(self) -> None:
        self._mean = 0.0
        self._deviation = 0.0

    def observe(self, error_s: float) -> None:
        """`error_s`: from admission to token 1, minus what the nodes promised at admission."""
        difference = error_s - self._mean
        self._mean += GAIN * difference
        self._deviation += GAIN * (abs(difference) - self._deviation)

    @property
    def seconds(self) -> float:
        return max(0.0, self._mean + DEVIATIONS * self._deviation)

    def planned_s(self, slack_s: float) -> float:
        """How much earlier a request that may wait for `slack_s` should begin because of it."""
        return min(self.seconds, MOST * max(0.0, slack_s))


@dataclass(frozen=True, slots=True)
class LatestStart:
    """When a request must have begun, None for any time. `by_slo`: its service level says so, not
    its deadline."""

    at: float | None
    by_slo: bool


class ServiceLevels:
    """`nodes`: their snapshots now. Alone writes the counts."""

    def __init__(
        self,
        clock: Clock,
        nodes: Callable[[], Sequence[NodeSnapshot]],
        ttft: SloCounts,
        tpot: SloCounts,
    ) -> None:
        self._clock = clock
        self._nodes = nodes
        self._ttft_error = TtftError()
        self._ttft = ttft
        self._tpot = tpot

    def expected_ttft_s(self, request: Request, trace: RequestTrace) -> float:
        """From its admission to token 1, if the request has a limit; 0 where no node promises
        anything, and for pooled inputs."""
        terms = trace.terms
        if trace.pooled or (terms.slo.ttft_s is None and terms.timeout_s is None):
            return 0.0
        limits = [request.deadline] if request.deadline is not None else []
        limits += [request.arrival + terms.slo.ttft_s] if terms.slo.ttft_s is not None else []
        left_s = min(limits, default=math.inf) - self._clock.monotonic()
        return best_ttft_s(request, self._nodes(), left_s) or 0.0

    def refuses_tpot(self, trace: RequestTrace) -> bool:
        """Does the request ask for a time per token that no node can keep now? Counts it then."""
        limit_s = trace.terms.slo.tpot_s
        if limit_s is None or can_keep_tpot(self._nodes(), limit_s):
            return False
        self._tpot.refused += 1
        return True

    def latest_start(self, request: Request, trace: RequestTrace, expected_s: float) -> LatestStart:
        """By its deadline and its service level, if token 1 comes `expected_s` after the start."""
        ttft_s, deadline = trace.terms.slo.ttft_s, request.deadline
        if ttft_s is None:
            return LatestStart(None if deadline is None else deadline - expected_s, by_slo=False)
        first_token_by = request.arrival + ttft_s
        if deadline is not None and deadline <= first_token_by:
            return LatestStart(deadline - expected_s, by_slo=False)
        latest = first_token_by - expected_s
        latest -= self._ttft_error.planned_s(latest - self._clock.monotonic())
        return LatestStart(latest, by_slo=True)

    def observe_ttft(self, request: Request, trace: RequestTrace, expected_s: float) -> None:
        """Learn from an admitted request, which was expected to take `expected_s` to token 1."""
        if trace.terms.slo.ttft_s is not None and trace.first_token_at is not None:
            took_s = trace.first_token_at - (trace.admitted_at or request.arrival)
            self._ttft_error.observe(took_s - expected_s)

    def count(self, request: Request, trace: RequestTrace, finished: bool) -> None:
        """A request has ended; `finished`: with all of its output."""
        slo, first = trace.terms.slo, trace.first_token_at
        if slo.ttft_s is not None:
            in_time = first is not None and first - request.arrival <= slo.ttft_s
            self._ttft.count(met=in_time)
        if slo.tpot_s is not None:
            tpot_s = trace.tpot_s(request.params.n)
            self._tpot.count(met=finished and (tpot_s is None or tpot_s <= slo.tpot_s))
