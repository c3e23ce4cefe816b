"""FairQueue: which tenant's ticket is next. Start-time fair queueing on token cost.

Each tenant (flow) has a virtual start time. The flow with the smallest start is served, and its
start then grows by cost / weight. So over any time in which two tenants both wait, their service
divided by their weights differs by at most one request of each. A tenant that comes back from
idleness starts where the queue is now: idle tenants save nothing up. A corrected cost moves the
start of its flow.
Source: Goyal, Vin, Cheng, "Start-time Fair Queuing" (SIGCOMM 1996); Sheng et al., "Fairness in
Serving Large Language Models" (OSDI 2024) for the counter per tenant corrected by actual tokens.

Within a flow strictly first come, first served. No clock, no limits: those are in admission.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, Protocol, TypeVar


class Queued(Protocol):
    """What the queue must know of a ticket; constant while it waits."""

    @property
    def id(self) -> str: ...
    @property
    def tenant(self) -> str: ...
    @property
    def weight(self) -> float: ...
    @property
    def cost(self) -> float: ...


T = TypeVar("T", bound=Queued)


class Flow(Generic[T]):
    """One tenant. `start`: virtual start time of its first ticket, in tokens / weight. `since`: the
    number of the push with which the tenant began to wait."""

    __slots__ = ("backlog", "since", "start", "tickets", "weight")

    def __init__(self, weight: float, start: float) -> None:
        self.weight = weight
        self.start = start
        self.since = 0
        self.backlog = 0.0
        self.tickets: dict[str, T] = {}  # in order of arrival

    @property
    def share(self) -> float:
        """The tenant's waiting cost divided by its weight."""
        return self.backlog / self.weight


class FairQueue(Generic[T]):
    def __init__(self) -> None:
        self._flows: dict[str, Flow[T]] = {}
        self._now = 0.0  # virtual: start of the ticket served last
        self._size = 0
        self._pushes = 0
        self._backlog = 0.0

    def __len__(self) -> int:
        return self._size

    @property
    def backlog(self) -> float:
        """The cost of all waiting tickets."""
        return self._backlog

    def push(self, ticket: T) -> None:
        flow = self._flows.get(ticket.tenant)
        if flow is None:
            flow = self._flows[ticket.tenant] = Flow(ticket.weight, 0.0)
        if not flow.tickets:
            flow.start = max(flow.start, self._here())
            flow.since = self._pushes
        self._pushes += 1
        flow.tickets[ticket.id] = ticket
        flow.backlog += ticket.cost
        self._size += 1
        self._backlog += ticket.cost

    def head(self, may_go: Callable[[str], bool] | None = None) -> T | None:
        """Return the next ticket; None if there is none. With `may_go`, only tenants for which it
        returns true count."""
        flow = self._next_flow(may_go)
        return None if flow is None else next(iter(flow.tickets.values()))

    def pop(self, may_go: Callable[[str], bool] | None = None) -> T:
        """Serve `head(may_go)`. There must be one."""
        flow = self._next_flow(may_go)
        assert flow is not None, "somebody waits"
        ticket = next(iter(flow.tickets.values()))
        self._now = max(self._now, flow.start)
        flow.start += ticket.cost / flow.weight
        self._take(flow, ticket)
        return ticket

    def remove(self, ticket: T) -> None:
        """Remove a ticket that gave up waiting; its tenant is charged nothing."""
        self._take(self._flows[ticket.tenant], ticket)

    def settle(self, tenant: str, more: float) -> None:
        """Charge `tenant` by how much a served ticket has cost `more` than its estimate; a negative
        `more` is credited."""
        flow = self._flows.get(tenant)
        if flow is not None:
            flow.start += more / flow.weight

    def waiting_by_tenant(self) -> Iterator[tuple[str, int]]:
        return ((name, len(flow.tickets)) for name, flow in self._backlogged())

    def last_of(self, tenant: str) -> T:
        return next(reversed(self._flows[tenant].tickets.values()))

    def fattest(self) -> tuple[str, float]:
        """Return the tenant with the largest `share`, and that share. Some ticket must wait."""
        name, flow = max(self._backlogged(), key=lambda item: item[1].share)
        return name, flow.share

    def share_of(self, tenant: str) -> float:
        flow = self._flows.get(tenant)
        return 0.0 if flow is None else flow.share

    def ahead_of_new(self, tenant: str, weight: float) -> float:
        """Return the cost that would be served before a ticket that `tenant` pushed now, if no
        further tickets came."""
        flow = self._flows.get(tenant)
        if flow is None:
            flow = Flow[T](weight, 0.0)
        own = flow.backlog
        start = flow.start if flow.tickets else max(flow.start, self._here())
        return own + self._others(flow, start + own / flow.weight)

    def ahead(self) -> Iterator[tuple[T, float]]:
        """Yield every waiting ticket with the cost that is served before it."""
        for _, flow in list(self._backlogged()):
            own = 0.0
            for ticket in list(flow.tickets.values()):
                yield ticket, own + self._others(flow, flow.start + own / flow.weight)
                own += ticket.cost

    def _others(self, flow: Flow[T], until: float) -> float:
        """Return the cost that the other flows are served before virtual time `until`."""
        return sum(
            min(other.backlog, max(0.0, until - other.start) * other.weight)
            for _, other in self._backlogged()
            if other is not flow
        )

    def _here(self) -> float:
        """Return the virtual start of a tenant that comes back from idleness.

        It is the start of the ticket served last, or of the next ticket if that is earlier, as it
        may be after corrections.
        """
        first = self._next_flow()
        return self._now if first is None else min(self._now, first.start)

    def _backlogged(self) -> Iterator[tuple[str, Flow[T]]]:
        return ((name, flow) for name, flow in self._flows.items() if flow.tickets)

    def _next_flow(self, may_go: Callable[[str], bool] | None = None) -> Flow[T] | None:
        flows = (flow for name, flow in self._backlogged() if may_go is None or may_go(name))
        return min(flows, key=lambda flow: (flow.start, flow.since), default=None)

    def _take(self, flow: Flow[T], ticket: T) -> None:
        del flow.tickets[ticket.id]
        # Exact zeros: sums of floats would leave dust in an empty queue.
        flow.backlog = flow.backlog - ticket.cost if flow.tickets else 0.0
        self._size -= 1
        self._backlog = self._backlog - ticket.cost if self._size else 0.0
