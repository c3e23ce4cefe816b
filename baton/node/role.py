"""The seam between the shell that all nodes share and what is special about a role.

A role serves one request per call of `serve`, from its submission to its last event; cancelling
that call is how a request is aborted, so every exit of `serve` gives back all it took.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from baton.engine.core.engine import Engine
from baton.engine.state.interface import EngineHooks
from baton.engine.thread import EngineThread, StepReport
from baton.node.config import NodeConfig
from baton.node.requests import NodeRequest
from baton.protocol.clock import Clock
from baton.protocol.events import TokenEvent
from baton.protocol.handles import KVHandle
from baton.protocol.messages import SubmitDecode, SubmitPool, SubmitPrefill
from baton.protocol.request import Request
from baton.runtime.timing import Timing
from kv_transfer.protocol.base import KVConnector

# Makes the node's engine, which exports prompts through these hooks (None: it exports none), and
# the engine's thread. A role calls it once, in its constructor, and does not keep it: it refers to
# the model.
MakeThread: TypeAlias = Callable[[EngineHooks | None], EngineThread]


@dataclass(frozen=True, slots=True)
class RoleContext:
    """What the shell gives its role.

    `spawn` runs a coroutine as a task that the shell keeps, logs and ends. `observe_fetch` takes
    the seconds of a successful KV fetch.
    """

    connector: KVConnector
    loop: asyncio.AbstractEventLoop
    config: NodeConfig
    timing: Timing
    clock: Clock
    spawn: Callable[[Coroutine[Any, Any, None]], None]
    observe_fetch: Callable[[float], None]


class NodeRole(Protocol):
    """PrefillRole and DecodeRole."""

    @property
    def thread(self) -> EngineThread:
        """What MakeThread gave; the shell starts and stops it."""
        ...

    @property
    def fetching(self) -> int:
        """KV fetches under way or queued."""
        ...

    def check(self, message: SubmitPrefill | SubmitDecode | SubmitPool) -> None:
        """Raises BatonError for a task that this role does not take. Event loop."""
        ...

    async def serve(self, entry: NodeRequest) -> None:
        """Serve one request to its last event. Raises BatonError if it cannot.

        However this ends (also cancelled), all that the request holds is freed.
        """
        ...

    def hand_on(self, engine: Engine, request: Request) -> KVHandle | None:
        """Export a running request with its KV and forget it; None if that is not worth it, and
        nothing changed. Engine thread, between steps."""
        ...

    def ends(self, entry: NodeRequest, event: TokenEvent) -> bool:
        """Whether, with `event`, nothing more is to come of its request on this node."""
        ...

    def on_step(self, report: StepReport) -> None:
        """After each step, on the engine thread, before routers hear of it. Must not block."""
        ...

    def written(self, events: Sequence[TokenEvent]) -> None:
        """These are on the wire to their router, or nobody wants them any more. Event loop."""
        ...

    def blocks_freed(self) -> None:
        """Blocks may have become free. Event loop."""
        ...
