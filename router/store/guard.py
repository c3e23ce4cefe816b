"""StoreGuard: the store as the router uses it, also while the store is away.

A plain request goes on when the store does not answer. The failed call is counted, and further
calls are skipped until a heartbeat gets through, so an outage costs each request at most one
timeout. A request that missed a write is `behind`. Its missed writes are written when the store is
back (router/store/catch_up.py), also those of requests that have ended. Tokens of a resumable
request are appended to its log before a client sees them. A plain request ends with its router, so
its tokens are shown first; they are appended LATE_S later, and before its next epoch and its end. A
repeated append of the same (sample, position) changes nothing. The life: start() -> run() as a task
-> stop().
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec

from baton.protocol.errors import StoreUnavailable, Unavailable
from baton.protocol.events import TokenEvent
from baton.protocol.request import Request, RequestState
from baton.runtime.failpoints import FAILPOINTS
from baton.runtime.timing import Timing
from router.events import EventRing
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
LATE_S: Final = 0.1  # shown tokens of plain requests are written this much later
MAX_ENTRIES: Final = 256  # in one append: some 3 ms of Redis
MAX_UNSETTLED: Final = (
    10_000  # terminal states kept for the store's return; older ones are swept there
)


@dataclass(slots=True)
class StoreStats:
    """Counters for metrics and tests."""

    away: bool = False
    outages: int = 0
    skipped: int = 0  # calls not made, or failed, because the store was away
    refused: int = 0  # requests with a write that the store refused (fence, gap, no record)


class StoreGuard:
    def __init__(
        self, store: RequestStore, timing: Timing, events: EventRing | None = None
    ) -> None:
        self._store = store
        self._events = EventRing() if events is None else events
        self._heartbeat_s = timing.heartbeat_s
        self._lease_s = timing.router_lease_s
        self.ledgers: dict[str, RequestLedger] = {}  # of requests under way, by id; read only
        self._unsettled: dict[str, tuple[RequestLedger, Move]] = {}
        self._expected: dict[str, RequestLedger] = {}
        self.stats = StoreStats()
        self.catch_up = CatchUp()
        self._shown: dict[str, RequestLedger] = {}  # requests with tokens to write, by id
        self._timer: asyncio.TimerHandle | None = None
        self.lease_until = 0.0  # loop time until which no other router sweeps this one's requests
        self.sweeps: Callable[[], bool] = lambda: True  # whether this router may sweep now
        self.watchers: list[Callable[[Sequence[Swept]], None]] = []  # called after every heartbeat

    @property
    def name(self) -> str:
        return self._store.name

    async def start(self) -> None:
        """Connect. If the store is away now, heartbeats try again later."""
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
        self.flush()
        await self._store.stop()

    async def open(self, request: Request, fields: dict[str, str]) -> RequestLedger:
        """Record a new request as QUEUED and return its ledger.

        Raises InvalidRequest if the id is in use, and Unavailable for a resumable request while the
        store is away.
        """
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
            await self.release([request.id])  # a swept request of this id waits for adoption
            record = None
        if record is None:
            raise IdInUse()
        self._opened(ledger, record)
        return ledger

    async def enter(self, request: Request, fields: dict[str, str]) -> RequestLedger:
        """Return the ledger of a new request before its record is in the store.

        `ledger.accepted` waits for the record, and raises as `open`. A resumable request is opened
        at once.
        """
        if self.stats.away or request.id in self._expected:
            return await self.open(request, fields)
        ledger = self.ledgers[request.id] = RequestLedger(self, request.id, fields)
        ledger.recorded = ledger.claiming = True  # all its later writes come after the claim
        self._store.post_claim(request.id, fields, ledger.claimed)
        return ledger

    def _unlogged(self, ledger: RequestLedger) -> RequestLedger:
        """Return the ledger of a plain request that cannot be recorded now; it is recorded later.

        Raises Unavailable for a resumable request.
        """
        if ledger.log is not None:
            raise Unavailable("the store is away: no resumable request can be taken now")
        self.ledgers[ledger.request_id] = ledger
        return ledger

    def expect(self, request_id: str, log: RunLog) -> None:
        """Prepare the ledger of a resumable request, for the next `open` of this id."""
        self._expected[request_id] = RequestLedger(self, request_id, log=log)

    def adopt(self, record: RequestRecord, log: RunLog) -> RequestLedger:
        """Return the ledger of a request that another router had and this one has just claimed."""
        ledger = RequestLedger(self, record.id, log=log)
        self._opened(ledger, record)
        self._expected[record.id] = ledger
        return ledger

    def forget(self, request_id: str) -> None:
        """Undo `expect` or `adopt` for a request that will not be opened. May be called twice."""
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
        """Whether this router's leases are valid, so that no other router can have swept them."""
        return asyncio.get_running_loop().time() < self.lease_until

    def _opened(self, ledger: RequestLedger, record: RequestRecord) -> None:
        ledger.epoch = record.epoch
        ledger.recorded = True
        ledger.owed.fields.clear()  # the claim has written them
        self.ledgers[ledger.request_id] = ledger
        if ledger.log is not None:
            ledger.log.opened.set()

    async def settle(self, ledger: RequestLedger, move: Move) -> None:
        """Write the missed writes and the terminal `move` of a request that ends.

        They are written now if the store is there, else when it is back.
        """
        last = msgspec.structs.replace(move, catch_up=True)
        done = await self.call(lambda store: self.catch_up.end(store, ledger, last))
        if done is None and self.stats.away:
            self.settle_later(ledger, last)

    def settle_later(self, ledger: RequestLedger, move: Move) -> None:
        if len(self._unsettled) < MAX_UNSETTLED:
            self._unsettled[move.request_id] = ledger, msgspec.structs.replace(move, catch_up=True)
            return
        self.catch_up.forget(ledger)
        if ledger.log is not None:
            ledger.log.lose()

    def owe(self, ledger: RequestLedger, entries: Sequence[LogEntry]) -> None:
        """Add entries that the store has missed to the request's backlog, unless it has refused."""
        if not ledger.refused:
            for entry in entries:
                self.catch_up.owe(ledger, entry)

    def shows_logged(self, request_id: str) -> bool:
        """Whether the request shows no token that is not logged: it is resumable."""
        ledger = self.ledgers.get(request_id)
        return ledger is not None and ledger.log is not None

    def note(self, event: TokenEvent) -> bool:
        """Take tokens that may be shown now, and log them soon. False: they are a resumable
        request's, so `append` logs them first."""
        ledger = self.ledgers.get(event.request_id)
        if ledger is not None and ledger.log is not None:
            return False
        if ledger is not None and event.token_ids:
            ledger.shown.append(event)
            self._shown[event.request_id] = ledger
            if self._timer is None:
                self._timer = asyncio.get_running_loop().call_later(LATE_S, self._flush_late)
        return True

    def _flush_late(self) -> None:
        self._timer = None
        FAILPOINTS.hit("shown_not_logged")
        self.flush()

    def flush(self, ledger: RequestLedger | None = None) -> None:
        """Append the shown tokens of a plain request without waiting; None: of all of them. What
        cannot be appended is owed."""
        if ledger is None:
            shown, self._shown = self._shown, {}
        else:
            shown = {ledger.request_id: ledger}
        entries = [entry for it in shown.values() for entry in it.due()]
        for start in range(0, len(entries), MAX_ENTRIES):
            part = entries[start : start + MAX_ENTRIES]
            if self.stats.away:
                self.stats.skipped += 1
                self._flushed(shown, part, ())
            else:
                self._store.post_append(part, partial(self._flushed, shown))

    def _flushed(
        self,
        ledgers: Mapping[str, RequestLedger],
        part: Sequence[LogEntry],
        answer: Sequence[WriteStatus] | StoreUnavailable,
    ) -> None:
        if isinstance(answer, StoreUnavailable):
            self.lose(answer)
            answer = ()
        for entry, status in zip_longest(part, answer):  # None: not answered
            ledger = ledgers[entry.request_id]
            ledger.append_over(entry)
            # An end brings along what was on its way when it was written.
            if status is not WriteStatus.OK and not ledger.state.terminal:
                self._missed(ledger, entry, status)

    async def append(self, events: Iterable[TokenEvent]) -> None:
        """Append the tokens of resumable requests to their logs in one call, before any is shown.

        Never raises: a request whose tokens cannot be logged shows them when they are.
        """
        entries: list[LogEntry] = []
        logged: list[tuple[RequestLedger, RunLog, TokenEvent]] = []
        for event in events:
            ledger = self.ledgers.get(event.request_id)
            if ledger is not None and ledger.log is not None:
                entry = ledger.entry(event)
                if entry is not None:
                    entries.append(entry)
                    logged.append((ledger, ledger.log, event))
        if not entries:
            return
        began = {log: log.now() for _, log, _ in logged}
        try:
            statuses = await self.call(lambda store: store.append(entries, safe=True))
        finally:
            for log, at in began.items():
                log.appends.add(at, log.now())
            for ledger, _, event in logged:
                ledger.append_over(event)
        answers = [None] * len(entries) if statuses is None else statuses
        for (ledger, log, _), entry, status in zip(logged, entries, answers, strict=True):
            if status is not WriteStatus.OK:
                self._missed(ledger, entry, status)
            else:
                log.confirm([entry])

    def _missed(self, ledger: RequestLedger, entry: LogEntry, status: WriteStatus | None) -> None:
        """Handle an entry that the log did not take; add it to the backlog unless it was refused.

        `status` None: the store did not answer.
        """
        unclaimed = status is WriteStatus.GONE and not ledger.recorded
        if status is WriteStatus.GAP or unclaimed:
            status = None  # an earlier write has just failed: both are written after a heartbeat
        ledger.took(status)
        if status is None:
            self.owe(ledger, [entry])

    async def counts(self) -> dict[RequestState, int]:
        """Return the number of requests by state (see RequestStore); empty while it is away."""
        return await self.call(lambda store: store.counts()) or {}

    async def call(self, work: Callable[[RequestStore], Awaitable[T]]) -> T | None:
        """Return the store's answer to `work`; None while the store is away. Does not raise
        StoreUnavailable."""
        if self.stats.away:
            self.stats.skipped += 1
            return None
        try:
            return await work(self._store)
        except StoreUnavailable as error:
            self.lose(error)
            return None

    async def reach(self, work: Callable[[RequestStore], Awaitable[T]]) -> T:
        """Return the store's answer to `work`, also if the store counts as away.

        For callers that cannot go on without the answer. Raises StoreUnavailable.
        """
        try:
            return await work(self._store)
        except StoreUnavailable as error:
            self.lose(error)
            raise

    def post(
        self, move: Move, on_answer: Callable[[WriteStatus | StoreUnavailable | None], None]
    ) -> None:
        """Move without waiting. `on_answer` gets the store's answer; None while it is away."""
        if self.stats.away:
            self.stats.skipped += 1
            on_answer(None)
        else:
            self._store.post(move, on_answer)

    async def beat(self) -> None:
        """Do one heartbeat: renew the leases, write missed writes, sweep expired requests."""
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
        """Renew the leases of the requests `held` (ids), write what the store has missed, and, if
        it is this router's turn, take over requests whose lease has run out.

        Return the requests that were taken over. Raises StoreUnavailable.
        """
        started = asyncio.get_running_loop().time()
        lost = await self._store.beat(held)
        self.lease_until = started + self._lease_s
        # A request that ended while the beat was under way is `lost`, too, but has no ledger here.
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
            self._events.note("store", "the store is back")

    def lose(self, error: StoreUnavailable) -> None:
        """Note that the store did not answer: it counts as away until a heartbeat gets through."""
        self.stats.skipped += 1
        if not self.stats.away:
            self.stats.away = True
            self.stats.outages += 1
            logger.warning("the store is away, requests go on unlogged: %s", error.message)
            self._events.note("store", "the store is away: requests go on unlogged")
