"""Backlog: what of a resumable request is in its log, and what still waits for the store.

A plain request goes on when the store is away, and is logged later (router/catch_up.py). A
resumable one shows nothing that is not appended: its tokens wait here, in order, and are appended
when the store is back, if its lease has held so long. Filled by TokenLog, emptied by StoreGuard's
heartbeat (`write_missed`). Event loop only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Protocol

from baton.request import RequestState
from router.replay import Told
from router.store import NO_FIELDS, LogEntry, Move, RequestStore, WriteStatus


class Backlog:
    """`fields`: what its record says at the claim. `told`: what its readers may see.

    `opened`: the store has the record, and it is ours. `lost`: somebody else has it now. `settled`:
    its terminal state is recorded.
    """

    def __init__(self, told: Told, fields: Mapping[str, str] = NO_FIELDS) -> None:
        self.told = told
        self.fields = fields
        self.pending: list[LogEntry] = []
        self.opened = asyncio.Event()
        self.lost = False
        self.settled = False
        self._news = asyncio.Event()

    def keep(self, entry: LogEntry) -> None:
        """It could not be appended now."""
        self.pending.append(entry)

    def confirm(self, entries: Iterable[LogEntry]) -> None:
        """They are in the log."""
        self.told.add(entries)

    def lose(self) -> None:
        """The request is somebody else's. Twice is safe."""
        self.lost = True
        self.pending.clear()
        self.told.cut()
        self.tell()

    def settle(self) -> None:
        self.settled = True
        self.tell()

    def tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    async def until_written(self, *, settled: bool) -> bool:
        """Until nothing is pending (and, if asked, the end is recorded). False: it was lost."""
        while not self.lost and (self.pending or (settled and not self.settled)):
            await self._news.wait()
        return not self.lost


class Lagging(Protocol):
    """What catching up needs of a ledger (router/ledger.py)."""

    request_id: str
    state: RequestState
    epoch: int
    behind: bool
    backlog: Backlog | None


async def write_missed(ledger: Lagging, store: RequestStore) -> None:
    """Write what the store missed of a resumable request. Raises StoreUnavailable.

    Mutates the ledger; a fence makes its backlog `lost`.
    """
    backlog = ledger.backlog
    assert backlog is not None, "plain requests go on unlogged"
    while (ledger.behind or backlog.pending) and not backlog.lost:
        if ledger.behind and not ledger.state.terminal:
            # A move to QUEUED is told with the epoch before: it makes the next one.
            queued = ledger.state is RequestState.QUEUED
            move = Move(ledger.request_id, ledger.epoch - queued, ledger.state, catch_up=True)
            if await store.move(move) is not WriteStatus.OK:
                backlog.lose()
                return
        ledger.behind = False
        await append_pending(ledger, store)


async def append_pending(ledger: Lagging, store: RequestStore) -> None:
    """Append what waits, under the epoch of now. Raises StoreUnavailable, and then all waits on."""
    backlog = ledger.backlog
    assert backlog is not None, "plain requests keep nothing"
    taken = sorted(backlog.pending, key=lambda entry: (entry.sample, entry.position))
    if not taken:
        return
    entries = [replace(entry, epoch=ledger.epoch) for entry in taken]
    statuses = await store.append(entries)
    if any(status is not WriteStatus.OK for status in statuses):
        backlog.lose()
        return
    # What came meanwhile stays.
    backlog.pending = [entry for entry in backlog.pending if entry not in taken]
    backlog.confirm(entries)
    backlog.tell()
