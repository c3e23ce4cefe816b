"""Migration: running requests move to another decode node with their KV, when theirs drains or is
full.

Here: which requests move, how many at once, and the counts of moves. How one request moves is in
router/request/dispatch.py. The migrator makes a round at each heartbeat, and whenever a node begins
to drain, comes or goes. The life: Migrator(parts) -> run() as a task, until cancelled.
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
ROOM: Final = 0.25  # share of its blocks that a node keeps free when it takes a request over
REST_S: Final = 10.0  # a request that was moved to make room stays for so long
# How a move ends. "given back": without KV, so the prompt is computed again. "over": the request
# ended before the move did.
Outcome = Literal["done", "given back", "failed", "over"]


@dataclass(slots=True)
class MigrationStats:
    """Counters since the router's start; written by journeys."""

    done: int = 0
    given_back: int = 0  # there was no KV worth moving
    failed: int = 0  # the node or the KV was lost on the way: prefilled again
    tokens: int = 0  # tokens whose KV moved
    seconds: float = 0.0  # from asking the node to the new node's first event, sum of those done


@dataclass(slots=True)
class MigrationMove:
    """One request's move away from the node `source` (boot id). `done`: whether it succeeded."""

    source: str
    asked_at: float
    tokens: int = 0  # exported tokens; 0 until the node has let go of the request
    done: asyncio.Future[bool] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    def end(self, outcome: Outcome, stats: MigrationStats, now: float) -> None:
        """End the move: count it, and wake whoever waits for `done`."""
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
    """A request that a decode node has now, and that may move.

    `decoding`: the node has sent tokens of it. `moved_at`: when it last moved, in monotonic
    seconds; None if it never did.
    """

    request_id: str
    boot_id: str
    num_tokens: int
    decoding: bool
    moved_at: float | None = None


class Movable(Protocol):
    """What a migrator needs of router.request.dispatcher.Dispatcher."""

    def candidates(self) -> Sequence[Candidate]: ...

    def migrate(self, request_id: str) -> Coroutine[Any, Any, bool]: ...


@dataclass(frozen=True, slots=True)
class MigratorParts:
    """What a migrator works with. `snapshots` and `changed`: the registry's. `rebalance`: move
    requests also away from full nodes, not only from draining ones."""

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
        """Make rounds until cancelled."""
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
        """Begin the moves that are due, without waiting for their ends."""
        candidates = self._parts.requests.candidates()
        if not candidates:
            return
        nodes = [node for node in self._parts.snapshots() if node.role is Role.DECODE]
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
        """Note the end of a request's move; after a success begin the next moves at once."""
        _, task = self._moving.pop(request_id)
        if task.cancelled():
            return
        if task.exception() is not None:
            logger.error("a migration failed", exc_info=task.exception())
        elif task.result():
            self.round()


def has_partner(boot_id: str, nodes: Sequence[NodeSnapshot]) -> bool:
    """Whether another decode node may take over the requests that run on `boot_id`."""
    source = next((node for node in nodes if node.boot_id == boot_id), None)
    return source is not None and any(_may_take(node, source) for node in nodes)


def relief(
    nodes: Sequence[NodeSnapshot], candidates: Sequence[Candidate], now: float
) -> list[Candidate]:
    """Choose the requests that leave full nodes now: at most one of each full node.

    A node is full if it has swapped requests out and has at most the share FULL of its blocks free.
    Of the requests that fit on another node the largest moves, because it makes the most room. A
    request that has moved within REST_S stays, so that none moves to and fro.
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
        and node.model == source.model
        and node.model_digest == source.model_digest
        and node.takes_requests
    )


def _room(node: NodeSnapshot) -> int:
    """Return how many tokens `node` can take and still keep the share ROOM of its blocks free."""
    load = node.load
    return int(load.free_blocks - ROOM * load.total_blocks) * node.block_size
