"""Adoption: this router goes on with resumable requests whose router is gone.

After each heartbeat this router claims the requests that its sweep made ownerless; only one router
can claim a request. Then it rebuilds the request from its canonical form and its log, and runs it
on (runs.py). If it cannot serve the request, it gives it up, and the request is swept again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from baton.protocol.request import RequestState
from router.resumable.canonical import canonical_of
from router.resumable.runs import Runs
from router.store.base import Swept
from router.store.guard import StoreGuard

logger = logging.getLogger(__name__)


class Adopter:
    """Adopts swept requests. `can_serve`: whether this router has nodes and is not stopping."""

    def __init__(self, runs: Runs, store: StoreGuard, can_serve: Callable[[], bool]) -> None:
        self._runs = runs
        self._store = store
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopped = False
        # A router that cannot serve does not sweep: a sweep gives a new lease, so other routers
        # would have to wait for its end.
        store.sweeps = lambda: not self._stopped and can_serve()
        store.watchers.append(self.after_heartbeat)

    def after_heartbeat(self, swept: Sequence[Swept]) -> None:
        orphans = [each for each in swept if each.state is RequestState.QUEUED]
        for each in orphans:
            task = asyncio.create_task(self._adopt(each.request_id), name="adopt")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    @property
    def adopted(self) -> int:
        """How many requests this router has adopted."""
        return self._runs.stats.adopted

    async def stop(self) -> None:
        """Stop sweeping, and cancel the adoptions under way. May be called twice."""
        self._stopped = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _adopt(self, request_id: str) -> None:
        record = await self._store.call(lambda store: store.claim(request_id))
        if record is None:
            return  # another router was first
        canonical = canonical_of(record, self._runs.clock)
        if canonical is None:
            logger.warning("request %s: its record is of another version", request_id)
            await self._store.release([request_id])
        else:
            await self._runs.adopt(record, canonical)
