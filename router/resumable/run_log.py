"""RunLog: of a resumable request, which shows nothing that is not in its log: what is there by now.

Plain requests have none: they go on unlogged. What the store has missed of either kind is told by
router/store/catch_up.py; a resumable one waits for that here. Event loop only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping

from router.resumable.replay import Told
from router.store.base import NO_FIELDS, LogEntry
from router.store.catch_up import Owed


class RunLog:
    """`fields`: what its record says at the claim. `told`: what its readers may see. `owed`: what
    they may not see yet.

    `opened`: the store has the record, and it is ours. `lost`: somebody else has it now, or will.
    `settled`: its terminal state is recorded. Not `kept`: it was refused before anything was shown,
    so there will be no record.
    """

    def __init__(self, told: Told, fields: Mapping[str, str] = NO_FIELDS) -> None:
        self.told = told
        self.owed = Owed(dict(fields))
        self.opened = asyncio.Event()
        self.lost = False
        self.settled = False
        self.kept = True
        self._news = asyncio.Event()

    def confirm(self, entries: Iterable[LogEntry]) -> None:
        """They are in the log."""
        self.told.add(entries)
        self._tell()

    def lose(self) -> None:
        """The request is somebody else's. Twice is safe."""
        self.lost = True
        self.told.cut()
        self._tell()

    def settle(self) -> None:
        self.settled = True
        self._tell()

    def withdraw(self) -> None:
        """It was refused: nobody needs to hear of that from the store."""
        self.kept = False
        self.settle()

    async def until_written(self, *, settled: bool) -> bool:
        """Until nothing is owed (and, if asked, the end is recorded). False: it was lost."""
        while not self.lost and (self.owed.runs or (settled and not self.settled)):
            await self._news.wait()
        return not self.lost

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()
