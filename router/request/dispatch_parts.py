"""DispatchParts: the objects that the dispatcher and its journeys share."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.protocol.clock import Clock, SystemClock
from router.events import EventRing
from router.nodes.migration import MigrationStats
from router.nodes.policy import PolicySettings
from router.nodes.registry import NodeRegistry
from router.request.gate.gate import Gate
from router.request.retry_budget import RetryBudget
from router.request.sessions import SessionMap
from router.request.texts import TextRing
from router.request.timeline import TimelineRing
from router.request.tracing import RouterTracing
from router.store.guard import StoreGuard


@dataclass(frozen=True, slots=True)
class DispatchParts:
    """The objects that a dispatcher and its journeys share.

    `timeout_s`: the time limit of a request that brings no deadline. Without a `gate` at most
    `max_live` requests run and none wait. `timelines`: of the requests that ended last;
    `texts`: what those asked and got, None: nobody may see it.
    `slow_request_s`: requests that took longer are logged as warnings; 0: none.
    """

    registry: NodeRegistry
    store: StoreGuard
    clock: Clock
    settings: PolicySettings = field(default_factory=PolicySettings)
    max_live: int = 1024
    timeout_s: float = 600.0
    migrations: MigrationStats = field(default_factory=MigrationStats)
    gate: Gate | None = None
    sessions: SessionMap = field(default_factory=SessionMap)
    retries: RetryBudget = field(default_factory=lambda: RetryBudget(SystemClock()))
    slow_request_s: float = 0.0
    timelines: TimelineRing = field(default_factory=lambda: TimelineRing(0))
    texts: TextRing | None = None
    tracing: RouterTracing | None = None  # None: traces are off
    events: EventRing = field(default_factory=EventRing)
