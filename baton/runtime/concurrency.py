"""Work of one event loop side by side: all of it at once, or once for equal digests."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar
from weakref import WeakValueDictionary

T = TypeVar("T")


async def together(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Run all coroutines and return their results in order.

    The first failure cancels the others and is raised itself, not in an exception group.
    """
    if len(work) == 1:
        return [await work[0]]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one) for one in work]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from failures
    return [task.result() for task in tasks]


class DigestLocks:
    """A lock for each digest that somebody works on, so that equal work is done once. It lives as
    long as somebody holds it or waits for it.
    """

    def __init__(self) -> None:
        self._locks: WeakValueDictionary[bytes, asyncio.Lock] = WeakValueDictionary()

    def of(self, digest: bytes) -> asyncio.Lock:
        """Return the lock of a digest, for `async with`."""
        lock = self._locks.get(digest)
        if lock is None:
            lock = self._locks[digest] = asyncio.Lock()
        return lock
