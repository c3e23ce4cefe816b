"""Admission: which requests may be under way, which wait, in which order, and which are refused.

No I/O, no clock: times are seconds of one monotonic clock and are passed in. Whether the nodes have
room is decided by a function that the caller passes in. router/request/gate/gate.py adds asyncio.

    offer() -> ADMITTED                    nobody waits and there is room
            -> QUEUED -> ADMITTED          in its turn, by pump()
                      -> REFUSED           it cannot begin in time, or a fairer one took its place
                      -> OVER              cancel(): its client went away
            -> REFUSED                     queue full, over its key's limits, or surely too late
    ADMITTED -> OVER                       release(), with the tokens that it used

The most urgent priority (smallest number) first; within a priority tenants share by weight
(fair_queue.py); within tenant and priority first come, first served. If the first ticket is too
large for the room on the nodes, the tickets of its model behind it wait as well; each model has a
line of its own (line.py). The queue is bounded. When it is full, a fairer or more urgent ticket
takes the place of another one: of the newest ticket of the tenant with the longest queue for its
weight, in the least urgent priority. So a client that floods the queue pushes out only its own
requests.
"""

from __future__ import annotations

import enum
import heapq
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from baton.protocol.request import Request
from router.request.gate.line import ModelLine
from router.request.gate.rates import TokenBucket
from router.request.trace import RequestTrace
from router.tenants.fair_queue import FairQueue
from router.tenants.keys import Grant

LONGEST_RETRY_S: Final = 60
POOLED_TOKENS: Final = 512
SPARE_EXPIRIES: Final = 64
SWEEP_S: Final = 0.2  # how often waiting tickets are checked: can they still begin in time?


class TicketState(enum.Enum):
    QUEUED = "queued"
    ADMITTED = "admitted"
    REFUSED = "refused"
    OVER = "over"


