"""Catching up: what the store did not hear of a request while it was away, told late and in order.

A plain request goes on while the store is away. What it owes is kept here, up to MAX_OWED_TOKENS of
all requests together, and told with a heartbeat that got through (or at the request's end):

    record    claimed late, if the request came in meanwhile
    log       the tokens missed, each under the epoch it was shown in
    state     one catch-up move to where the request is now: the stored epoch becomes its own

New tokens join the backlog until it is empty; from then on the request is written through again.
The fences hold as ever: who was swept by another router meanwhile is refused, and goes on unlogged.
Not here: when the store counts as away (router/ledger.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from baton.request import RequestState
from router.store import LogEntry, Move, RequestStore, WriteStatus

if TYPE_CHECKING:
    from router.ledger import RequestLedger

MAX_OWED_TOKENS: Final = 1 << 20
AT_ONCE: Final = 256  # requests that catch up side by side


@dataclass(slots=True)
class _Run:
    """Tokens of one sample without a gap, all shown under one epoch."""

    epoch: int
    sample: int
    position: int
    tokens: list[int]

    def takes(self, entry: LogEntry) -> bool:
        return (
            (entry.epoch, entry.sample) == (self.epoch, self.sample)
            and entry.position == self.position + len(self.tokens)
        )  # fmt: skip


@dataclass(slots=True)
class Owed:
    """What one request's record lacks. `fields` are those of skipped moves, and of a late claim."""

    fields: dict[str, str] = field(default_factory=dict[str, str])
    runs: list[_Run] = field(default_factory=list[_Run])

    @property
    def num_tokens(self) -> int:
        return sum(len(run.tokens) for run in self.runs)

    def add(self, entry: LogEntry) -> None:
        last = next((run for run in reversed(self.runs) if run.sample == entry.sample), None)
        if last is not None and last.takes(entry):
            last.tokens += entry.token_ids
        else:
            self.runs.append(_Run(entry.epoch, entry.sample, entry.position, list(entry.token_ids)))

    def entries(self, request_id: str) -> list[LogEntry]:
        """By position: an append that failed late may be owed after what came behind it."""
        return [
            LogEntry(request_id, run.epoch, run.position, tuple(run.tokens), run.sample)
            for run in sorted(self.runs, key=lambda run: (run.sample, run.position))
        ]

    def told(self, entries: Sequence[LogEntry]) -> int:
        """These are in the log now; what was added to their runs meanwhile is not. Returns how many
        tokens that were: the end of a request may have told them already."""
        before = self.num_tokens
        ends: dict[tuple[int, int], int] = {}
        for entry in entries:
            key, end = (entry.epoch, entry.sample), entry.position + len(entry.token_ids)
            ends[key] = max(end, ends.get(key, 0))
        for run in self.runs:
            count = max(0, ends.get((run.epoch, run.sample), 0) - run.position)
            del run.tokens[:count]
            run.position += count
        self.runs = [run for run in self.runs if run.tokens]
        return before - self.num_tokens


@dataclass(slots=True)
class CatchUpStats:
    """Counters for metrics and tests."""

    requests: int = 0  # that are written through again, or whose end was told
    tokens: int = 0  # appended late
    dropped: int = 0  # tokens that found no room: that request's log ends before them


class CatchUp:
    """The backlog of one router."""

    def __init__(self, max_tokens: int = MAX_OWED_TOKENS) -> None:
        self._max_tokens = max_tokens
        self._tokens = 0
        self.stats = CatchUpStats()

    def owe(self, ledger: RequestLedger, entry: LogEntry) -> None:
        """`entry` was shown and not logged."""
        if self._tokens + len(entry.token_ids) > self._max_tokens:
            self.stats.dropped += len(entry.token_ids)
            return
        self._tokens += len(entry.token_ids)
        ledger.owed.add(entry)

    def forget(self, ledger: RequestLedger) -> None:
        """Nobody will tell it."""
        self._tokens -= ledger.owed.num_tokens
        ledger.owed.runs.clear()

    async def all(self, store: RequestStore, ledgers: Sequence[RequestLedger]) -> None:
        """Requests that are under way. Raises StoreUnavailable; what was told stays told."""
        for start in range(0, len(ledgers), AT_ONCE):
            some = ledgers[start : start + AT_ONCE]
            ends = await asyncio.gather(
                *(self.one(store, ledger) for ledger in some), return_exceptions=True
            )
            for end in ends:
                if isinstance(end, BaseException):
                    raise end

    async def one(self, store: RequestStore, ledger: RequestLedger) -> None:
        """Until nothing is owed, or the store refuses. Raises StoreUnavailable."""
        while ledger.owes:
            if not await self._tell(store, ledger) or ledger.state.terminal:
                return
            state, epoch = ledger.state, ledger.epoch
            move = catch_up_move(ledger)
            status = WriteStatus.OK if move is None else await store.move(move)
            if status is not WriteStatus.OK:
                self._refused(ledger, status)
            elif not ledger.owed.runs and (state, epoch) == (ledger.state, ledger.epoch):
                ledger.owed.fields.clear()
                ledger.behind = False
                self.stats.requests += 1

    async def end(self, store: RequestStore, ledger: RequestLedger, move: Move) -> None:
        """The last of a request: its backlog, then `move`. Raises StoreUnavailable."""
        await self._tell(store, ledger)
        if ledger.recorded:
            await store.finish(move)
            self.stats.requests += 1
        self.forget(ledger)

    async def _tell(self, store: RequestStore, ledger: RequestLedger) -> bool:
        """Record and log. False: the store refuses."""
        if not ledger.recorded and ledger.owes:
            record = await store.claim(ledger.request_id, ledger.owed.fields)
            if record is None or record.epoch > ledger.epoch:
                self._refused(ledger, WriteStatus.FENCED)
                return False
            ledger.recorded = ledger.behind = True
        while ledger.owes and ledger.owed.runs:
            entries = ledger.owed.entries(ledger.request_id)
            for status in await store.append(entries):
                if status is not WriteStatus.OK:
                    self._refused(ledger, status)
                    return False
            told = ledger.owed.told(entries)
            self._tokens -= told
            self.stats.tokens += told
        return ledger.owes

    def _refused(self, ledger: RequestLedger, status: WriteStatus) -> None:
        ledger.took(status)
        self.forget(ledger)


def catch_up_move(ledger: RequestLedger) -> Move | None:
    """From whatever the store knows to the ledger's state and epoch; None where a late claim says
    it all."""
    epoch = ledger.epoch
    if ledger.state is RequestState.QUEUED:
        if epoch == 1:
            return None
        epoch -= 1  # a move to QUEUED adds one
    return Move(ledger.request_id, epoch, ledger.state, dict(ledger.owed.fields), catch_up=True)
