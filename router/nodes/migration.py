"""Migration: running requests change their decode node with their KV, because it drains or is full.

Here: which requests move, how many at once, and what became of it. The journey of one that moves is
router/request/dispatch.py's. A round is made whenever a node begins to drain or comes or goes, and
each heartbeat. The life: Migrator(parts) -> run() as a task, until cancelled.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Protocol

from baton.protocol.handles import Role
from baton.runtime.timing import Timing
from router.nodes.policy import NodeSnapshot

logger = logging.getLogger(__name__)
MAX_MOVING: Final = 8  # requests that leave one node at once: their KV shares its links
FULL: Final = 0.05  # share of free blocks below which a node with swapped requests is full
ROOM: Final = 0.25  # share of free blocks that a node keeps which takes one over
REST_S: Final = 10.0  # a request that was moved to make room stays for so long
# How a move ends; "over": the request ended before.
Outcome = Literal["done", "given back", "failed", "over"]


@dataclass(slots=True)
class MigrationStats:
    """Counters since the router's start; written by journeys."""

    done: int = 0
    given_back: int = 0  # there was no KV worth moving
    failed: int = 0  # the node or the KV was lost on the way: prefilled again
    tokens: int = 0  # whose KV moved
    seconds: float = 0.0  # from the question to the new node's first event, of those done


@dataclass(slots=True)
class MigrationMove:
    """One request on its way from the node `source` (boot id)."""

    source: str
    asked_at: float
    tokens: int = 0  # exported; 0 until the node has let go
    done: asyncio.Future[bool] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    def end(self, outcome: Outcome, stats: MigrationStats, now: float) -> None:
        """Notify whoever waits for it, and count it."""
        if outcome == "done":
            stats.done += 1
            stats.tokens += self.tokens
            stats.seconds += now - self.asked_at
        elif outcome == "given back":
            stats.given_back += 1
        elif outcome == "failed":
            stats.failed += 1
        if not self.done.done():
            self.done.set_result(outcome == "done")


@dataclass(frozen=True, slots=True)
class Candidate:
    """A request under way on a decode node, for `relief`. `moved_at`: monotonic seconds."""

    request_id: str
    boot_id: str
    num_tokens: int
    decoding: bool
    moved_at: float | None = None


class Movable(Protocol):
    """What a migrator needs of router.request.dispatch.Dispatcher."""

    def candidates(self) -> Sequence[Candidate]: ...

    def migrate(self, request_id: str) -> Coroutine[Any, Any, bool]: ...


@dataclass(frozen=True, slots=True)
class MigratorParts:
    """`snapshots` and `changed` are the registry's; `rebalance`: also relieve full nodes."""

    requests: Movable
    snapshots: Callable[[], Sequence[NodeSnapshot]]
    changed: Callable[[], asyncio.Event]
    timing: Timing
    now: Callable[[], float]
    rebalance: bool = False


class Migrator:
    def __init__(self, parts: MigratorParts) -> None:
        self._parts = parts
        self._moving: dict[str, tuple[str, asyncio.Task[bool]]] = {}  # request -> (boot, task)

    async def run(self) -> None:
        """Rounds until cancelled."""
        try:
            while True:
                changed = self._parts.changed()
                self.round()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._parts.timing.heartbeat_s):
                        await changed.wait()
        finally:
            for _, task in self._moving.values():
                task.cancel()

    def round(self) -> None:
        """Begin the moves that are due, and do not wait for them."""
        nodes = [node for node in self._parts.snapshots() if node.role is Role.DECODE]
        candidates = self._parts.requests.candidates()
        draining = {node.boot_id for node in nodes if node.load.draining}
        for candidate in candidates:
            if candidate.boot_id in draining and has_partner(candidate.boot_id, nodes):
                self._begin(candidate)
        if self._parts.rebalance:
            for candidate in relief(nodes, candidates, self._parts.now()):
                if not self._leaving(candidate.boot_id):
                    self._begin(candidate)

    def _leaving(self, boot_id: str) -> int:
        return sum(boot == boot_id for boot, _ in self._moving.values())

    def _begin(self, candidate: Candidate) -> None:
        request_id, boot_id = candidate.request_id, candidate.boot_id
        if request_id in self._moving or self._leaving(boot_id) >= MAX_MOVING:
            return
        task = asyncio.create_task(
            self._parts.requests.migrate(request_id), name=f"migration {request_id}"
        )
        self._moving[request_id] = (boot_id, task)
        task.add_done_callback(lambda _: self._ended(request_id))

    def _ended(self, request_id: str) -> None:
        """A move is over, so the next request may leave a draining node at once."""
        _, task = self._moving.pop(request_id)
        if task.cancelled():
            return
        if task.exception() is not None:
            logger.error("a migration failed", exc_info=task.exception())
        elif task.result():
            self.round()


def has_partner(boot_id: str, nodes: Sequence[NodeSnapshot]) -> bool:
    """Whether another decode node may take over what runs on `boot_id`."""
    source = next((node for node in nodes if node.boot_id == boot_id), None)
    return source is not None and any(_may_take(node, source) for node in nodes)


def relief(
    nodes: Sequence[NodeSnapshot], candidates: Sequence[Candidate], now: float
) -> list[Candidate]:
    """At most one request per full node that another node has plenty of room for.

    A node is full if it has swapped requests out and next to no free blocks. The largest request
    that fits moves: it makes the most room. A request that has moved lately stays, so that none
    goes to and fro.
    """
    chosen: list[Candidate] = []
    for source in filter(_needs_relief, nodes):
        free = [node for node in nodes if _may_take(node, source) and not node.load.swapped]
        room = max(map(_room, free), default=0)
        own = [each for each in candidates if each.boot_id == source.boot_id]
        fitting = [each for each in own if each.num_tokens < room and _may_move(each, now)]
        if fitting:
            chosen.append(max(fitting, key=lambda each: each.num_tokens))
    return chosen


def _needs_relief(node: NodeSnapshot) -> bool:
    load = node.load
    full = load.swapped > 0 and load.free_blocks <= FULL * load.total_blocks
    return full and not load.draining


def _may_move(candidate: Candidate, now: float) -> bool:
    moved_at = candidate.moved_at
    return candidate.decoding and (moved_at is None or now - moved_at >= REST_S)


def _may_take(node: NodeSnapshot, source: NodeSnapshot) -> bool:
    return (
        node.role is Role.DECODE
        and node.boot_id != source.boot_id
        and node.fingerprint == source.fingerprint
        and node.model_digest == source.model_digest
        and node.takes_requests
    )


def _room(node: NodeSnapshot) -> int:
    """Tokens that `node` can take and keep ROOM of its blocks free."""
    load = node.load
    return int(load.free_blocks - ROOM * load.total_blocks) * node.block_size
