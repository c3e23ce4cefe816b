"""Clients that ask again and again, for tests that restart what they ask.

The life: start() with a coroutine per client, raise_failures() now and then, stop().
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable

from tests.waiting import WAIT_S


class Asking:
    """Tasks that go on while not `stopping`; the first failure of one is the test's."""

    def __init__(self) -> None:
        self.stopping = False
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, clients: Iterable[Coroutine[None, None, None]]) -> None:
        self._tasks = [asyncio.create_task(client) for client in clients]

    def raise_failures(self) -> None:
        for task in self._tasks:
            if task.done():
                task.result()

    async def stop(self) -> None:
        """Every client ends what it has begun."""
        self.stopping = True
        async with asyncio.timeout(WAIT_S):
            await asyncio.gather(*self._tasks)
