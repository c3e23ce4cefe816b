"""TokenLog: what a client is shown was appended first. One call per step of a node.

A session hands over the token events of one step before any of them is delivered; so what has been
shown is in the log. Appends are idempotent by (sample, position) and fenced by the request's epoch.
"""

from __future__ import annotations

from collections.abc import Iterable

from baton.events import TokenEvent
from router.ledger import RequestLedger, StoreGuard
from router.store import LogEntry


class TokenLog:
    def __init__(self, guard: StoreGuard) -> None:
        self._guard = guard

    async def append(self, events: Iterable[TokenEvent]) -> None:
        """Log the tokens of `events`. Never raises: who cannot be logged goes on unlogged."""
        entries: list[LogEntry] = []
        ledgers: list[RequestLedger] = []
        logged: list[TokenEvent] = []
        for event in events:
            ledger = self._guard.ledger(event.request_id)
            if not event.token_ids or ledger is None or ledger.refused:
                continue
            # The ledger's epoch: a prefill that outlived a failover still says the old one.
            entry = LogEntry(
                event.request_id, ledger.epoch, event.position, event.token_ids, event.sample
            )
            if ledger.owes:
                self._guard.owe((entry,))
                continue
            entries.append(entry)
            ledgers.append(ledger)
            ledger.appends(event)
            logged.append(event)
        if not entries:
            return
        try:
            statuses = await self._guard.append(entries)
        finally:
            for ledger, event in zip(ledgers, logged, strict=True):
                ledger.append_over(event)
        for index, ledger in enumerate(ledgers):
            ledger.took(None if statuses is None else statuses[index])
        if statuses is None:
            self._guard.owe(entries)
