"""StateFeed: one producer of states for all consoles that watch this router.

The life: made -> run() as a task. It reads the counters: once a second while somebody watches, less
often otherwise. While somebody watches it also makes the state, and sends each watcher the one
delta that it has encoded. The state is made
in parts, with a turn of the event loop between them. A watcher that does not read is dropped; it
may ask again and begins with a whole snapshot.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Final

from baton import __version__
from baton.protocol.errors import Overloaded
from router.api.served import model_names
from router.console.deltas import MOST_EVENTS, after, delta_of, frame
from router.console.rates import LoadRates
from router.console.snapshot import (
    TokenRates,
    flow_cards,
    loads_of,
    node_card,
    request_cards,
    store_facts,
)
from router.console.views import ConsoleSnapshot, NodeCard, RouterFacts
from router.nodes.registry import NodeStatus
from router.request.timeline import TimelineRing
from router.services import RouterServices

INTERVAL_S: Final = 1.0
REST_S: Final = 4.0  # added while nobody watches; the rates of the last 30 s need no more samples
PART_NODES: Final = 100  # made in one turn of the event loop
MOST_WATCHERS: Final = 32
UNREAD: Final = 8  # deltas; a watcher that has more is dropped


@dataclass(slots=True, eq=False)
class ConsoleWatcher:
    """One console's queue of frames. None ends it."""

    frames: asyncio.Queue[bytes | None] = field(default_factory=lambda: asyncio.Queue(UNREAD + 1))

    def offer(self, data: bytes) -> bool:
        """Queue a frame; return False, and end the queue, if too many are unread."""
        if self.frames.qsize() < UNREAD:
            self.frames.put_nowait(data)
            return True
        while not self.frames.empty():
            self.frames.get_nowait()
        self.frames.put_nowait(None)
        return False


class StateFeed:
    """The state of one router for its consoles."""

    def __init__(self, services: RouterServices) -> None:
        self._services = services
        self._began = services.clock.monotonic()
        self._rates = LoadRates(services.metrics, services.dispatcher)
        self._tokens = TokenRates()
        self._ring = TimelineRing(0) if services.timelines is None else services.timelines
        self._needs_key = bool(len(services.config.key_ring()))
        self._watchers: set[ConsoleWatcher] = set()
        self._told: ConsoleSnapshot | None = None  # what all watchers have; None: nobody watches
        self._turn = asyncio.Lock()  # a watcher joins between two deltas
        self._joined = asyncio.Event()  # set while somebody watches
        self._seq = 0

    @property
    def num_watchers(self) -> int:
        return len(self._watchers)

    async def run(self) -> None:
        """Produce a delta each second while somebody watches, until cancelled."""
        while True:
            await asyncio.sleep(INTERVAL_S)
            await self.tick()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(REST_S):
                    await self._joined.wait()

    async def tick(self) -> None:
        """Read the counters, and tell all watchers what has changed."""
        self._rates.sample(self._services.clock.monotonic())
        if not self._watchers:
            self._told = None
            self._joined.clear()
            return
        async with self._turn:
            if self._told is None:
                return
            self._seq += 1
            now = await self.snapshot()
            delta = delta_of(self._told, now)
            await asyncio.sleep(0)
            self._told = after(self._told, delta)
            data = frame(delta)
            self._watchers = {each for each in self._watchers if each.offer(data)}

    async def watch(self) -> AsyncGenerator[bytes, None]:
        """Yield a snapshot, then deltas; it ends if they are not taken. Raises Overloaded if too
        many watch."""
        if len(self._watchers) >= MOST_WATCHERS:
            raise Overloaded(f"{MOST_WATCHERS} consoles watch this router already")
        watcher = ConsoleWatcher()
        try:
            async with self._turn:
                if self._told is None:
                    self._told = await self.snapshot()
                watcher.offer(frame(self._told))
                self._watchers.add(watcher)
                self._joined.set()
            while (data := await watcher.frames.get()) is not None:
                yield data
        finally:
            self._watchers.discard(watcher)

    async def snapshot(self) -> ConsoleSnapshot:
        """Return the state now."""
        services, now = self._services, self._services.clock.monotonic()
        statuses = services.registry.statuses()
        self._tokens.look(loads_of(statuses), now)
        nodes = await self._nodes(statuses)
        flows = flow_cards(services.registry.flows())
        await asyncio.sleep(0)
        totals = self._rates.totals(now)
        requests = request_cards(services.dispatcher, self._ring, now)
        await asyncio.sleep(0)
        return ConsoleSnapshot(
            seq=self._seq,
            at=round(time.time(), 3),
            router=self._router(now),
            totals=totals,
            store=store_facts(services.store),
            nodes=nodes,
            flows=flows,
            requests=requests,
            events=services.events.newest(MOST_EVENTS),
        )

    async def _nodes(self, statuses: Sequence[NodeStatus]) -> list[NodeCard]:
        cards: dict[str, NodeCard] = {}
        for start in range(0, len(statuses), PART_NODES):
            for status in statuses[start : start + PART_NODES]:
                card = node_card(status, self._tokens)
                # A node that came back elsewhere: its old address is still known for a while.
                if card.id not in cards or card.state not in ("lost", "refused"):
                    cards[card.id] = card
            await asyncio.sleep(0)
        return list(cards.values())

    def _router(self, now: float) -> RouterFacts:
        services = self._services
        return RouterFacts(
            id=services.config.router_id or "",
            version=__version__,
            models=tuple(model_names(services)),
            uptime_s=round(now - self._began),
            draining=services.lifecycle.draining,
            demo=services.config.break_socket is not None,
            needs_api_key=self._needs_key,
        )
