"""Gate: asyncio around router/request/gate/admission.py, between the front doors and the
dispatcher.

    async with gate.admitted(request, trace):   a slot, now or after a wait, or a refusal
        ...                                     the journey
                                                every way out gives the slot back, once

If there is room a request neither waits nor switches tasks. Waiting ones are let in when another
one ends (its slot) or a node reports (its room: `poke`). A timer refuses those whose time runs out.
While no node serves, but one is expected (router/nodes/directory.py), all requests wait. Event loop
only. The limits are this router's own: two routers let in twice as many requests.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from baton.protocol.clock import Clock
from baton.protocol.errors import BatonError, Cancelled, InvalidRequest, Overloaded, Unavailable
from baton.protocol.request import Request, RequestState
from router.nodes.policy import NodeSnapshot
from router.request.gate.admission import (
    AdmissionQueue,
    Bounds,
    Reason,
    Refusal,
    Ticket,
    TicketState,
    Wanted,
)
from router.request.gate.capacity import (
    OnTheWay,
    has_prefill_room,
    has_room,
    paused,
    serves,
    widest,
)
from router.request.gate.service_levels import ServiceLevels, SloCounts
from router.request.trace import RequestTrace
from router.tenants.keys import Grant
from router.tenants.turns import LONGEST_WAIT_S, Pace

MOST_REQUEST_TOKENS: Final = 1 << 20
RETRY_PAUSED_S: Final = 10  # nobody but the operator knows
POOLED_TOKENS: Final = 512
COUNTED_SHARE: Final = 0.01  # a token that is only counted costs this share of one that is served
RETRY_TPOT_S: Final = 1.0  # steps get faster as requests end, nobody can say when
_WORDS: Final[dict[Reason, str]] = {
    Reason.QUEUE_FULL: "the server is at its limit and its queue is full",
    Reason.CONCURRENCY: "as many requests of this key are under way as it may have at once",
    Reason.TOKEN_RATE: "this key has used its tokens per minute",
    Reason.DEADLINE: "the request could not begin before its deadline",
    Reason.SLO: "the service level that the request asks for cannot be kept now",
    Reason.STOPPING: "the server is stopping",
    Reason.PAUSED: "an operator has paused the server: it takes no new requests",
}


@dataclass(frozen=True, slots=True)
class GateSettings:
    """`max_request_tokens`: most n x (prompt + max_tokens). `prefill_window_s`: see capacity.py."""

    bounds: Bounds = field(default_factory=Bounds)
    max_request_tokens: int = MOST_REQUEST_TOKENS
    prefill_window_s: float = 0.5


@dataclass(slots=True)
class GateStats:
    """Counters for metrics and tests. `waits`: called with the seconds of each wait in the queue, 0
    for none; `served`: tenant -> tokens."""

    ttft: SloCounts = field(default_factory=SloCounts)
    tpot: SloCounts = field(default_factory=SloCounts)
    served: dict[str, float] = field(default_factory=dict[str, float])
    waits: list[Callable[[float], None]] = field(default_factory=list[Callable[[float], None]])


@dataclass(slots=True, eq=False)
class _Entry:
    """A request on this side of its end."""

    request: Request
    trace: RequestTrace
    ticket: Ticket
    turn: asyncio.Future[None] | None = None  # while it waits
    expected_s: float = 0.0  # from admission to token 1, as nodes promised then


class Gate:
    """`nodes`: their snapshots now; without, only the bounds count. `expected_s(pooled)`: for how
    long a node that serves such requests is still expected."""

    def __init__(
        self,
        clock: Clock,
        settings: GateSettings,
        nodes: Callable[[], Sequence[NodeSnapshot]] = tuple,
        expected_s: Callable[[bool], float] = lambda _: 0.0,
    ) -> None:
        self._clock = clock
        self._settings = settings
        self._nodes = nodes
        self._expected_nodes_s = expected_s
        self._entries: dict[str, _Entry] = {}
        self._starting: deque[tuple[Ticket, RequestTrace]] = deque()  # maybe not with a node yet
        self._starting_tokens = 0
        self._timer: asyncio.TimerHandle | None = None
        self.queue = AdmissionQueue(settings.bounds)
        self.stats = GateStats()
        self._levels = ServiceLevels(clock, nodes, self.stats.ttft, self.stats.tpot)
        self._pace = Pace()

    def holds(self, request_id: str) -> bool:
        """Does such a request wait or run?"""
        return request_id in self._entries

    def admitted(self, request: Request, trace: RequestTrace) -> Passage:
        """The context that a request runs in.

        Entering raises InvalidRequest (too large, id in use), Overloaded (full, over its key's
        limits), Unavailable (too late, paused) and Cancelled (by `cancel`).
        """
        return Passage(self, request, trace)

    def preparing(self, grant: Grant) -> Preparation:
        """The context that a request of this key is read in, up to its passage: it counts there as
        one of the key's requests. Entering raises Overloaded."""
        return Preparation(self, grant)

    def poke(self) -> None:
        """The nodes may have more room than before: look, if anybody waits."""
        if self.queue.num_queued:
            self._pump()

    def cancel(self, request_id: str) -> bool:
        """End a request's wait with Cancelled; False if none such waits."""
        entry = self._entries.get(request_id)
        if entry is None or entry.turn is None or entry.turn.done():
            return False
        entry.turn.set_exception(Cancelled("the request was cancelled"))
        return True

    def stop(self) -> None:
        """Refuse all that wait."""
        if self._timer is not None:
            self._timer.cancel()
        for ticket in self.queue.stop(self._clock.monotonic()):
            self._wake(ticket)

    def waiting(self) -> list[tuple[Request, RequestTrace]]:
        """Who waits to be let in, in the order of arrival."""
        return [
            (entry.request, entry.trace)
            for entry in self._entries.values()
            if entry.ticket.state is TicketState.QUEUED
        ]

    # ---- for Passage ----

    def prepare(self, grant: Grant) -> None:
        """Raises what `preparing` says."""
        now = self._clock.monotonic()
        self._pace.seen(grant.domain, now)
        refusal = self.queue.prepare(grant, now)
        if refusal is not None:
            raise Overloaded(_WORDS[refusal.reason], retry_after_s=refusal.retry_after_s)

    def prepared(self, grant: Grant, tokens: float) -> None:
        self.queue.prepared(grant, tokens, self._clock.monotonic())

    def reserve(self, grant: Grant, num_bytes: int) -> float:
        """See Preparation."""
        wait_s = self._pace.reserve(grant.domain, num_bytes, self._clock.monotonic())
        if wait_s > LONGEST_WAIT_S:
            message = "too many large requests of this key wait to be read"
            raise Overloaded(message, retry_after_s=math.ceil(LONGEST_WAIT_S))
        return wait_s

    def spent(self, grant: Grant, num_bytes: int, busy_s: float) -> None:
        self._pace.spent(grant.domain, num_bytes, busy_s, self._clock.monotonic())

    def enter(self, request: Request, trace: RequestTrace) -> _Entry:
        """Admitted, or waiting. Raises what `admitted` says."""
        if request.id in self._entries:
            raise InvalidRequest("this request id is in use", field="request_id")
        if paused(self._nodes()) == "refuse":
            self.queue.stats.refused[Reason.PAUSED] += 1
            raise _unavailable(Refusal(Reason.PAUSED, RETRY_PAUSED_S))
        wanted = self._wanted(request, trace)
        now = self._clock.monotonic()
        ticket = self.queue.offer(wanted, now, self._room(trace))
        entry = _Entry(request, trace, ticket)
        if ticket.state is TicketState.REFUSED:
            raise self._refusal(entry)
        self._entries[request.id] = entry
        if ticket.state is TicketState.QUEUED:
            entry.turn = asyncio.get_running_loop().create_future()
            self._pump()
        else:
            self._let_in(entry)
        return entry

    async def turn(self, entry: _Entry) -> None:
        """Wait for the turn. Raises what `admitted` says; a request that gives up leaves no
        trace."""
        assert entry.turn is not None, "it waits"
        try:
            await entry.turn
        except BaseException:
            self._gave_up(entry)
            raise

    def leave(self, entry: _Entry) -> None:
        """An admitted request has ended."""
        trace, request = entry.trace, entry.request
        del self._entries[request.id]
        used = 0
        if trace.dispatched_at is not None:
            used = len(request.prompt_ids) + trace.output_tokens
        finished = trace.outcome == RequestState.FINISHED
        now = self._clock.monotonic()
        self.queue.release(entry.ticket, used, trace.output_tokens if finished else 0, now)
        served = self.stats.served
        served[entry.ticket.tenant] = served.get(entry.ticket.tenant, 0.0) + used
        self._levels.observe_ttft(request, trace, entry.expected_s)
        if trace.outcome != RequestState.CANCELLED:
            self._levels.count(request, trace, finished)
        self.poke()

    # ---- inside ----

    def _wanted(self, request: Request, trace: RequestTrace) -> Wanted:
        """What the queue must know. Raises InvalidRequest for too large a request, Unavailable for
        a service level that no node can keep."""
        max_tokens = 0 if trace.pooled else request.params.max_tokens
        self._check_tokens(request, trace, max_tokens)
        self._check_width(request)
        expected_s = self._levels.expected_ttft_s(request, trace)
        if self._levels.refuses_tpot(trace):
            self.queue.stats.refused[Reason.SLO] += 1
            raise _unavailable(Refusal(Reason.SLO, math.ceil(RETRY_TPOT_S)))
        latest_start = self._levels.latest_start(request, trace, expected_s)
        num_prompt = len(request.prompt_ids)
        return Wanted(
            id=request.id,
            prompt_tokens=num_prompt,
            max_tokens=max_tokens,
            samples=_num_samples(request),
            priority=request.priority,
            grant=trace.terms.grant,
            latest_start=latest_start.at,
            by_slo=latest_start.by_slo,
            # Inputs that are pooled go out one group after another (router/request/pool.py).
            first_tokens=min(POOLED_TOKENS, num_prompt) if trace.pooled else None,
        )

    def _check_tokens(self, request: Request, trace: RequestTrace, max_tokens: int) -> None:
        """Raises InvalidRequest for more than the settings allow."""
        samples = _num_samples(request)
        tokens = samples * (len(request.prompt_ids) + max_tokens)
        if tokens <= self._settings.max_request_tokens:
            return
        self.queue.stats.refused[Reason.TOO_LARGE] += 1
        raise InvalidRequest(
            f"{'the input' if trace.pooled else 'n x (prompt + max_tokens)'} is {tokens}"
            f" tokens, at most {self._settings.max_request_tokens} are allowed",
            field=trace.pooled or ("n" if samples > 1 else "max_tokens"),
        )

    def _check_width(self, request: Request) -> None:
        """Raises InvalidRequest for more sequences than any node runs at once."""
        params = request.params
        most = widest(self._nodes()) if params.width > 1 else None
        if most is None or params.width <= most:
            return
        self.queue.stats.refused[Reason.TOO_LARGE] += 1
        raise InvalidRequest(
            f"{params.width} sequences of one request are more than the {most} that a"
            " decode node runs at once (its --max-num-seqs)",
            field="best_of" if (params.best_of or 1) > params.n else "n",
        )

    def _room(self, newcomer: RequestTrace | None = None) -> Callable[[Ticket], bool]:
        """Takes room on the nodes as they are now, for the `newcomer` or for those that wait."""
        nodes = self._nodes()
        window_s, held = self._settings.prefill_window_s, paused(nodes) == "hold"

        def take_room(ticket: Ticket) -> bool:
            if held:
                return False
            tokens = ticket.wanted.room_tokens
            trace = newcomer or self._entries[ticket.id].trace
            pooled = bool(trace.pooled)
            if self._missing_s(nodes, pooled=pooled):
                return False
            room = has_prefill_room if pooled else has_room
            if not room(tokens, nodes, self._on_the_way(), window_s):
                return False
            self._starting.append((ticket, trace))
            self._starting_tokens += tokens
            return True

        # Time without a node says nothing about how fast the queue drains.
        self.queue.pause(self._clock.monotonic(), bool(self._missing_s(nodes, pooled=False)))
        return take_room

    def _missing_s(self, nodes: Sequence[NodeSnapshot], *, pooled: bool) -> float:
        """For how long requests wait for a node that serves; 0: there is one, or none is
        expected."""
        return 0.0 if serves(nodes, pooled=pooled) else self._expected_nodes_s(pooled)

    def _on_the_way(self) -> OnTheWay:
        starting = self._starting
        while starting and _has_started(*starting[0]):
            self._starting_tokens -= starting.popleft()[0].wanted.room_tokens
        return OnTheWay(len(starting), self._starting_tokens)

    def _let_in(self, entry: _Entry) -> None:
        if entry.trace.terms.slo.ttft_s is not None:
            entry.expected_s = self._levels.expected_ttft_s(entry.request, entry.trace)
        entry.trace.admitted_at = entry.ticket.admitted_at
        waited_s = (entry.ticket.admitted_at or 0.0) - entry.ticket.arrived_at
        for observe in self.stats.waits:
            observe(waited_s)

    def _pump(self) -> None:
        """Let in or refuse the requests whose turn it is, and set the timer for the next one whose
        time runs out."""
        now = self._clock.monotonic()
        for ticket in self.queue.pump(now, self._room()):
            self._wake(ticket)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        expiry, nodes = self.queue.next_expiry(), self._nodes()
        ends = [] if expiry is None else [expiry - now]
        if self.queue.num_queued:
            missing = (self._missing_s(nodes, pooled=pooled) for pooled in (False, True))
            ends += [left_s for left_s in missing if left_s]
        if ends:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(max(0.0, min(ends)) + 0.001, self._pump)

    def _wake(self, ticket: Ticket) -> None:
        entry = self._entries[ticket.id]
        turn = entry.turn
        assert turn is not None, "it was queued"
        if ticket.state is TicketState.ADMITTED:
            self._let_in(entry)
            if not turn.done():
                turn.set_result(None)
        elif not turn.done():
            turn.set_exception(self._refusal(entry))

    def _gave_up(self, entry: _Entry) -> None:
        """A request's wait has ended without a journey: it was refused or cancelled, or its client
        went away. That may happen in the same instant in which it is let in."""
        turn = entry.turn
        if turn is not None and turn.done() and not turn.cancelled():
            turn.exception()  # so that asyncio does not report it if its waiter was cancelled, too
        if entry.ticket.state is TicketState.ADMITTED:
            self.leave(entry)
            return
        self.queue.cancel(entry.ticket, self._clock.monotonic())
        del self._entries[entry.request.id]
        self.poke()  # it may have been the large request that held up the others

    def _refusal(self, entry: _Entry) -> BatonError:
        refusal = entry.ticket.refusal
        assert refusal is not None, "it was refused"
        if refusal.reason is Reason.SLO:
            self.stats.ttft.refused += 1
        if refusal.reason in (Reason.SLO, Reason.DEADLINE, Reason.STOPPING):
            return _unavailable(refusal)
        return Overloaded(_WORDS[refusal.reason], retry_after_s=refusal.retry_after_s)


