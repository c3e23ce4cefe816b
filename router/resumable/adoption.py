"""Adoption: requests whose router is gone go on here.

After each heartbeat: what this router's sweep made ownerless is claimed (so one router has it,
however many swept), rebuilt from its canonical form and its log, and run on (runs.py). One
that this router cannot serve now is left alone: its next lease runs out too, and it is swept again.
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
    """`can_serve`: does this router have nodes, and stay?"""

    def __init__(self, runs: Runs, store: StoreGuard, can_serve: Callable[[], bool]) -> None:
        self._runs = runs
        self._store = store
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopped = False
        # What nobody here could adopt is left to routers that can: a sweep gives it a new lease.
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
        """How many went on here."""
        return self._runs.stats.adopted

    async def stop(self) -> None:
        """Sweep no more; returns when nothing is under way. Twice is safe."""
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
