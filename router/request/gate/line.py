"""ModelLine: the tickets of one model at the gate: those that wait, by priority, and counts.

Each model has its own nodes, so its tickets wait in a line of their own: full nodes of one model
hold up no ticket of another. Within a line the most urgent priority goes first, and within a
priority tenants share by weight (router/tenants/fair_queue.py). No clock, no limits of keys: those
are in admission.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from router.request.gate.rates import AnswerLength, DrainRate
from router.tenants.fair_queue import FairQueue

if TYPE_CHECKING:
    from router.request.gate.admission import Ticket


class ModelLine:
    """`num_live`: its ADMITTED tickets, at most `max_live`; `live`: how many of each priority and
    tenant. `paused`: no ticket can leave the line. `answers`: how long the model's answers are.
    AdmissionQueue alone writes it."""

    def __init__(self, max_live: float = math.inf) -> None:
        self.max_live = max_live
        self.num_live = 0
        self.live: dict[tuple[int, str], int] = {}
        self.num_queued = 0
        self.paused = False
        self.drain = DrainRate()
        self.answers = AnswerLength()
        self.levels: dict[int, FairQueue[Ticket]] = {}  # by priority; an empty level is dropped

    @property
    def backlog(self) -> float:
        """The cost of all waiting tickets."""
        return sum(level.backlog for level in self.levels.values())

    @property
    def urgency(self) -> tuple[int, int]:
        """Which line goes first, if several have a ticket: the smallest. The one with the most
        urgent ticket; among equals the one with the fewest ADMITTED tickets. Some ticket waits."""
        return min(self.levels), self.num_live

    def tick(self, now: float) -> None:
        """Let the drain rate count the time until `now`, unless nobody waits or it is paused."""
        if self.num_queued:
            self.drain.tick(now, not self.paused)

    def push(self, ticket: Ticket) -> None:
        """Append a ticket that has just arrived."""
        if not self.num_queued:
            self.drain.tick(ticket.arrived_at, queued=False)
        ticket.level = self.levels.setdefault(ticket.priority, FairQueue())
        ticket.level.push(ticket)
        self.num_queued += 1

    def head(self) -> Ticket:
        """Return the next ticket; some ticket waits."""
        head = self.levels[min(self.levels)].head()
        assert head is not None, "an empty level is dropped"
        return head

    def behind(self) -> int:
        """Return how many tickets wait behind `head()`, in its priority.

        Of one tenant and priority at most as many count as there are other tickets, if there are
        any: so who floods the gate does not make nodes prefill beside the streams of others.
        """
        priority = min(self.levels)
        count = 0
        for tenant, waiting in self.levels[priority].waiting_by_tenant():
            own = waiting + self.live.get((priority, tenant), 0)
            others = self.num_queued + self.num_live - own
            count += min(waiting, others) if others else waiting
        return max(0, count - 1)

    def pop(self) -> None:
        """Serve `head()`: its tenant is charged its cost."""
        ticket = self.levels[min(self.levels)].pop()
        self._left(ticket)
        self.drain.add(ticket.cost)

    def remove(self, ticket: Ticket) -> None:
        """Remove a waiting ticket unserved; its tenant is charged nothing."""
        assert ticket.level is not None, "it waits"
        ticket.level.remove(ticket)
        self._left(ticket)

    def waiting(self) -> Iterator[Ticket]:
        return (ticket for level in self.levels.values() for ticket, _ in level.ahead())

    def ahead(self) -> Iterator[tuple[Ticket, float]]:
        """Yield every waiting ticket with the cost that is served before it."""
        above = 0.0
        for priority in sorted(self.levels):
            level = self.levels[priority]
            for ticket, ahead in level.ahead():
                yield ticket, above + ahead
            above += level.backlog

    def ahead_of_new(self, ticket: Ticket) -> float:
        """Return the cost that would be served before `ticket` if it waited."""
        mine = ticket.priority
        ahead = sum(level.backlog for priority, level in self.levels.items() if priority < mine)
        level = self.levels.get(mine)
        return ahead if level is None else ahead + level.ahead_of_new(ticket.tenant, ticket.weight)

    def wait_s(self, tokens: float, unknown_s: float = 1.0) -> float:
        """Return the seconds until `tokens` have left the line; `unknown_s` while no rate is
        known."""
        rate = self.drain.tokens_per_s
        return tokens / rate if rate else unknown_s

    def _left(self, ticket: Ticket) -> None:
        """Update count and levels after the ticket has left its level."""
        self.num_queued -= 1
        if ticket.level is not None and not len(ticket.level):
            del self.levels[ticket.priority]
