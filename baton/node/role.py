"""The interface between the shell that all nodes share and the role of a node.

A role serves one request per call of `serve`, from its submission to its last event. A request is
aborted by cancelling that call, so every exit of `serve` frees all that the request holds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from baton.engine.core.assembly import EngineParts
from baton.engine.core.engine import Engine
from baton.engine.state.interface import EngineHooks
from baton.engine.thread import EngineThread, StepReport
from baton.node.config import NodeConfig
from baton.node.requests import NodeRequest
from baton.node.tracing import NodeTracing
from baton.protocol.clock import Clock
from baton.protocol.events import TokenEvent
from baton.protocol.handles import KVHandle, Role
from baton.protocol.messages import Submission
from baton.protocol.request import Request
from baton.runtime.timing import Timing
from kv_transfer.connector import Connector
from kv_transfer.protocol.base import KVConnector, OnReleased
from kv_transfer.row_fetches import MakeRowConnector, RowFetches

# Makes the node's engine and the engine's thread. The engine exports prompts through the hooks;
# with None it exports none. A role calls it once, in its constructor, and does not keep it, because
# it refers to the model.
MakeThread: TypeAlias = Callable[[EngineHooks | None], EngineThread]


@dataclass(frozen=True, slots=True)
class RoleContext:
    """What the shell gives its role.

    `spawn` runs a coroutine as a task that the shell keeps, logs and ends. `observe_fetch` takes
    the seconds of a successful KV fetch. `rows` brings images from encode nodes. `traced`: some
    requests have spans.
    """

    connector: KVConnector
    loop: asyncio.AbstractEventLoop
    config: NodeConfig
    timing: Timing
    clock: Clock
    spawn: Callable[[Coroutine[Any, Any, None]], None]
    observe_fetch: Callable[[float], None]
    rows: RowFetches
    traced: bool = False


@dataclass(frozen=True, slots=True)
class NodeParts:
    """What a shell is made of. Its constructor runs the two makers, on the event loop. It does not
    keep this object, because a node that sleeps must free the model. `group`: name and rank."""

    node_id: str
    boot_id: str
    role: Role
    config: NodeConfig
    timing: Timing
    clock: Clock
    engine: EngineParts
    group: tuple[str, int]
    make_connector: Callable[[OnReleased], Connector]
    make_role: Callable[[RoleContext, MakeThread], NodeRole]
    make_row_connector: MakeRowConnector
    tracing: NodeTracing | None = None  # None: traces are off


class NodeRole(Protocol):
    """The role of a node: PrefillRole, DecodeRole or EncodeRole."""

    @property
    def thread(self) -> EngineThread:
        """The thread that MakeThread made; the shell starts and stops it."""
        ...

    @property
    def fetching(self) -> int:
        """The number of KV fetches under way or queued."""
        ...

    def check(self, message: Submission) -> None:
        """Raise BatonError for a task that this role does not take. Event loop."""
        ...

    async def serve(self, entry: NodeRequest) -> None:
        """Serve one request to its last event. Raises BatonError if it cannot.

        However this ends (also cancelled), all that the request holds is freed.
        """
        ...

    def hand_on(self, engine: Engine, request: Request) -> KVHandle | None:
        """Export a running request with its KV and forget it. Engine thread, between steps.

        Return None, and change nothing, if the request has no KV worth moving.
        """
        ...

    def ends(self, entry: NodeRequest, event: TokenEvent) -> bool:
        """Whether `event` is the last one of its request on this node."""
        ...

    def on_step(self, report: StepReport) -> None:
        """Handle a step's report, on the engine thread, before routers hear of it. Must not
        block.
        """
        ...

    def written(self, events: Sequence[TokenEvent]) -> None:
        """Note that these events are on the wire to their router, or that nobody wants them. Event
        loop.
        """
        ...

    def blocks_freed(self) -> None:
        """Let waiting work try again: blocks may have become free. Event loop."""
        ...
