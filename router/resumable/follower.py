"""Follower: copies the log of a request that runs on another router, or has ended, into a Told.

Each reader has its own follower for as long as it reads. The follower marks the request as read in
the store, so the request's router does not cancel it as unread.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from baton.protocol.errors import BatonError, Cancelled, StoreUnavailable, error_from_code
from baton.protocol.request import RequestState
from router.resumable.replay import Told
from router.store.base import LogEntry, RequestRecord, RequestStore
from router.store.guard import StoreGuard

T = TypeVar("T")
WAIT_S: Final = 0.5  # how long to wait for a log entry before reading the record


class Follower:
    def __init__(self, guard: StoreGuard, record: RequestRecord, told: Told) -> None:
        self._guard = guard
        self._record = record
        self._told = told
        self._cursor = ""

    async def run(self) -> None:
        """Follow the request to its end. When the store is away, readers get StreamCut."""
        try:
            while not await self._ended():
                pass
        except StoreUnavailable:
            self._told.cut()

    async def _ended(self) -> bool:
        """Read new entries, or else the record; return True when the request is over."""
        told, record = self._told, self._record
        over = record.state.terminal
        if not over:
            await self._call(lambda store: store.follow(record.id))
        if await self._read(0 if over else WAIT_S) and not over:
            return self._close_if_all_ended()
        if over:
            told.close(_failure(record))
            return True
        found = await self._call(lambda store: store.read(record.id))
        if found is None:
            told.cut()
            return True
        self._record = found
        return self._close_if_all_ended()

    def _close_if_all_ended(self) -> bool:
        if self._told.all_ended:
            self._told.close()
        return self._told.closed

    async def _read(self, wait_s: float) -> bool:
        """Wait for new entries and add them to the Told; return False if none came in time."""
        entries: list[LogEntry] = []
        entries, self._cursor = await self._call(
            lambda store: store.tail(self._record.id, self._cursor, wait_s)
        )
        self._told.add(entries)
        return bool(entries)

    async def _call(self, work: Callable[[RequestStore], Awaitable[T]]) -> T:
        """Return the store's answer. Raises StoreUnavailable."""
        if self._guard.stats.away:
            raise StoreUnavailable("the store is away")
        return await self._guard.reach(work)


def _failure(record: RequestRecord) -> BatonError | None:
    """Return the error with which a terminal request ended; None if it is FINISHED."""
    if record.state is RequestState.FINISHED:
        return None
    message = record.fields.get("message") or "the request failed"
    if record.state is RequestState.CANCELLED:
        return Cancelled(message)
    return error_from_code(record.fields.get("error", ""), message)
