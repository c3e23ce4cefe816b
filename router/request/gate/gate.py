"""Gate: asyncio around router/request/gate/admission.py, between the front doors and the
dispatcher.

    ticket = await gate.enter(request, trace)   returns at once or after a wait; raises a refusal
    try:
        ...                                     the journey
    finally:
        gate.leave(ticket)                      every way out gives the slot back, once

If there is room, a request enters without a task switch. Waiting requests are let in when another
request ends, or when a node reports its load (`poke`). A timer refuses requests whose time runs
out. While no node serves but one is expected (router/nodes/directory.py), all requests wait. Event
loop only. The limits are this router's own: two routers let in twice as many requests.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from baton.protocol.clock import Clock
from baton.protocol.errors import BatonError, Cancelled, InvalidRequest, Overloaded, Unavailable
from baton.protocol.request import Request, RequestState
from router.nodes.policy import NodeSnapshot, PolicySettings
from router.nodes.slo import ANY
from router.request.gate.admission import (
    AdmissionQueue,
    Bounds,
    Reason,
    Refusal,
    Ticket,
    TicketState,
)
from router.request.gate.capacity import Capacity
from router.request.gate.service_levels import ServiceLevels, SloCounts
from router.request.trace import RequestTrace
from router.tenants.keys import Grant
from router.tenants.turns import LARGE_BYTES, LONGEST_WAIT_S, Pace

logger = logging.getLogger(__name__)
MOST_REQUEST_TOKENS: Final = 1 << 20
RETRY_PAUSED_S: Final = 10  # a guess: only the operator knows when the pause ends
COUNTED_SHARE: Final = 0.01  # a token that is only counted costs this share of one that is served
RETRY_TPOT_S: Final = 1.0  # a guess: steps get faster when requests end
_WORDS: Final[dict[Reason, str]] = {
    Reason.QUEUE_FULL: "the server is at its limit and its queue is full",
    Reason.CONCURRENCY: "as many requests of this key are under way as it may have at once",
    Reason.TOKEN_RATE: "this key has used its tokens per minute",
    Reason.IMAGE_BYTES: "the images of requests under way take all the memory that they may have",
    Reason.DEADLINE: "the request could not begin before its deadline",
    Reason.SLO: "the service level that the request asks for cannot be kept now",
    Reason.STOPPING: "the server is stopping",
    Reason.PAUSED: "an operator has paused the server: it takes no new requests",
}


@dataclass(frozen=True, slots=True)
class GateSettings:
    """Limits of one gate. `max_request_tokens`: the most n x (prompt + max_tokens) of a request.
    `tokens_of_models`: the same of a model that has a limit of its own, by its key.
    `prefill_window_s`, `policy`: see capacity.py."""

    bounds: Bounds = field(default_factory=Bounds)
    max_request_tokens: int = MOST_REQUEST_TOKENS
    prefill_window_s: float = 0.5
    tokens_of_models: Mapping[str, int] = field(default_factory=dict[str, int])
    policy: PolicySettings = field(default_factory=PolicySettings)


@dataclass(slots=True)
class GateStats:
    """Counters for metrics and tests.

    `served`: tokens served, by tenant. `waits`: functions that are called for each admitted request
    with the seconds that it waited, 0 if it did not wait.
    """

    ttft: SloCounts = field(default_factory=SloCounts)
    tpot: SloCounts = field(default_factory=SloCounts)
    served: dict[str, float] = field(default_factory=dict[str, float])
    waits: list[Callable[[float], None]] = field(default_factory=list[Callable[[float], None]])


class Gate:
    """Lets requests in, lets them wait, or refuses them.

    `nodes`: returns the snapshots of the nodes; if it returns none, only the bounds count.
    `expected_s(model, pooled)`: returns for how many seconds a node for such requests is still
    expected.
    """

    def __init__(
        self,
        clock: Clock,
        settings: GateSettings,
        nodes: Callable[[], Sequence[NodeSnapshot]] = tuple,
        expected_s: Callable[[str, bool], float] = lambda *_: 0.0,
    ) -> None:
        self._clock = clock
        self._settings = settings
        self._nodes = nodes
        self._expected_nodes_s = expected_s
        self._tickets: dict[str, Ticket] = {}  # tickets that wait or were let in, by request id
        self._turns: dict[str, asyncio.Future[None]] = {}  # what waiting requests wait for
        self._starting: dict[str, Starting] = {}  # by the key of the model
        self._timer: asyncio.TimerHandle | None = None
        self.queue = AdmissionQueue(settings.bounds)
        self.stats = GateStats()
        self._levels = ServiceLevels(clock, self.stats.ttft, self.stats.tpot)
        self._pace = Pace()

    def holds(self, request_id: str) -> bool:
        """Whether a request with this id waits or runs."""
        return request_id in self._tickets

    def waiting(self) -> list[tuple[Request, RequestTrace]]:
        """Return the requests that wait to be let in, in the order of arrival."""
        return [
            (ticket.request, ticket.trace)
            for ticket in self._tickets.values()
            if ticket.state is TicketState.QUEUED
        ]

    # ---- before a request enters ----

    def preparing(self, grant: Grant) -> Preparation:
        """Return the context in which a request of this key is read, until the request enters.

        Within the context the request counts as one of the key's. Raises Overloaded if the key is
        over its limits.
        """
        now = self._clock.monotonic()
        self._pace.seen(grant.domain, now)
        refusal = self.queue.prepare(grant, now)
        if refusal is not None:
            error = Overloaded(_WORDS[refusal.reason], retry_after_s=refusal.retry_after_s)
            tenant, status = grant.tenant or "-", error.http_status
            text = "refused before its body is read, tenant %s; %d %s: %s"
            logger.info(text, tenant, status, error.code, error.message)
            raise error
        return Preparation(self, grant)

    def prepared(self, preparation: Preparation) -> None:
        """End what `preparing` began; `Preparation.end` calls this once."""
        grant, now = preparation.grant, self._clock.monotonic()
        self.queue.prepared(grant, preparation.counted * COUNTED_SHARE, now)
        num_bytes = preparation.num_bytes
        if num_bytes >= LARGE_BYTES:
            self._pace.spent(grant.domain, num_bytes, preparation.busy_s, now)

    def reserve(self, grant: Grant, num_bytes: int) -> float:
        """Return the seconds until a body of `num_bytes` of this key may be read.

        Raises Overloaded if that is longer than LONGEST_WAIT_S.
        """
        wait_s = self._pace.reserve(grant.domain, num_bytes, self._clock.monotonic())
        if wait_s > LONGEST_WAIT_S:
            message = "too many large requests of this key wait to be read"
            raise Overloaded(message, retry_after_s=math.ceil(LONGEST_WAIT_S))
        return wait_s

    # ---- a request's way ----

    async def enter(self, request: Request, trace: RequestTrace) -> Ticket:
        """Let a request in, at once or after a wait. When the request has ended, call `leave`.

        A request that is refused or cancelled here needs no `leave`.

        Raises InvalidRequest (too large, id in use), Overloaded (full, over its key's limits),
        Unavailable (too late, paused) and Cancelled (by `cancel`).
        """
        now = trace.entered_at = self._clock.monotonic()
        if request.id in self._tickets:
            raise InvalidRequest("this request id is in use", field="request_id")
        settings = self._settings
        nodes = Capacity(self._nodes(), settings.prefill_window_s, settings.policy, trace.model)
        if nodes.pause == "refuse":
            raise self._refused(Reason.PAUSED, RETRY_PAUSED_S)
        ticket = Ticket(request, trace)
        self._check_size(ticket, nodes)
        terms = trace.terms
        asks_for_times = terms.slo is not ANY or terms.timeout_s is not None
        if asks_for_times and not self._levels.plan(ticket, nodes.nodes):
            raise self._refused(Reason.SLO, RETRY_TPOT_S)
        if self.queue.num_queued:
            self._note_pause(ticket.model, nodes, now)
        self.queue.offer(ticket, now, partial(self._take_room, nodes))
        if ticket.state is TicketState.REFUSED:
            raise self._refusal(ticket)
        self._tickets[request.id] = ticket
        if ticket.state is TicketState.QUEUED:
            await self._wait(ticket)
        else:
            self._let_in(ticket)
        return ticket

    def leave(self, ticket: Ticket) -> None:
        """End the ticket of a request that was let in. A second call does nothing."""
        if ticket.state is not TicketState.ADMITTED:
            return
        trace, tenant = ticket.trace, ticket.grant.tenant
        del self._tickets[ticket.request.id]
        used = 0 if trace.dispatched_at is None else ticket.prompt_tokens + trace.output_tokens
        output = trace.output_tokens if trace.outcome == RequestState.FINISHED else 0
        self.queue.release(ticket, used, output, self._clock.monotonic())
        self.stats.served[tenant] = self.stats.served.get(tenant, 0.0) + used
        if trace.terms.slo is not ANY:
            self._levels.observe(ticket)
        if not self._tickets:  # the last tickets would keep their prompts in memory
            self._starting.clear()
        self.poke()

    def poke(self) -> None:
        """Let waiting requests in, if there is room now. Call it when a node reports its load."""
        if self.queue.num_queued:
            self._pump()

    def cancel(self, request_id: str) -> bool:
        """End a request's wait with Cancelled; return False if no request with this id waits."""
        turn = self._turns.get(request_id)
        if turn is None or turn.done():
            return False
        turn.set_exception(Cancelled("the request was cancelled"))
        return True

    def stop(self) -> None:
        """Refuse all waiting requests."""
        if self._timer is not None:
            self._timer.cancel()
        for ticket in self.queue.stop(self._clock.monotonic()):
            self._wake(ticket)

    # ---- may it enter? ----

    def _check_size(self, ticket: Ticket, nodes: Capacity) -> None:
        """Raises InvalidRequest for more tokens than the settings allow, or more sequences than any
        node runs at once."""
        tokens, settings = (
            ticket.samples * (ticket.prompt_tokens + ticket.max_tokens),
            self._settings,
        )
        most_tokens = settings.tokens_of_models.get(ticket.model, settings.max_request_tokens)
        if tokens > most_tokens:
            pooled = ticket.trace.pooled
            raise self._too_large(
                f"{'the input' if pooled else 'n x (prompt + max_tokens)'} is {tokens}"
                f" tokens, at most {most_tokens} are allowed",
                field=pooled or ("n" if ticket.samples > 1 else "max_tokens"),
            )
        params = ticket.request.params
        if params.width > 1 and params.width > (most := nodes.widest()):
            raise self._too_large(
                f"{params.width} sequences of one request are more than the {most} that a"
                " decode node runs at once (its --max-num-seqs)",
                field="best_of" if (params.best_of or 1) > params.n else "n",
            )

    def _too_large(self, message: str, field: str) -> InvalidRequest:
        self.queue.stats.refused[Reason.TOO_LARGE] += 1
        return InvalidRequest(message, field=field)

    def _refused(self, reason: Reason, retry_after_s: float) -> Unavailable:
        """Return the error for a request that is refused before it reaches the queue; count it."""
        self.queue.stats.refused[reason] += 1
        return _unavailable(Refusal(reason, math.ceil(retry_after_s)))

    def _refusal(self, ticket: Ticket) -> BatonError:
        refusal = ticket.refusal
        assert refusal is not None, "it was refused"
        if refusal.reason is Reason.SLO:
            self.stats.ttft.refused += 1
        if refusal.reason in (Reason.SLO, Reason.DEADLINE, Reason.STOPPING):
            return _unavailable(refusal)
        return Overloaded(_WORDS[refusal.reason], retry_after_s=refusal.retry_after_s)

    def _take_room(self, nodes: Capacity, ticket: Ticket) -> bool:
        """Take room on the nodes of its model for a ticket; return False if there is none.

        The room counts as taken until the nodes report the request as part of their load.
        """
        pooled = bool(ticket.trace.pooled)
        if nodes.pause == "hold" or self._missing_s(ticket.model, nodes, pooled=pooled):
            return False
        starting = self._starting.get(ticket.model)
        if starting is None:
            starting = self._starting[ticket.model] = Starting()
        tickets = starting.tickets
        while tickets and _has_started(tickets[0]):
            starting.tokens -= tickets.popleft().room_tokens
        tokens = ticket.room_tokens
        has_room = partial(nodes.has_room, tokens, len(tickets), starting.tokens, pooled=pooled)
        if not has_room():
            if not ticket.behind or not has_room(behind=ticket.behind):
                return False
            ticket.trace.behind = ticket.behind
        tickets.append(ticket)
        starting.tokens += tokens
        return True

    def _missing_s(self, model: str, nodes: Capacity, *, pooled: bool) -> float:
        """Return for how many seconds requests of a model still wait for a node that could serve
        them.

        0 if there is such a node, or none is expected. Pooling can be served by any node, other
        requests need a decode node.
        """
        serving = nodes.prefillers if pooled else nodes.decoders
        return 0.0 if serving else self._expected_nodes_s(model, pooled)

    def _note_pause(self, model: str, nodes: Capacity, now: float) -> None:
        """Tell the queue whether a model's requests stand because no node serves them."""
        self.queue.pause(model, now, bool(self._missing_s(model, nodes, pooled=False)))

    # ---- waits ----

    async def _wait(self, ticket: Ticket) -> None:
        """Wait until the ticket's turn comes; without a task switch if that is at once."""
        turn = self._turns[ticket.id] = asyncio.get_running_loop().create_future()
        try:
            self._pump()
            await turn
        except BaseException:
            self._give_up(ticket, turn)
            raise
        finally:
            del self._turns[ticket.id]

    def _give_up(self, ticket: Ticket, turn: asyncio.Future[None]) -> None:
        """Remove a ticket whose wait has ended without a journey.

        It was refused or cancelled, or its client went away. The ticket may have been admitted in
        the same instant; then its slot is given back.
        """
        if turn.done() and not turn.cancelled():
            turn.exception()  # else asyncio reports it as never retrieved if `_wait` was cancelled
        if ticket.state is TicketState.ADMITTED:
            self.leave(ticket)
            return
        self.queue.cancel(ticket, self._clock.monotonic())
        del self._tickets[ticket.id]
        self.poke()  # this may have been the large request that the others waited behind

    def _pump(self) -> None:
        """Let in or refuse the requests whose turn it is."""
        now, nodes, settings = self._clock.monotonic(), self._nodes(), self._settings
        window_s, policy = settings.prefill_window_s, settings.policy
        models = self.queue.waiting_models()
        waiting = {model: Capacity(nodes, window_s, policy, model) for model in models}
        for model, capacity in waiting.items():
            self._note_pause(model, capacity, now)

        def take_room(ticket: Ticket) -> bool:
            return self._take_room(waiting[ticket.model], ticket)

        for ticket in self.queue.pump(now, take_room):
            let_in = ticket.state is TicketState.ADMITTED
            if let_in and ticket.trace.terms.slo.ttft_s is not None:
                self._levels.promise(ticket, waiting[ticket.model].nodes)
            self._wake(ticket)
        self._set_timer(waiting, now)

    def _set_timer(self, nodes: Mapping[str, Capacity], now: float) -> None:
        """Set the timer for the next pump: when the next ticket's time runs out, or when no node is
        expected any more. `nodes`: of each model whose tickets waited."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        expiry = self.queue.next_expiry()
        ends = [] if expiry is None else [expiry - now]
        for model in self.queue.waiting_models():
            missing = (self._missing_s(model, nodes[model], pooled=it) for it in (False, True))
            ends += [left_s for left_s in missing if left_s]
        if ends:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(max(0.0, min(ends)) + 0.001, self._pump)

    def _wake(self, ticket: Ticket) -> None:
        """Wake the waiting request of a ticket that was admitted or refused."""
        turn = self._turns[ticket.id]
        if ticket.state is TicketState.ADMITTED:
            self._let_in(ticket)
            if not turn.done():
                turn.set_result(None)
        elif not turn.done():
            turn.set_exception(self._refusal(ticket))

    def _let_in(self, ticket: Ticket) -> None:
        waited_s = (ticket.trace.admitted_at or 0.0) - ticket.arrived_at
        for observe in self.stats.waits:
            observe(waited_s)


@dataclass(slots=True)
class Starting:
    """Tickets of one model that were let in and are perhaps not on a node yet; `tokens`: for which
    they took room."""

    tickets: deque[Ticket] = field(default_factory=deque[Ticket])
    tokens: int = 0


@dataclass(slots=True, eq=False)
class Preparation:
    """One request while it is read. `end` may be called before the context ends, and twice.

    `counted`: tokens that were counted for the client and not served. `num_bytes`: the size of its
    body by its headers. `busy_s`: for how long a request with a large body has kept the event loop
    busy.
    """

    _gate: Gate
    grant: Grant
    counted: int = 0
    busy_s: float = 0.0
    num_bytes: int = 0
    _ended: bool = False

    def __enter__(self) -> Preparation:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def reserve(self, num_bytes: int) -> float:
        """Return the seconds until a body of `num_bytes` may be read. Raises Overloaded.

        A second call returns 0, because a route may hand the request on to another route.
        """
        if self.num_bytes:
            return 0.0
        self.num_bytes = num_bytes
        return self._gate.reserve(self.grant, num_bytes) if num_bytes >= LARGE_BYTES else 0.0

    def end(self) -> None:
        """End the preparation: the request enters the gate next, or needs nothing more."""
        if not self._ended:
            self._ended = True
            self._gate.prepared(self)


def _has_started(ticket: Ticket) -> bool:
    """Whether the ticket's request was submitted to a node, or has ended."""
    return ticket.trace.dispatched_at is not None or ticket.state is TicketState.OVER


def _unavailable(refusal: Refusal) -> Unavailable:
    return Unavailable(_WORDS[refusal.reason], retry_after_s=refusal.retry_after_s)
