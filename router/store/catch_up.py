"""Catching up: the store gets, late and in order, the writes that it missed while it was away.

Each request keeps the writes that the store has missed (`Owed`), up to MAX_OWED_TOKENS of all
requests together. They are written after a heartbeat that got through, or at the request's end:

    record    claimed late, if a plain request came in while the store was away
    log       the missed tokens, under the request's present epoch
    state     one catch-up move to the request's present state, or to its end

New tokens join the backlog until it is empty; from then on tokens are written at once again. If
another router has swept the request meanwhile, the fences refuse these writes. Then a plain request
goes on without a log; a resumable one is lost to this router (router/resumable/run_log.py). When
the store counts as away is decided in router/store/guard.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from baton.protocol.request import RequestState
from router.store.base import LogEntry, Move, RequestStore, WriteStatus

if TYPE_CHECKING:
    from router.store.ledger import RequestLedger

MAX_OWED_TOKENS: Final = 1 << 20
AT_ONCE: Final = 256  # requests that catch up concurrently


@dataclass(slots=True, eq=False)
class _Run:
    """Neighbouring tokens of one sample. An entry with details (`more`) is a run of its own."""

    sample: int
    position: int
    tokens: list[int]
    more: str

    @property
    def end(self) -> int:
        return self.position + len(self.tokens)

    def takes(self, entry: LogEntry) -> bool:
        return not (self.more or entry.more) and entry.position == self.end


@dataclass(slots=True)
class Owed:
    """The writes that the store has missed of one request.

    `fields`: the fields of skipped moves and of a late claim. `runs`: the missed tokens. `cut`:
    there was no room for further tokens, so the log of the request ends early.
    """

    fields: dict[str, str] = field(default_factory=dict[str, str])
    runs: list[_Run] = field(default_factory=list[_Run])
    cut: bool = False

    @property
    def num_tokens(self) -> int:
        return sum(len(run.tokens) for run in self.runs)

    def add(self, entry: LogEntry) -> None:
        last = next((run for run in reversed(self.runs) if run.sample == entry.sample), None)
        if last is not None and last.takes(entry):
            last.tokens += entry.token_ids
        else:
            run = _Run(entry.sample, entry.position, list(entry.token_ids), entry.more)
            self.runs.append(run)

    def by_position(self) -> list[_Run]:
        """Return the runs by sample and position.

        `runs` may be out of order: an append may fail after later entries have been added.
        """
        return sorted(self.runs, key=lambda run: (run.sample, run.position))

    def logged(self, runs: Sequence[_Run], entries: Sequence[LogEntry]) -> int:
        """Drop the tokens of `runs` that `entries` have brought into the log.

        Tokens that were added to the runs meanwhile stay. Returns how many tokens were dropped; it
        may be fewer than logged, because the request's end may have logged the same tokens before.
        """
        before = self.num_tokens
        for run, entry in zip(runs, entries, strict=True):
            count = max(0, entry.position + len(entry.token_ids) - run.position)
            del run.tokens[:count]
            run.position += count
        taken = set(map(id, runs))
        self.runs = [run for run in self.runs if run.tokens or id(run) not in taken]
        return before - self.num_tokens


@dataclass(slots=True)
class CatchUpStats:
    """Counters for metrics and tests."""

    requests: int = 0  # requests that have caught up, or whose end was written late
    tokens: int = 0  # tokens that were appended late
    dropped: int = 0  # tokens without room in the backlog: the request's log ends before them


class CatchUp:
    """The missed writes of all requests of one router."""

    def __init__(self, max_tokens: int = MAX_OWED_TOKENS) -> None:
        self._max_tokens = max_tokens
        self._tokens = 0
        self.stats = CatchUpStats()

    def owe(self, ledger: RequestLedger, entry: LogEntry) -> None:
        """Add an entry that the store has missed to the request's backlog.

        A plain request shows its tokens anyway; a resumable one shows them once they are logged. If
        the backlog is full, the log of the request ends here, and a resumable request is lost.
        """
        if ledger.owed.cut or self._tokens + len(entry.token_ids) > self._max_tokens:
            self.stats.dropped += len(entry.token_ids)
            ledger.owed.cut = True
            if ledger.log is not None:  # it cannot go on here; a router that sweeps it can
                ledger.took(WriteStatus.FENCED)
            return
        self._tokens += len(entry.token_ids)
        ledger.owed.add(entry)

    def forget(self, ledger: RequestLedger) -> None:
        """Drop a request's missed tokens: they will not be written."""
        self._tokens -= ledger.owed.num_tokens
        ledger.owed.runs.clear()

    async def all(self, store: RequestStore, ledgers: Sequence[RequestLedger]) -> None:
        """Write the missed writes of requests that are under way.

        Raises StoreUnavailable; writes that succeeded before are not repeated.
        """
        for start in range(0, len(ledgers), AT_ONCE):
            some = ledgers[start : start + AT_ONCE]
            ends = await asyncio.gather(
                *(self.one(store, ledger) for ledger in some), return_exceptions=True
            )
            for end in ends:
                if isinstance(end, BaseException):
                    raise end

    async def one(self, store: RequestStore, ledger: RequestLedger) -> None:
        """Write one request's missed writes, until none is left or the store refuses one.

        Raises StoreUnavailable.
        """
        while ledger.owes:
            if not await self._write_backlog(store, ledger) or ledger.state.terminal:
                return
            state, epoch = ledger.state, ledger.epoch
            move = catch_up_move(ledger)
            status = WriteStatus.OK if move is None else await store.move(move)
            if status is not WriteStatus.OK:
                ledger.took(status)
            elif not ledger.owed.runs and (state, epoch) == (ledger.state, ledger.epoch):
                ledger.owed.fields.clear()
                ledger.behind = False
                self.stats.requests += 1

    async def end(self, store: RequestStore, ledger: RequestLedger, move: Move) -> None:
        """Write the backlog of a request that has ended, then its terminal `move`.

        Raises StoreUnavailable.
        """
        await self._write_backlog(store, ledger)
        if ledger.recorded:
            ledger.ended(await store.finish(move))
            self.stats.requests += 1
        self.forget(ledger)

    async def _write_backlog(self, store: RequestStore, ledger: RequestLedger) -> bool:
        """Write a missing record and the missing tokens. Returns False if the store refuses."""
        if not ledger.recorded and ledger.owes:
            record = await store.claim(ledger.request_id, ledger.owed.fields)
            if record is None or record.epoch > ledger.epoch:
                ledger.took(WriteStatus.FENCED)
                return False
            ledger.recorded = ledger.behind = True
        while ledger.owes and ledger.owed.runs:
            runs = ledger.owed.by_position()
            entries = [
                LogEntry(
                    ledger.request_id, ledger.epoch, run.position, tuple(run.tokens), run.sample,
                    run.more,
                )
                for run in runs
            ]  # fmt: skip
            log = ledger.log
            began = 0.0 if log is None else log.now()
            statuses = await store.append(entries, safe=log is not None)
            if log is not None:
                log.appends.add(began, log.now())
            for status in statuses:
                if status is not WriteStatus.OK:
                    ledger.took(status)
                    return False
            appended = ledger.owed.logged(runs, entries)
            self._tokens -= appended
            self.stats.tokens += appended
            if log is not None:
                log.confirm(entries)
        return ledger.owes


def catch_up_move(ledger: RequestLedger) -> Move | None:
    """Return the move from any stored state to the ledger's state and epoch.

    None if the request is QUEUED in epoch 1: then its claim has written that already.
    """
    epoch = ledger.epoch
    if ledger.state is RequestState.QUEUED:
        if epoch == 1:
            return None
        epoch -= 1  # a move to QUEUED adds one
    return Move(ledger.request_id, epoch, ledger.state, dict(ledger.owed.fields), catch_up=True)
