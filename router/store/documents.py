"""Documents: opaque bytes that clients may ask for again by name (requests are stored elsewhere).

Each document belongs to an owner and is kept for a time. An owner has room for a number of bytes;
its oldest documents are deleted to make room for a new one. MemoryDocuments is here, for tests and
for machines without Redis. router/store/redis_documents.py passes the same contract tests.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Protocol

from baton.protocol.clock import Clock


@dataclass(frozen=True, slots=True)
class Keeping:
    """For how long a document is kept, and how many bytes each owner may have."""

    ttl_s: float
    max_bytes: int


class Documents(Protocol):
    """All methods raise StoreUnavailable."""

    async def put(
        self, owner: str, name: str, content: bytes, keeping: Keeping, replace: bool = False
    ) -> bool:
        """Keep a document from now on, in place of one with the same name.

        Returns False, and keeps nothing, if the document is larger than an owner's room, or if
        `replace` is set and there is no document with this name.
        """
        ...

    async def get(self, owner: str, name: str) -> bytes | None: ...

    async def drop(self, owner: str, name: str) -> bool:
        """Delete a document; return False if there was none."""
        ...


Owned = OrderedDict[str, bytes]


@dataclass(slots=True)
class DocumentTable:
    """All documents. `owners`: each owner's documents in the order of arrival. `sizes`: bytes of
    each owner. `ends`: until when each document is kept, in the order of arrival."""

    owners: dict[str, Owned] = field(default_factory=dict[str, Owned])
    sizes: dict[str, int] = field(default_factory=dict[str, int])
    ends: OrderedDict[tuple[str, str], float] = field(
        default_factory=OrderedDict[tuple[str, str], float]
    )

    def add(self, owner: str, name: str, content: bytes, end: float) -> None:
        """Add a document whose name the owner does not use."""
        self.owners.setdefault(owner, Owned())[name] = content
        self.sizes[owner] = self.sizes.get(owner, 0) + len(content)
        self.ends[owner, name] = end

    def remove(self, owner: str, name: str) -> bool:
        """Remove a document; return False if there was none."""
        if self.ends.pop((owner, name), None) is None:
            return False
        self.sizes[owner] -= len(self.owners[owner].pop(name))
        if not self.owners[owner]:
            del self.owners[owner], self.sizes[owner]
        return True

    def find(self, owner: str, name: str, now: float) -> bytes | None:
        """Return a document; None if there is none or its time is over.

        Also removes the oldest documents whose time is over.
        """
        if self.ends.get((owner, name), now) <= now:
            self.remove(owner, name)
        while self.ends:
            first, end = next(iter(self.ends.items()))
            if end > now:
                break
            self.remove(*first)
        return self.owners.get(owner, {}).get(name)


class MemoryDocuments:
    """Documents in this process. Several may share one table (several routers in one test)."""

    def __init__(self, table: DocumentTable, clock: Clock) -> None:
        self._table = table
        self._clock = clock

    async def put(
        self, owner: str, name: str, content: bytes, keeping: Keeping, replace: bool = False
    ) -> bool:
        table, now = self._table, self._clock.monotonic()
        there = table.find(owner, name, now) is not None
        if len(content) > keeping.max_bytes or (replace and not there):
            return False
        table.remove(owner, name)
        while table.sizes.get(owner, 0) + len(content) > keeping.max_bytes:
            table.remove(owner, next(iter(table.owners[owner])))
        table.add(owner, name, content, now + keeping.ttl_s)
        return True

    async def get(self, owner: str, name: str) -> bytes | None:
        return self._table.find(owner, name, self._clock.monotonic())

    async def drop(self, owner: str, name: str) -> bool:
        self._table.find(owner, name, self._clock.monotonic())
        return self._table.remove(owner, name)
