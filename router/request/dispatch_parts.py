"""DispatchParts: what router/request/dispatcher.py and its journeys work with."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.protocol.clock import Clock, SystemClock
from router.nodes.migration import MigrationStats
from router.nodes.policy import PolicySettings
from router.nodes.registry import NodeRegistry
from router.request.gate.gate import Gate
from router.request.retry_budget import RetryBudget
from router.request.sessions import SessionMap
from router.store.guard import StoreGuard


@dataclass(frozen=True, slots=True)
class DispatchParts:
    """What a dispatcher works with. `timeout_s` is the deadline of a request that brings none;
    without a `gate`, `max_live` requests run and none wait."""

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
