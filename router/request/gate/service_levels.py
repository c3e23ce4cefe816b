"""ServiceLevels: which times requests ask for, which the gate can promise, and which were kept.

A client may limit the time to the first token (TTFT) and the mean time per further token (TPOT).
Nodes say at admission what they expect; the request must leave the queue early enough for that.
Not here: the waiting itself (admission.py), room on the nodes (capacity.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from baton.protocol.clock import Clock
from baton.protocol.handles import Role
from baton.protocol.request import Request, RequestState
from router.nodes.policy import Ask, NodeSnapshot, prefix_lengths
from router.nodes.slo import expected_tpot_s, expected_ttft_s, meets
from router.request.gate.admission import Ticket

GAIN: Final = 0.1  # weight of the newest error
DEVIATIONS: Final = 2.0
MOST: Final = 0.5  # share of a request's slack that the margin may take at most


@dataclass(slots=True)
class SloCounts:
    """Numbers of requests that asked for a service level: it was met, missed, or refused."""

    met: int = 0
    missed: int = 0
    refused: int = 0

    def count(self, *, met: bool) -> None:
        if met:
            self.met += 1
        else:
            self.missed += 1


class TtftError:
    """By how many seconds token 1 has come later, of late, than the nodes promised.

    Under overload nearly every waiting request is let in as late as its service level allows. If
    promises are a little too good, nearly all of these requests are late, although the queue works
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
        """Return how many seconds earlier a request that may wait for `slack_s` should begin."""
        return min(self.seconds, MOST * max(0.0, slack_s))


class ServiceLevels:
    """Plans and counts the requests that bring a service level or a time limit of their own.

    Other requests are never passed to it.
    """

    def __init__(self, clock: Clock, ttft: SloCounts, tpot: SloCounts) -> None:
        self._clock = clock
        self._ttft_error = TtftError()
        self._ttft = ttft
        self._tpot = tpot

    def plan(self, ticket: Ticket, nodes: Sequence[NodeSnapshot]) -> bool:
        """Set the ticket's `latest_start`, and the time to token 1 that the nodes promise.

        Returns False, and counts a refusal, if the ticket asks for a time per token that no node
        can keep now.
        """
        slo = ticket.trace.terms.slo
        if slo.tpot_s is not None and not can_keep_tpot(nodes, slo.tpot_s):
            self._tpot.refused += 1
            return False
        if slo.ttft_s is not None or ticket.trace.terms.timeout_s is not None:
            first_token_by, ticket.by_slo = _first_token_by(ticket)
            if first_token_by is not None:
                self.promise(ticket, nodes)
                latest = first_token_by - ticket.expected_s
                slack_s = latest - self._clock.monotonic()
                margin_s = self._ttft_error.planned_s(slack_s) if ticket.by_slo else 0.0
                ticket.latest_start = latest - margin_s
        return True

    def promise(self, ticket: Ticket, nodes: Sequence[NodeSnapshot]) -> None:
        """Set the ticket's `expected_s`: the time from admission to token 1 that nodes promise.

        It becomes 0 if no node promises anything. Nothing is set for pooled inputs, and for
        requests that need token 1 at no certain time.
        """
        first_token_by, _ = _first_token_by(ticket)
        if first_token_by is not None and not ticket.trace.pooled:
            left_s = first_token_by - self._clock.monotonic()
            ticket.expected_s = best_ttft_s(ticket.request, nodes, left_s) or 0.0

    def observe(self, ticket: Ticket) -> None:
        """Learn from the times of an admitted request that has ended.

        Count its service levels as met or missed, unless it was cancelled.
        """
        request, trace = ticket.request, ticket.trace
        slo, first = trace.terms.slo, trace.first_token_at
        if slo.ttft_s is not None and first is not None:
            took_s = first - (trace.admitted_at or request.arrival)
            self._ttft_error.observe(took_s - ticket.expected_s)
        if trace.outcome == RequestState.CANCELLED:
            return
        if slo.ttft_s is not None:
            in_time = first is not None and first - request.arrival <= slo.ttft_s
            self._ttft.count(met=in_time)
        if slo.tpot_s is not None:
            tpot_s = trace.tpot_s(request.params.n)
            finished = trace.outcome == RequestState.FINISHED
            self._tpot.count(met=finished and (tpot_s is None or tpot_s <= slo.tpot_s))


def _first_token_by(ticket: Ticket) -> tuple[float | None, bool]:
    """Return when a request needs token 1 (None: no limit), and whether that comes from its service
    level (True) or its deadline (False)."""
    deadline, ttft_s = ticket.request.deadline, ticket.trace.terms.slo.ttft_s
    if ttft_s is None:
        return deadline, False
    by_slo = ticket.request.arrival + ttft_s
    return (deadline, False) if deadline is not None and deadline <= by_slo else (by_slo, True)


def best_ttft_s(request: Request, nodes: Sequence[NodeSnapshot], limit_s: float) -> float | None:
    """Return the shortest time to token 1 that a node promises; None if some node cannot promise.

    Cached prefixes are looked up only if no node promises a time within `limit_s` without them.
    """
    usable = [node for node in nodes if node.takes_requests]
    prefillers = [node for node in usable if node.role is Role.PREFILL]
    # A decode node computes prompts too, where it has shown how fast (router/nodes/placement.py).
    measured = [n for n in usable if n not in prefillers and n.load.prefill_tokens_per_s > 0]
    computing = prefillers + measured
    best = _best_ttft(request, computing, {})
    if best is None or best <= limit_s:
        return best
    ask = Ask(
        request.known_ids,
        tenant_salt=request.tenant_salt,
        adapter=request.adapter,
        images=request.images,
    )
    return _best_ttft(request, computing, prefix_lengths(ask, computing))


def _best_ttft(
    request: Request, nodes: Sequence[NodeSnapshot], cached: dict[str, int]
) -> float | None:
    length = len(request.known_ids)
    expected = [expected_ttft_s(node, length - cached.get(node.boot_id, 0)) for node in nodes]
    known = [seconds for seconds in expected if seconds is not None]
    # A node that has not measured its rate may be fast, so then nothing is promised.
    return min(known) if known and len(known) == len(expected) else None


def can_keep_tpot(nodes: Sequence[NodeSnapshot], limit_s: float) -> bool:
    """Whether some decode node's steps take at most `limit_s`. True for an idle node, and if there
    is no decode node."""
    decoders = [n for n in nodes if n.role is Role.DECODE and n.takes_requests]
    return not decoders or any(meets(expected_tpot_s(node), limit_s) for node in decoders)
