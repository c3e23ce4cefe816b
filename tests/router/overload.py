"""A cluster in simulated time: Poisson clients, the router's admission, one node of each role.

The prefill node computes prompts one after the other at RATE; the decode node gives each of at most
SLOTS requests a token per step, and its steps get longer with them. The router sees what nodes have
reported at their last REPORT_S, and at once what it sent itself, as in a real one. No wall clock.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from baton.protocol.handles import NodeLoad, Role
from baton.protocol.request import Request
from baton.protocol.sampling import SamplingParams
from router.nodes.policy import NodeSnapshot, PolicySettings
from router.request.gate.admission import AdmissionQueue, Bounds, Ticket, TicketState
from router.request.gate.capacity import Capacity
from router.request.gate.service_levels import TtftError
from router.request.terms import Terms
from router.request.trace import RequestTrace
from router.tenants.keys import Grant

RATE = 10_000.0  # prompt tokens per second
SLOTS = 64
STEP_S, STEP_PER_REQUEST_S = 0.020, 0.0003
REPORT_S = 0.020
WINDOW_S = 0.25
TTFT_S, TPOT_S = 1.0, 0.080


@dataclass(eq=False)
class Job:
    """`cancelled` never: a client waits for its answer, however late."""

    name: str
    grant: Grant
    prompt: int
    output: int
    arrival: float
    ticket: Ticket | None = None
    expected_s: float = 0.0
    first_at: float | None = None
    ended_at: float | None = None

    @property
    def good(self) -> bool:
        if self.first_at is None or self.ended_at is None:
            return False
        tpot_s = (self.ended_at - self.first_at) / (self.output - 1)
        return self.first_at - self.arrival <= TTFT_S and tpot_s <= TPOT_S


@dataclass
class Cluster:
    """`gated` False: everything is sent on as it comes. `lag_s`: what no node knows of, from its
    token 1 to the client's, at random between its two ends. `learns`: the router plans for it."""

    gated: bool = True
    lag_s: tuple[float, float] = (0.0, 0.0)
    learns: bool = True
    now: float = 0.0
    jobs: list[Job] = field(default_factory=list[Job])
    refused: int = 0

    def __post_init__(self) -> None:
        self.queue = AdmissionQueue(Bounds(max_live=1024, max_queued=512))
        self.ttft_error = TtftError()
        self._rng = random.Random(5)
        self._by_name: dict[str, Job] = {}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = 0
        self._prefills: deque[Job] = deque()
        self._prefill_tokens = 0
        self._starting = self._starting_tokens = 0
        self._waiting: deque[Job] = deque()  # prefilled, no slot yet
        self._running = 0
        self._reported = NodeLoad()

    def at(self, when: float, action: Callable[[], None]) -> None:
        self._order += 1
        heapq.heappush(self._events, (when, self._order, action))

    def run(self, until: float) -> None:
        self.at(0.0, self._report)
        while self._events and self._events[0][0] <= until:
            self.now, _, action = heapq.heappop(self._events)
            action()

    def arrive(self, job: Job) -> None:
        self.jobs.append(job)
        self._by_name[job.name] = job
        if not self.gated:
            self._begin(job)
            return
        latest = job.arrival + TTFT_S - (self._prefill_tokens + job.prompt) / RATE
        if self.learns:
            latest -= self.ttft_error.planned_s(latest - self.now)
        request = Request(
            job.name, (0,) * job.prompt, SamplingParams(max_tokens=512), deadline=latest
        )
        ticket = job.ticket = Ticket(request, RequestTrace(Terms(job.grant)))
        ticket.by_slo = True
        self.queue.offer(ticket, self.now, self._room)
        if ticket.state is TicketState.ADMITTED:
            self._begin(job)
        elif ticket.state is TicketState.QUEUED:
            self._pump()
        else:
            self.refused += 1

    # ---- the router ----

    def _room(self, ticket: Ticket) -> bool:
        nodes = Capacity(self._snapshots(), WINDOW_S, PolicySettings())
        taken = nodes.has_room(ticket.prompt_tokens, self._starting, self._starting_tokens)
        if taken:
            self._starting += 1
            self._starting_tokens += ticket.prompt_tokens
        return taken

    def _snapshots(self) -> list[NodeSnapshot]:
        def node(role: Role, load: NodeLoad, tokens: int) -> NodeSnapshot:
            return NodeSnapshot(
                role.value, role.value, role, "m", "layout", 16, "float32", load=load,
                assigned_tokens=tokens, assigned=tokens,
            )  # fmt: skip

        measured = NodeLoad(prefill_tokens_per_s=RATE, own_prefill_tokens_per_s=RATE)
        return [
            node(Role.PREFILL, measured, self._prefill_tokens),
            node(Role.DECODE, self._reported, 0),
        ]

    def _pump(self) -> None:
        if not self.gated:
            return
        for ticket in self.queue.pump(self.now, self._room):
            if ticket.state is TicketState.ADMITTED:
                self._begin(self._by_name[ticket.id])
            else:
                self.refused += 1

    # ---- the nodes ----

    def _report(self) -> None:
        self._reported = NodeLoad(running=self._running, waiting=len(self._waiting))
        self._pump()
        self.at(self.now + REPORT_S, self._report)

    def _begin(self, job: Job) -> None:
        if self.gated:
            self._starting -= 1
            self._starting_tokens -= job.prompt
        job.expected_s = (self._prefill_tokens + job.prompt) / RATE
        self._prefills.append(job)
        self._prefill_tokens += job.prompt
        if len(self._prefills) == 1:
            self.at(self.now + job.prompt / RATE, self._prefilled)

    def _prefilled(self) -> None:
        job = self._prefills.popleft()
        self._prefill_tokens -= job.prompt
        job.first_at = self.now + self._rng.uniform(*self.lag_s)
        if self._prefills:
            self.at(self.now + self._prefills[0].prompt / RATE, self._prefilled)
        self._waiting.append(job)
        self._decode()
        self._pump()

    def _decode(self) -> None:
        while self._waiting and self._running < SLOTS:
            self._running += 1
            job = self._waiting.popleft()
            step_s = STEP_S + STEP_PER_REQUEST_S * self._running
            self.at(self.now + (job.output - 1) * step_s, lambda job=job: self._ended(job))

    def _ended(self, job: Job) -> None:
        self._running -= 1
        job.ended_at = self.now
        self._decode()
        if job.ticket is not None:
            self.ttft_error.observe(
                (job.first_at or 0.0) - (job.ticket.trace.admitted_at or 0.0) - job.expected_s
            )
            self.queue.release(job.ticket, job.prompt + job.output, job.output, self.now)
        self._pump()


def simulate(
    per_s: dict[Grant, float],
    seconds: float = 60.0,
    *,
    gated: bool = True,
    seed: int = 1,
    lag_s: tuple[float, float] = (0.0, 0.0),
    learns: bool = True,
) -> Cluster:
    """Each grant's clients send so many requests a second, 400 +- 300 prompt and 100 +- 50 output
    tokens, whatever becomes of them."""
    rng = random.Random(seed)
    cluster = Cluster(gated, lag_s, learns)
    for grant, rate in per_s.items():
        now, number = 0.0, 0
        while (now := now + rng.expovariate(rate)) < seconds:
            name = f"{grant.name}-{number}"
            job = Job(name, grant, rng.randint(100, 700), rng.randint(50, 150), now)
            cluster.at(now, lambda job=job: cluster.arrive(job))
            number += 1
    cluster.run(seconds + 60.0)
    return cluster


def goodput(cluster: Cluster, seconds: float = 60.0) -> float:
    """Requests per second that kept both service levels."""
    return sum(job.good for job in cluster.jobs) / seconds
