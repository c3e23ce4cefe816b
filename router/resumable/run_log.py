"""RunLog: what the store has of one resumable request, which shows only logged tokens.

Plain requests have no RunLog, because they also go on when the store misses writes. Missed writes
are written by router/store/catch_up.py; a resumable request waits for that here. Event loop only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping

from baton.protocol.clock import Clock
from router.request.timeline import LogAppends
from router.resumable.replay import Told
from router.store.base import NO_FIELDS, LogEntry
from router.store.catch_up import Owed


class RunLog:
    """The log of one resumable request as its router knows it.

    `fields`: the fields of its record at the claim. `told`: the logged tokens, which readers may
    see. `owed`: the writes that the store has missed; readers may not see their tokens yet.
    `opened`: the store has the record, and this router owns it. `lost`: another router has the
    request now, or will have it. `settled`: its terminal state is recorded. `kept` False: it was
    refused before anything was shown, so there will be no record. `appends`: how long the store
    took to log tokens. `now`: returns the time, in seconds of the router's clock.
    """

    def __init__(self, told: Told, clock: Clock, fields: Mapping[str, str] = NO_FIELDS) -> None:
        self.told = told
        self.appends = LogAppends()
        self.now = clock.monotonic
        self.owed = Owed(dict(fields))
        self.opened = asyncio.Event()
        self.lost = False
        self.settled = False
        self.kept = True
        self._news = asyncio.Event()

    def confirm(self, entries: Iterable[LogEntry]) -> None:
        """Show entries to readers: they are in the log now."""
        self.told.add(entries)
        self._tell()

    def lose(self) -> None:
        """Note that another router has the request now, or will, and cut the readers."""
        self.lost = True
        self.told.cut()
        self._tell()

    def settle(self) -> None:
        self.settled = True
        self._tell()

    def withdraw(self) -> None:
        """Note that the request was refused before anything was shown: no record is kept of it."""
        self.kept = False
        self.settle()

    async def until_written(self, *, settled: bool) -> bool:
        """Wait until the store has all tokens and, if `settled`, the terminal state.

        Returns False if the request was lost.
        """
        while not self.lost and (self.owed.runs or (settled and not self.settled)):
            await self._news.wait()
        return not self.lost

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()
