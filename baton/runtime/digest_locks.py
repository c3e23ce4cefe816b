"""DigestLocks: one lock for each digest that somebody works on, so that equal work is done once."""

from __future__ import annotations

import asyncio
from weakref import WeakValueDictionary


class DigestLocks:
    """Locks of one event loop. A lock lives as long as somebody holds it or waits for it."""

    def __init__(self) -> None:
        self._locks: WeakValueDictionary[bytes, asyncio.Lock] = WeakValueDictionary()

    def of(self, digest: bytes) -> asyncio.Lock:
        """Return the lock of a digest, for `async with`."""
        lock = self._locks.get(digest)
        if lock is None:
            lock = self._locks[digest] = asyncio.Lock()
        return lock
