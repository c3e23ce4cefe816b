"""Mailbox: an asyncio.Queue for one reader and one loop, unbounded, at a third of its costs."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Mailbox(Generic[T]):
    """`waiting`: what has been put and not been taken, in order; its reader may take from it."""

    __slots__ = ("_reader", "waiting")

    def __init__(self) -> None:
        self.waiting: deque[T] = deque()
        self._reader: asyncio.Future[None] | None = None

    def put(self, item: T) -> None:
        self.waiting.append(item)
        reader, self._reader = self._reader, None
        if reader is not None and not reader.done():
            reader.set_result(None)

    async def get(self) -> T:
        while not self.waiting:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        return self.waiting.popleft()
