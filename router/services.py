"""RouterServices: the parts of one router that its HTTP and gRPC APIs use."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from baton.protocol.clock import Clock, SystemClock
from router.events import EventRing

if TYPE_CHECKING:
    from router.batches.runner import BatchRunner
    from router.config import RouterConfig
    from router.metrics.router import RouterMetrics
    from router.models import Models
    from router.nodes.registry import NodeRegistry
    from router.request.aborts import Aborts
    from router.request.dispatcher import Dispatcher
    from router.request.pool import Pools
    from router.request.timeline import TimelineRing
    from router.resumable.runs import Runs
    from router.store.guard import StoreGuard


@dataclass(slots=True)
class Lifecycle:
    """Whether the router still takes new requests. router/main.py sets `draining` at a signal,
    router/admin/server.py when an operator asks for it."""

    draining: bool = False


@dataclass(frozen=True, slots=True)
class RouterServices:
    """The parts that an API may use.

    `models`: what the files of each served model say. What its nodes say is
    `registry.model(key)`, None until one of them has registered.
    """

    config: RouterConfig
    dispatcher: Dispatcher
    registry: NodeRegistry
    store: StoreGuard
    models: Models
    metrics: RouterMetrics
    aborts: Aborts
    lifecycle: Lifecycle = field(default_factory=Lifecycle)
    clock: Clock = field(default_factory=SystemClock)
    runs: Runs | None = None  # resumable requests; None: they are refused
    pools: Pools | None = None  # computes embeddings and scores; None: the registry's nodes do
    timelines: TimelineRing | None = None  # of ended requests; None: none are kept
    batches: BatchRunner | None = None  # None: /v1/files and /v1/batches are not served
    events: EventRing = field(default_factory=EventRing)

    @property
    def ready(self) -> bool:
        return not self.lifecycle.draining and self.registry.can_serve()
