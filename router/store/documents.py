"""Documents: what clients may ask for again by its name, beside requests: opaque bytes.

Each belongs to an owner and is kept for a time. An owner has room for a number of bytes: the oldest
of its documents give way to a new one. MemoryDocuments is here, for tests and for machines without
Redis; router/store/redis_documents.py gives the same answers, by one contract suite.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from baton.clock import Clock


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


@dataclass(frozen=True, slots=True)
class _Kept:
    content: bytes
    until: float


@dataclass(slots=True)
class DocumentTable:
    """All documents: of each owner in the order in which they came."""

    owners: dict[str, dict[str, _Kept]] = field(default_factory=dict[str, dict[str, _Kept]])
    sizes: dict[str, int] = field(default_factory=dict[str, int])

    def remove(self, owner: str, name: str) -> bool:
        """False: there was none."""
        kept = self.owners.get(owner, {}).pop(name, None)
        if kept is None:
            return False
        self.sizes[owner] -= len(kept.content)
        if not self.owners[owner]:
            del self.owners[owner], self.sizes[owner]
        return True

    def forget(self, now: float) -> None:
        """Those whose time is over."""
        for owner, kept in list(self.owners.items()):
            for name in [name for name, each in kept.items() if each.until <= now]:
                self.remove(owner, name)


class MemoryDocuments:
    """Several may share one table (several routers in one test process)."""

    def __init__(self, table: DocumentTable, clock: Clock) -> None:
        self._table = table
        self._clock = clock

    async def put(
        self, owner: str, name: str, content: bytes, keeping: Keeping, replace: bool = False
    ) -> bool:
        table, now = self._table, self._clock.monotonic()
        table.forget(now)
        there = name in table.owners.get(owner, {})
        if len(content) > keeping.max_bytes or (replace and not there):
            return False
        table.remove(owner, name)
        while table.sizes.get(owner, 0) + len(content) > keeping.max_bytes:
            table.remove(owner, next(iter(table.owners[owner])))
        table.owners.setdefault(owner, {})[name] = _Kept(content, now + keeping.ttl_s)
        table.sizes[owner] = table.sizes.get(owner, 0) + len(content)
        return True

    async def get(self, owner: str, name: str) -> bytes | None:
        self._table.forget(self._clock.monotonic())
        kept = self._table.owners.get(owner, {}).get(name)
        return None if kept is None else kept.content

    async def drop(self, owner: str, name: str) -> bool:
        self._table.forget(self._clock.monotonic())
        return self._table.remove(owner, name)
