"""TokenLog: tokens are appended to the log before a client sees them. One call per step of a node.

A session hands over the token events of one step before any of them is delivered; so what has been
shown is in the log. Appends are idempotent by (sample, position) and fenced by the request's epoch.
"""

from __future__ import annotations

from collections.abc import Iterable

from baton.protocol.events import TokenEvent
from router.store.base import LogEntry, WriteStatus
from router.store.ledger import RequestLedger, StoreGuard


class TokenLog:
    def __init__(self, guard: StoreGuard) -> None:
        self._guard = guard

    async def append(self, events: Iterable[TokenEvent]) -> None:
        """Log the tokens of `events`. Never raises: a request that cannot be logged goes on
        unlogged."""
        entries: list[LogEntry] = []
        logged: list[tuple[RequestLedger, TokenEvent]] = []
        for event in events:
            ledger = self._guard.ledgers.get(event.request_id)
            entry = None if ledger is None else ledger.entry(event)
            if ledger is not None and entry is not None:
                entries.append(entry)
                logged.append((ledger, event))
        if not entries:
            return
        try:
            statuses = await self._guard.call(lambda store: store.append(entries))
        finally:
            for ledger, event in logged:
                ledger.append_over(event)
        answers = [None] * len(entries) if statuses is None else statuses
        for (ledger, _), entry, status in zip(logged, entries, answers, strict=True):
            if status is not WriteStatus.OK:
                self._missed(ledger, entry, status)
            elif ledger.log is not None:
                ledger.log.confirm([entry])

    def _missed(self, ledger: RequestLedger, entry: LogEntry, status: WriteStatus | None) -> None:
        """The log did not take `entry`: it is owed, if the store has not refused it."""
        unclaimed = status is WriteStatus.GONE and not ledger.recorded
        if status is WriteStatus.GAP or unclaimed:
            status = None  # what is missing failed just now: both are written after a heartbeat
        ledger.took(status)
        if status is None:
            self._guard.owe([entry])