class Preparation:
    """One request while it is read. `end` may be called before the context ends; twice is safe.

    `counted`: tokens that were only counted. `busy_s`: how long it has kept the event loop busy.
    """

    __slots__ = ("_begun", "_gate", "_grant", "_num_bytes", "busy_s", "counted")

    def __init__(self, gate: Gate, grant: Grant) -> None:
        self._gate = gate
        self._grant = grant
        self._begun = False
        self._num_bytes = 0
        self.counted = 0
        self.busy_s = 0.0

    def __enter__(self) -> Preparation:
        self._gate.prepare(self._grant)
        self._begun = True
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def reserve(self, num_bytes: int) -> float:
        """Seconds until a body of so many bytes may be read; 0 for a second call, because a route
        may hand the request on to another one. Raises Overloaded."""
        if self._num_bytes:
            return 0.0
        self._num_bytes = num_bytes
        return self._gate.reserve(self._grant, num_bytes)

    def end(self) -> None:
        """It enters the gate, or needs nothing more."""
        if self._begun:
            self._begun = False
            self._gate.prepared(self._grant, self.counted * COUNTED_SHARE)
            self._gate.spent(self._grant, self._num_bytes, self.busy_s)


class Passage:
    """One request's way through the gate: entered when it is let in, left when it has ended."""

    __slots__ = ("_entry", "_gate", "_request", "_trace")

    def __init__(self, gate: Gate, request: Request, trace: RequestTrace) -> None:
        self._gate = gate
        self._request = request
        self._trace = trace
        self._entry: _Entry | None = None

    async def __aenter__(self) -> None:
        entry = self._gate.enter(self._request, self._trace)
        # A request that was let in at once, or by the pump on its arrival, needs no task switch.
        if entry.ticket.state is not TicketState.ADMITTED:
            await self._gate.turn(entry)
        self._entry = entry

    async def __aexit__(self, *_: object) -> None:
        entry, self._entry = self._entry, None
        if entry is not None:
            self._gate.leave(entry)


def _num_samples(request: Request) -> int:
    params = request.params
    return max(params.n, params.best_of or 1, params.beam_width)


def _has_started(ticket: Ticket, trace: RequestTrace) -> bool:
    """Is it part of its node's load by now, or has it ended?"""
    return trace.dispatched_at is not None or ticket.state is TicketState.OVER


def _unavailable(refusal: Refusal) -> Unavailable:
    return Unavailable(_WORDS[refusal.reason], retry_after_s=refusal.retry_after_s)