class Reason(enum.StrEnum):
    """Why a request is refused; a label in the metrics."""

    TOO_LARGE = "too_large"  # n x (prompt + max_tokens); used by gate.py alone
    QUEUE_FULL = "queue_full"
    CONCURRENCY = "concurrency"  # its key has too many requests
    TOKEN_RATE = "token_rate"  # its key has used its tokens per minute
    DEADLINE = "deadline"
    SLO = "slo"
    IMAGE_BYTES = "image_bytes"  # the images of requests under way are too large already
    STOPPING = "stopping"
    PAUSED = "paused"  # by an operator; used by gate.py alone


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request was refused, and after how many whole seconds another try may succeed."""

    reason: Reason
    retry_after_s: int


@dataclass(slots=True, eq=False)
class Ticket:
    """One request at the gate: what it wants, and its place in the queue.

    `latest_start`: when its work must begin for its deadline or its SLO to hold, None for no limit.
    `by_slo`: `latest_start` comes from the SLO, not from the deadline. `expected_s`: the time from
    admission to token 1 that the nodes promise. The gate writes these three. `cost`: estimated
    tokens. `behind`: tickets that wait behind it while it is the next one.
    AdmissionQueue alone writes `cost`, all fields after it, and `trace.admitted_at`.
    """

    request: Request
    trace: RequestTrace
    grant: Grant = field(init=False)
    model: str = field(init=False)  # the key of its model
    kind: tuple[int, str] = field(init=False)  # its priority and tenant
    prompt_tokens: int = field(init=False)
    room_tokens: int = field(init=False)  # prompt tokens for which nodes must have room at first
    max_tokens: int = field(init=False)  # most output tokens of each sample
    samples: int = field(init=False)
    image_bytes: int = field(init=False)
    latest_start: float | None = field(init=False)
    by_slo: bool = False
    expected_s: float = 0.0
    cost: float = 0.0
    behind: int = 0
    arrived_at: float = 0.0
    state: TicketState = TicketState.QUEUED
    refusal: Refusal | None = None
    level: FairQueue[Ticket] | None = None  # where it waited; its cost is corrected there

    def __post_init__(self) -> None:
        request, params, pooled = self.request, self.request.params, self.trace.pooled
        self.grant, self.model = self.trace.terms.grant, self.trace.model
        self.kind = request.priority, self.grant.tenant
        self.prompt_tokens = len(request.prompt_ids)
        # Inputs that are pooled go out one group after another (router/request/pool.py).
        self.room_tokens = min(POOLED_TOKENS, self.prompt_tokens) if pooled else self.prompt_tokens
        self.max_tokens = 0 if pooled else params.max_tokens
        self.samples = max(params.n, params.best_of or 1, params.beam_width)
        self.image_bytes = sum([len(image.data) for image in request.images])
        self.latest_start = request.deadline

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def priority(self) -> int:
        return self.request.priority

    @property
    def tenant(self) -> str:
        return self.grant.tenant

    @property
    def weight(self) -> float:
        return self.grant.weight


@dataclass(frozen=True, slots=True)
class Bounds:
    """At most `max_live` requests are under way, and at most `max_queued` wait. Their images have
    at most `max_image_bytes`, those of one key at most half of that. `of_models`: the most requests
    under way of a model that has a limit of its own, by its key."""

    max_live: int = 1024
    max_queued: int = 0
    max_image_bytes: int = 1 << 30
    of_models: Mapping[str, int] = field(default_factory=dict[str, int])


@dataclass(slots=True)
class _KeyUse:
    """What one key uses now. `preparing`: requests that are being read. `live`: requests that wait
    or run; `image_bytes`: of their images. `bucket`: its tokens per minute; None: no limit."""

    preparing: int = 0
    live: int = 0
    image_bytes: int = 0
    bucket: TokenBucket | None = None


@dataclass(slots=True)
class AdmissionStats:
    """Counters for metrics and tests."""

    admitted: int = 0
    queued: int = 0  # those of the admitted that had to wait
    cancelled: int = 0  # requests whose client went away while they waited
    refused: dict[Reason, int] = field(default_factory=lambda: dict.fromkeys(Reason, 0))


# Whether the nodes have room for the ticket. True also takes the room: the ticket is admitted.
Room = Callable[[Ticket], bool]


class AdmissionQueue:
    """All tickets of one router: `num_live` of them are ADMITTED, `num_queued` are QUEUED.

    `now` must never be earlier than in a call before.
    """

    def __init__(self, bounds: Bounds) -> None:
        self.num_live = 0
        self.num_queued = 0
        self.image_bytes = 0  # of all tickets that wait or are ADMITTED
        self._bounds = bounds
        self._lines: dict[str, ModelLine] = {}  # by the key of the model
        self._keys: dict[str, _KeyUse] = {}
        self._expiries: list[tuple[float, int, Ticket]] = []
        self._pushes = 0
        self._swept_at = -math.inf
        self._displaced: list[Ticket] = []
        self.stats = AdmissionStats()

    # ---- what it knows ----

    @property
    def queued_tokens(self) -> float:
        return sum(line.backlog for line in self._lines.values())

    @property
    def tokens_per_s(self) -> float | None:
        """How fast the queue drains, over all models; None until that has been measured."""
        rates = [line.drain.tokens_per_s for line in self._lines.values()]
        return sum(rate for rate in rates if rate) if any(rates) else None

    def queued_by_tenant(self) -> dict[str, int]:
        counts: dict[str, int] = {}
        for line in self._lines.values():
            for level in line.levels.values():
                for tenant, waiting in level.waiting_by_tenant():
                    counts[tenant] = counts.get(tenant, 0) + waiting
        return counts

    def waiting_models(self) -> list[str]:
        """Return the keys of the models of which a ticket waits."""
        return [model for model, line in self._lines.items() if line.num_queued]

    def next_expiry(self) -> float | None:
        """Return the earliest `latest_start` of the waiting tickets; None if none has one."""
        while self._expiries and self._expiries[0][2].state is not TicketState.QUEUED:
            heapq.heappop(self._expiries)
        return self._expiries[0][0] if self._expiries else None

    def pause(self, model: str, now: float, paused: bool) -> None:
        """Note that from now on no ticket of a model can leave the queue (`paused`), or that they
        can again. The drain rate is not measured in a pause."""
        line = self._line(model)
        line.tick(now)
        line.paused = paused

    # ---- tickets ----

    def prepare(self, grant: Grant, now: float) -> Refusal | None:
        """Decide whether a request that has come in may be read: None if so, else the refusal.

        After None call `prepared` exactly once: right before the request is offered, or when it has
        ended.
        """
        use = self._use(grant, now)
        limit = grant.max_concurrency
        if limit is not None and use.preparing + use.live >= limit:
            return self._refusal(Reason.CONCURRENCY, 1.0)
        if use.bucket is not None and (wait_s := use.bucket.wait_s(now)) > 0:
            return self._refusal(Reason.TOKEN_RATE, wait_s)
        use.preparing += 1
        return None

    def prepared(self, grant: Grant, tokens: float, now: float) -> None:
        """End what `prepare` began. `tokens`: charged to the key for reading the request."""
        use = self._keys[grant.name]
        use.preparing -= 1
        if use.bucket is not None:
            use.bucket.give_back(-tokens, now)

    def offer(self, ticket: Ticket, now: float, take_room: Room) -> Ticket:
        """Admit, queue or refuse a ticket, and return it. Call pump() next if it is QUEUED."""
        line = self._lines.get(ticket.model) or self._line(ticket.model)
        expected = line.answers.expect(ticket.max_tokens, ticket.samples)
        ticket.cost, ticket.arrived_at = ticket.prompt_tokens + expected, now
        ahead = 0.0
        if line.num_queued:
            line.tick(now)
            ahead = line.ahead_of_new(ticket)
        use, limit = self._use(ticket.grant, now), ticket.grant.max_concurrency
        if limit is not None and use.live >= limit:
            return self._refuse(ticket, Reason.CONCURRENCY, line.wait_s(ticket.cost))
        if ticket.image_bytes and not self._has_room_for_images(use, ticket):
            return self._refuse(ticket, Reason.IMAGE_BYTES, line.wait_s(ticket.cost))
        late_s = _lateness(ticket, line, ahead, now)
        if late_s > 0:
            return self._refuse(ticket, _too_late(ticket), late_s)
        if use.bucket is not None and (wait_s := use.bucket.take(ticket.cost, now)) > 0:
            return self._refuse(ticket, Reason.TOKEN_RATE, wait_s)
        use.live += 1
        use.image_bytes += ticket.image_bytes
        self.image_bytes += ticket.image_bytes
        free = self.num_live < self._bounds.max_live and line.num_live < line.max_live
        if not line.num_queued and free and take_room(ticket):
            return self._admit(ticket, line, now)
        if self._may_queue(ticket):
            return self._push(ticket, line)
        self._end_use(ticket, 0.0, now)
        return self._refuse(ticket, Reason.QUEUE_FULL, line.wait_s(line.backlog))

    def pump(self, now: float, take_room: Room) -> list[Ticket]:
        """Admit the tickets whose turn it is, and refuse those that cannot begin in time any more.

        Returns all tickets that have left the queue since the last call, also those that had to
        give their place to another ticket.
        """
        for line in self._lines.values():
            line.tick(now)
        left, self._displaced = self._displaced, []
        left += self._expired(now)
        if self.num_queued and now - self._swept_at >= SWEEP_S:
            self._swept_at = now
            left += self._swept(now)
        lines = [line for line in self._lines.values() if line.num_queued]
        while lines and self.num_live < self._bounds.max_live:
            line = min(lines, key=lambda line: line.urgency)
            head = line.head()
            head.behind = line.behind()
            if line.num_live >= line.max_live or not take_room(head):
                lines.remove(line)
                continue
            line.pop()
            self._unqueued()
            self._admit(head, line, now)
            self.stats.queued += 1
            left.append(head)
            if not line.num_queued:
                lines.remove(line)
        return left

    def cancel(self, ticket: Ticket, now: float) -> None:
        """Remove a waiting ticket whose client went away. Do nothing unless it is QUEUED."""
        if ticket.state is TicketState.QUEUED:
            self._line(ticket.model).tick(now)
            self._drop(ticket, now)
            ticket.state = TicketState.OVER
            self.stats.cancelled += 1

    def release(self, ticket: Ticket, used_tokens: float, output_tokens: int, now: float) -> None:
        """End an ADMITTED ticket, and correct its estimated cost to `used_tokens`.

        Call it once per ticket, however the request ended.
        """
        assert ticket.state is TicketState.ADMITTED, f"released when {ticket.state.value}"
        ticket.state = TicketState.OVER
        line = self._lines[ticket.model]
        self.num_live -= 1
        line.num_live -= 1
        line.live[ticket.kind] -= 1
        if not line.live[ticket.kind]:
            del line.live[ticket.kind]
        self._end_use(ticket, used_tokens, now)
        if ticket.level is not None:
            ticket.level.settle(ticket.tenant, used_tokens - ticket.cost)
        if output_tokens:
            line.answers.add(output_tokens / ticket.samples)

    def stop(self, now: float) -> list[Ticket]:
        """Refuse all waiting tickets and return them."""
        waiting = [ticket for line in self._lines.values() for ticket in line.waiting()]
        for ticket in waiting:
            self._drop(ticket, now)
            self._refuse(ticket, Reason.STOPPING, 1)
        return waiting

    # ---- inside ----

    def _line(self, model: str) -> ModelLine:
        """Return the line of a model; a new one at its first ticket."""
        if model not in self._lines:
            self._lines[model] = ModelLine(self._bounds.of_models.get(model, math.inf))
        return self._lines[model]

    def _use(self, grant: Grant, now: float) -> _KeyUse:
        use = self._keys.get(grant.name)
        if use is None:
            rate = grant.tokens_per_minute
            bucket = None if rate is None else TokenBucket(rate, now)
            use = self._keys[grant.name] = _KeyUse(bucket=bucket)
        return use

    def _end_use(self, ticket: Ticket, used_tokens: float, now: float) -> None:
        """Stop counting the ticket for its key, and correct the tokens that the key was charged."""
        use = self._keys[ticket.grant.name]
        use.live -= 1
        use.image_bytes -= ticket.image_bytes
        self.image_bytes -= ticket.image_bytes
        if use.bucket is not None:
            use.bucket.give_back(ticket.cost - used_tokens, now)

    def _has_room_for_images(self, use: _KeyUse, ticket: Ticket) -> bool:
        """Whether the images of a ticket fit beside those that are here. A key never takes the
        other half, so its images keep nobody else's out."""
        num_bytes, most = ticket.image_bytes, self._bounds.max_image_bytes
        whole, own = self.image_bytes + num_bytes, use.image_bytes + num_bytes
        return whole <= most and own <= most // 2

    def _admit(self, ticket: Ticket, line: ModelLine, now: float) -> Ticket:
        ticket.state = TicketState.ADMITTED
        ticket.trace.admitted_at = now
        self.num_live += 1
        line.num_live += 1
        line.live[ticket.kind] = line.live.get(ticket.kind, 0) + 1
        self.stats.admitted += 1
        return ticket

    def _refuse(self, ticket: Ticket, reason: Reason, wait_s: float) -> Ticket:
        ticket.state = TicketState.REFUSED
        ticket.refusal = self._refusal(reason, wait_s)
        return ticket

    def _refusal(self, reason: Reason, wait_s: float) -> Refusal:
        self.stats.refused[reason] += 1
        return Refusal(reason, min(LONGEST_RETRY_S, max(1, math.ceil(wait_s))))

    def _push(self, ticket: Ticket, line: ModelLine) -> Ticket:
        line.push(ticket)
        self.num_queued += 1
        self._pushes += 1
        latest = ticket.latest_start
        if latest is not None:
            heapq.heappush(self._expiries, (latest, self._pushes, ticket))
        if len(self._expiries) > 2 * self.num_queued + SPARE_EXPIRIES:
            # Tickets that were served leave entries behind, some of them with far deadlines.
            self._expiries = [it for it in self._expiries if it[2].state is TicketState.QUEUED]
            heapq.heapify(self._expiries)
        return ticket

    def _unqueued(self) -> None:
        """Count a ticket that has left its line."""
        self.num_queued -= 1
        if not self.num_queued:
            self._expiries.clear()  # entries of served tickets would keep their prompts in memory

    def _drop(self, ticket: Ticket, now: float) -> None:
        """Remove a ticket from the queue unserved; its tenant and its key are charged nothing."""
        self._lines[ticket.model].remove(ticket)
        self._unqueued()
        self._end_use(ticket, 0.0, now)

    def _may_queue(self, ticket: Ticket) -> bool:
        """Whether the ticket gets a place in the queue.

        If the queue is full, a less fair ticket may have to give its place: that one is refused.
        """
        if self.num_queued < self._bounds.max_queued:
            return True
        lines = [line for line in self._lines.values() if line.num_queued]
        if not lines:
            return False
        priority = max(max(line.levels) for line in lines)
        if ticket.priority > priority:
            return False
        levels = [line.levels[priority] for line in lines if priority in line.levels]
        level = max(levels, key=lambda level: level.fattest()[1])
        tenant, share = level.fattest()
        mine = self._lines[ticket.model].levels.get(priority)
        own = ticket.cost / ticket.weight + (0.0 if mine is None else mine.share_of(ticket.tenant))
        if ticket.priority == priority and (tenant == ticket.tenant or share <= own):
            return False
        victim = level.last_of(tenant)
        self._drop(victim, ticket.arrived_at)
        line = self._lines[victim.model]
        self._displaced.append(self._refuse(victim, Reason.QUEUE_FULL, line.wait_s(line.backlog)))
        return True

    # ---- can it make it? ----

    def _expired(self, now: float) -> list[Ticket]:
        late: list[Ticket] = []
        while (expiry := self.next_expiry()) is not None and expiry < now:
            _, _, ticket = heapq.heappop(self._expiries)
            late.append(self._give_up(ticket, now, 0.0))
        return late

    def _swept(self, now: float) -> list[Ticket]:
        """Refuse the tickets for which the queue has become too slow."""
        late: list[tuple[Ticket, float]] = []
        for line in self._lines.values():
            for ticket, ahead in line.ahead():
                late_s = _lateness(ticket, line, ahead, now)
                if late_s > 0:
                    late.append((ticket, late_s))
        return [self._give_up(ticket, now, late_s) for ticket, late_s in late]

    def _give_up(self, ticket: Ticket, now: float, late_s: float) -> Ticket:
        self._drop(ticket, now)
        return self._refuse(ticket, _too_late(ticket), late_s)


def _lateness(ticket: Ticket, line: ModelLine, ahead: float, now: float) -> float:
    """Return by how many seconds the ticket would begin too late; at most 0 if in time.

    `ahead`: the cost that is served before it.
    """
    latest = ticket.latest_start
    if latest is None:
        return 0.0
    return now + (line.wait_s(ahead, unknown_s=0.0) if ahead else 0.0) - latest


def _too_late(ticket: Ticket) -> Reason:
    return Reason.SLO if ticket.by_slo else Reason.DEADLINE
