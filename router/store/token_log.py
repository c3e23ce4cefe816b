"""TokenLog: tokens are appended to the log before a client sees them. One call per step of a node.

A session hands over the token events of one step before any of them is delivered; so what has been
shown is in the log. Appends are idempotent by (sample, position) and fenced by the request's epoch.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from baton.protocol.events import TokenEvent
from router.store.base import LogEntry, WriteStatus
from router.store.ledger import RequestLedger, StoreGuard
from router.store.log_details import entry_of


class TokenLog:
    def __init__(self, guard: StoreGuard) -> None:
        self._guard = guard

    async def append(self, events: Iterable[TokenEvent]) -> None:
        """Log the tokens of `events`. Never raises: a request that cannot be logged goes on
        unlogged."""
        entries: list[LogEntry] = []
        logged: list[tuple[RequestLedger, TokenEvent]] = []
        for event in events:
            ledger = self._guard.ledger(event.request_id)
            entry = None if ledger is None else self._entry(ledger, event)
            if ledger is None or entry is None:
                continue
            entries.append(entry)
            ledger.appends(event)
            logged.append((ledger, event))
        if not entries:
            return
        try:
            statuses = await self._guard.append(entries)
        finally:
            for ledger, event in logged:
                ledger.append_over(event)
        for index, (ledger, _) in enumerate(logged):
            entry, status = entries[index], None if statuses is None else statuses[index]
            unclaimed = status is WriteStatus.GONE and not ledger.recorded
            if status is WriteStatus.GAP or unclaimed:
                status = None  # what is missing failed just now: both are written after a heartbeat
            ledger.took(status)
            if status is WriteStatus.OK:
                ledger.logged([entry])
            elif status is None:
                self._guard.owe([entry])

    def _entry(self, ledger: RequestLedger, event: TokenEvent) -> LogEntry | None:
        """What to append for an event now; None: nothing, or it waits for the store."""
        if ledger.refused:
            return None
        # The ledger's epoch: a prefill that outlived a failover still reports the old one.
        if ledger.log is not None:
            entry = entry_of(event, ledger.epoch, int(time.time()))
        elif event.token_ids:
            entry = LogEntry(
                event.request_id, ledger.epoch, event.position, event.token_ids, event.sample
            )
        else:
            return None
        if ledger.owes or ledger.owed.cut:
            self._guard.owe([entry])
            return None
        return entry
