"""StoreGuard: the store as the router uses it, also while it is away.

A plain request goes on when the store does not answer: the call is skipped, counted, and nothing is
tried again until a heartbeat got through (so an outage costs each request at most one timeout). A
request that missed a write is `behind`: what it owes is written when the store is back
(router/store/catch_up.py), ended ones included. Tokens are appended to the log before a client sees
them, idempotent by (sample, position). The life: start() -> run() as a task -> stop().
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, TypeVar

from baton.protocol.errors import StoreUnavailable, Unavailable
from baton.protocol.events import TokenEvent
from baton.protocol.request import Request, RequestState
from baton.runtime.timing import Timing
from router.store.base import (
    LogEntry,
    Move,
    RequestRecord,
    RequestStore,
    Swept,
    WriteStatus,
)
from router.store.catch_up import CatchUp
from router.store.ledger import IdInUse, RequestLedger

if TYPE_CHECKING:
    from router.resumable.run_log import RunLog

T = TypeVar("T")
logger = logging.getLogger(__name__)
MAX_UNSETTLED: Final = (
    10_000  # terminal states kept for the store's return; older ones are swept there
)


@dataclass(slots=True)
class StoreStats:
    """Counters for metrics and tests."""

    away: bool = False
    outages: int = 0
    skipped: int = 0  # calls not made, or failed, because the store was away
    refused: int = 0  # requests whose write it answered with a fence, a gap, an unknown record


class StoreGuard:
    def __init__(self, store: RequestStore, timing: Timing) -> None:
        self._store = store
        self._heartbeat_s = timing.heartbeat_s
        self._lease_s = timing.router_lease_s
        self.ledgers: dict[str, RequestLedger] = {}  # of requests that are not over; read only
        self._unsettled: dict[str, tuple[RequestLedger, Move]] = {}
        self._expected: dict[str, RequestLedger] = {}
        self.stats = StoreStats()
        self.catch_up = CatchUp()
        self.lease_until = 0.0  # loop time: no other router sweeps what this one holds before
        self.sweeps: Callable[[], bool] = lambda: True  # may it now?
        self.watchers: list[Callable[[Sequence[Swept]], None]] = []  # called after every heartbeat

    @property
    def name(self) -> str:
        return self._store.name

    async def start(self) -> None:
        """Connect; a store that is away now may come later."""
        try:
            await self._store.start()
            self.lease_until = asyncio.get_running_loop().time() + self._lease_s
        except StoreUnavailable as error:
            self.lose(error)

    async def run(self) -> None:
        """Beat and sweep until cancelled."""
        while True:
            await self.beat()
            await asyncio.sleep(self._heartbeat_s)

    async def stop(self) -> None:
        await self._store.stop()

    async def open(self, request: Request, fields: dict[str, str]) -> RequestLedger:
        """Record a new request as QUEUED. Raises InvalidRequest for an id that is in use, and
        Unavailable for a resumable one without the store."""
        ledger = self._expected.pop(request.id, None) or RequestLedger(self, request.id, fields)
        if ledger.recorded:
            return ledger  # adopted
        if self.stats.away:
            self.stats.skipped += 1
            return self._unlogged(ledger)
        try:
            record = await self._store.claim(request.id, {**fields, **ledger.owed.fields})
        except StoreUnavailable as error:
            self.lose(error)
            return self._unlogged(ledger)
        if record is not None and ledger.log is not None and record.tries:
            await self.release([request.id])  # swept in this moment: it is there to be adopted
            record = None
        if record is None:
            raise IdInUse()
        self._opened(ledger, record)
        return ledger

    async def enter(self, request: Request, fields: dict[str, str]) -> RequestLedger:
        """`open`, but the record of a plain request is only on its way: `ledger.accepted` waits for
        it, and raises what `open` does."""
        if self.stats.away or request.id in self._expected:
            return await self.open(request, fields)
        ledger = self.ledgers[request.id] = RequestLedger(self, request.id, fields)
        ledger.recorded = ledger.claiming = True  # all its later writes come after the claim
        self._store.post_claim(request.id, fields, ledger.claimed)
        return ledger

    def _unlogged(self, ledger: RequestLedger) -> RequestLedger:
        """The ledger of a request that cannot be recorded now: a plain one goes on, and is recorded
        later. Raises Unavailable for a resumable one."""
        if ledger.log is not None:
            raise Unavailable("the store is away: no resumable request can be taken now")
        self.ledgers[ledger.request_id] = ledger
        return ledger

    def expect(self, request_id: str, log: RunLog) -> None:
        """The next `open` of this id is of a resumable request."""
        self._expected[request_id] = RequestLedger(self, request_id, log=log)

    def adopt(self, record: RequestRecord, log: RunLog) -> RequestLedger:
        """The ledger of a request just claimed, which was another router's."""
        ledger = RequestLedger(self, record.id, log=log)
        self._opened(ledger, record)
        self._expected[record.id] = ledger
        return ledger

    def forget(self, request_id: str) -> None:
        """It will not be opened after all. Twice is safe."""
        self._expected.pop(request_id, None)

    async def release(self, request_ids: Sequence[str]) -> None:
        """Give requests up, without an end: another router may adopt them at once."""
        for request_id in request_ids:
            ledger = self.ledgers.pop(request_id, None)
            if ledger is not None:
                ledger.recorded = False
                self.catch_up.forget(ledger)
        await self.call(lambda store: store.release(request_ids))

    @property
    def holds_leases(self) -> bool:
        """No other router can have swept what this one holds."""
        return asyncio.get_running_loop().time() < self.lease_until

    def _opened(self, ledger: RequestLedger, record: RequestRecord) -> None:
        ledger.epoch = record.epoch
        ledger.recorded = True
        ledger.owed.fields.clear()  # the claim has said them
        self.ledgers[ledger.request_id] = ledger
        if ledger.log is not None:
            ledger.log.opened.set()

    async def settle(self, ledger: RequestLedger, move: Move) -> None:
        """A request ends and still owes writes: they are made now if the store is there, else when
        it is back."""
        last = replace(move, catch_up=True)
        done = await self.call(lambda store: self.catch_up.end(store, ledger, last))
        if done is None and self.stats.away:
            self.settle_later(ledger, last)

    def settle_later(self, ledger: RequestLedger, move: Move) -> None:
        if len(self._unsettled) < MAX_UNSETTLED:
            self._unsettled[move.request_id] = ledger, replace(move, catch_up=True)
            return
        self.catch_up.forget(ledger)
        if ledger.log is not None:
            ledger.log.lose()

    def owe(self, entries: Iterable[LogEntry]) -> None:
        """The store was away when these were to be written."""
        for entry in entries:
            ledger = self.ledgers.get(entry.request_id)
            if ledger is not None and (ledger.owes or ledger.owed.cut):
                self.catch_up.owe(ledger, entry)

    async def append(self, events: Iterable[TokenEvent]) -> None:
        """Log the tokens of `events`, those of one step of a node, in one call. None of them has
        been shown. Never raises: a request that cannot be logged goes on unlogged."""
        entries: list[LogEntry] = []
        logged: list[tuple[RequestLedger, TokenEvent]] = []
        for event in events:
            ledger = self.ledgers.get(event.request_id)
            entry = None if ledger is None else ledger.entry(event)
            if ledger is not None and entry is not None:
                entries.append(entry)
                logged.append((ledger, event))
        if not entries:
            return
        try:
            statuses = await self.call(lambda store: store.append(entries))
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
            self.owe([entry])

    async def counts(self) -> dict[RequestState, int]:
        """Requests by state; empty while the store is away."""
        return await self.call(lambda store: store.counts()) or {}

    async def call(self, work: Callable[[RequestStore], Awaitable[T]]) -> T | None:
        """The store's answer, or None while it is away. Raises nothing of the store's."""
        if self.stats.away:
            self.stats.skipped += 1
            return None
        try:
            return await work(self._store)
        except StoreUnavailable as error:
            self.lose(error)
            return None

    async def reach(self, work: Callable[[RequestStore], Awaitable[T]]) -> T:
        """The store's answer, for callers that cannot go on without it. Raises StoreUnavailable."""
        try:
            return await work(self._store)
        except StoreUnavailable as error:
            self.lose(error)
            raise

    def post(
        self, move: Move, on_answer: Callable[[WriteStatus | StoreUnavailable | None], None]
    ) -> None:
        """A move without waiting; `on_answer` gets the store's answer, None if it is away."""
        if self.stats.away:
            self.stats.skipped += 1
            on_answer(None)
        else:
            self._store.post(move, on_answer)

    async def beat(self) -> None:
        """One heartbeat: keep what is held, settle what ended meanwhile, sweep what others left."""
        held = [it.request_id for it in self.ledgers.values() if it.recorded and not it.claiming]
        # An end that is still to be written needs its lease, too: its tokens may be in the backlog.
        held += [i for i, (ledger, _) in self._unsettled.items() if ledger.recorded]
        swept: Sequence[Swept] = ()
        try:
            swept = await self._beat(held)
        except StoreUnavailable as error:
            self.lose(error)
        for watcher in self.watchers:
            watcher(swept)

    async def _beat(self, held: Sequence[str]) -> Sequence[Swept]:
        """Everything that a heartbeat writes; what was swept. Raises StoreUnavailable."""
        started = asyncio.get_running_loop().time()
        lost = await self._store.beat(held)
        self.lease_until = started + self._lease_s
        # What ended while the beat was under way is `lost` to the store, and not open here.
        for request_id in lost:
            ledger = self.ledgers.get(request_id)
            if ledger is not None:
                ledger.took(WriteStatus.FENCED)
        self._return()
        await self.catch_up.all(self._store, [it for it in self.ledgers.values() if it.owes])
        while self._unsettled:
            request_id, (ledger, move) = next(iter(self._unsettled.items()))
            await self.catch_up.end(self._store, ledger, move)
            del self._unsettled[request_id]
        swept = await self._store.sweep() if self.sweeps() else ()
        for each in swept:
            logger.info("request %s swept: %s, epoch %d", each.request_id, each.state, each.epoch)
        return swept

    def _return(self) -> None:
        if self.stats.away:
            self.stats.away = False
            logger.warning("the store is back")

    def lose(self, error: StoreUnavailable) -> None:
        """The store did not answer: nothing is asked of it until a heartbeat gets through."""
        self.stats.skipped += 1
        if not self.stats.away:
            self.stats.away = True
            self.stats.outages += 1
            logger.warning("the store is away, requests go on unlogged: %s", error.message)
