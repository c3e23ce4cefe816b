"""Documents: what clients may ask for again by its name, beside requests: opaque bytes.

Each belongs to an owner and is kept for a time. An owner has room for a number of bytes: the oldest
of its documents give way to a new one. MemoryDocuments is here, for tests and for machines without
Redis; router/store/redis_documents.py gives the same answers, by one contract suite.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Protocol

from baton.protocol.clock import Clock


@dataclass(frozen=True, slots=True)
class Keeping:
    """For how long, and how many bytes for each owner."""

    ttl_s: float
    max_bytes: int


class Documents(Protocol):
    """All methods raise StoreUnavailable."""

    async def put(
        self, owner: str, name: str, content: bytes, keeping: Keeping, replace: bool = False
    ) -> bool:
        """Keep it, from now on; `replace`: only in the place of one that is there.

        False: it is not kept. There is nothing to replace, or it is more than an owner may have.
        """
        ...

    async def get(self, owner: str, name: str) -> bytes | None: ...

    async def drop(self, owner: str, name: str) -> bool:
        """False: there was none."""
        ...


Owned = OrderedDict[str, bytes]


@dataclass(slots=True)
class DocumentTable:
    """All documents: of each owner in the order in which they came, and when each of all ends."""

    owners: dict[str, Owned] = field(default_factory=dict[str, Owned])
    sizes: dict[str, int] = field(default_factory=dict[str, int])
    ends: OrderedDict[tuple[str, str], float] = field(
        default_factory=OrderedDict[tuple[str, str], float]
    )

    def add(self, owner: str, name: str, content: bytes, end: float) -> None:
        """One that is not there."""
        self.owners.setdefault(owner, Owned())[name] = content
        self.sizes[owner] = self.sizes.get(owner, 0) + len(content)
        self.ends[owner, name] = end

    def remove(self, owner: str, name: str) -> bool:
        """False: there was none."""
        if self.ends.pop((owner, name), None) is None:
            return False
        self.sizes[owner] -= len(self.owners[owner].pop(name))
        if not self.owners[owner]:
            del self.owners[owner], self.sizes[owner]
        return True

    def find(self, owner: str, name: str, now: float) -> bytes | None:
        """Forgets it, and those that are older than all others, if their time is over: the oldest
        end first, unless a router with other settings kept them."""
        if self.ends.get((owner, name), now) <= now:
            self.remove(owner, name)
        while self.ends:
            first, end = next(iter(self.ends.items()))
            if end > now:
                break
            self.remove(*first)
        return self.owners.get(owner, {}).get(name)


class MemoryDocuments:
    """Several may share one table (several routers in one test process)."""

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
