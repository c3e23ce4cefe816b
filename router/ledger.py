"""The store as requests see it: StoreGuard for the router, a RequestLedger for each request.

A plain request goes on when the store does not answer: the call is skipped, counted, and nothing is
tried again until a heartbeat got through (so an outage costs each request at most one timeout). A
request that missed a write is `behind`: what it owes is told when the store is back
(router/catch_up.py), ended ones included. The life: start() -> run() as a task -> stop().
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeVar

from baton.errors import InvalidRequest, StoreUnavailable, Unavailable
from baton.events import TokenEvent
from baton.request import Request, RequestState, check_transition
from baton.timing import Timing
from router.backlog import Backlog, append_pending, write_missed
from router.catch_up import CatchUp, Owed
from router.store import (
    NO_FIELDS,
    LogEntry,
    Move,
    RequestRecord,
    RequestStore,
    Swept,
    WriteStatus,
)

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
    refused: int = 0  # writes that the store answered with a fence, a gap, an unknown record


def description(request: Request) -> dict[str, str]:
    """What the record says of a plain request."""
    return {
        "seed": str(request.params.seed),
        "prompt_tokens": str(len(request.prompt_ids)),
        "max_tokens": str(request.params.max_tokens),
    }


class RequestLedger:
    """State and epoch of one request: the truth while its router lives, written through.

    `recorded`: the store has a record and it is ours. `behind`: a write was skipped. `refused`: the
    store does not take its writes any more, so nothing is owed. `owed`: what to tell it.
    `backlog`: of a resumable request, which shows nothing that is not logged.
    """

    def __init__(
        self, guard: StoreGuard, request_id: str, fields: Mapping[str, str] = NO_FIELDS
    ) -> None:
        self._guard = guard
        self.request_id = request_id
        self.state = RequestState.QUEUED
        self.epoch = 1
        self.recorded = False
        self.behind = False
        self.refused = False
        self.backlog: Backlog | None = None
        self.owed = Owed(dict(fields))
        self._posted = 0  # moves that the store has not answered
        self._appending: list[TokenEvent] = []  # on their way into the log
        self._appended: asyncio.Event | None = None  # set when nothing is, for who waits

    def appends(self, event: TokenEvent) -> None:
        """`event` goes into the log now; `append_over` when the store has answered."""
        self._appending.append(event)

    def append_over(self, event: TokenEvent) -> None:
        self._appending.remove(event)
        if self._appended is not None and not self._appending:
            self._appended.set()

    async def settle(self) -> list[TokenEvent]:
        """What is on its way into the log, once it is there. Before a new epoch: so far it is the
        old owner's word, and whoever reads the log will believe it."""
        events = list(self._appending)
        if events:
            self._appended = asyncio.Event()
            await self._appended.wait()  # the store's answers have a deadline
        return events

    @property
    def owes(self) -> bool:
        """Is there something that the store should hear when it is back?"""
        plain = self.backlog is None
        return plain and not self.refused and (self.behind or not self.recorded)

    async def move(self, state: RequestState, **fields: str) -> None:
        """One transition to a non-terminal state. Raises IllegalTransition."""
        move = self._moved(state, fields)
        if move is not None:
            self._told(move, await self._guard.call(lambda store: store.move(move)))

    def post(self, state: RequestState, **fields: str) -> None:
        """`move` that nobody waits for: the store answers before it answers what is asked next."""
        move = self._moved(state, fields)
        if move is not None:
            self._posted += 1
            self._guard.post(move, lambda status: self._answered(move, status))

    def _answered(self, move: Move, status: WriteStatus | None) -> None:
        self._posted -= 1
        self._told(move, status)

    def _told(self, move: Move, status: WriteStatus | None) -> None:
        self.took(status)
        if status is None:
            self.owed.fields |= move.fields

    def _moved(self, state: RequestState, fields: dict[str, str]) -> Move | None:
        """The write of a transition; None if this request is written no more."""
        check_transition(self.state, state)
        move = Move(self.request_id, self.epoch, state, fields)
        self.state = state
        if state is RequestState.QUEUED:
            self.epoch += 1
        if not self.recorded or self.behind:
            self._guard.stats.skipped += 1
            self.owed.fields |= fields
            return None
        return move

    async def finish(self, state: RequestState, **fields: str) -> None:
        """The terminal state; afterwards the ledger is closed. Raises IllegalTransition."""
        check_transition(self.state, state)
        # One that was posted may fail yet: then this one has its place.
        behind = self.behind or self._posted > 0
        move = Move(self.request_id, self.epoch, state, fields, catch_up=behind)
        self.state = state
        self._guard.close(self.request_id)
        if self.owes:
            await self._guard.settle(self, move)
            return
        if not self.recorded:
            return
        if self.backlog is not None and (self.behind or self.backlog.pending):
            self._guard.settle_later(self, move)  # its tokens come first
            return
        status = await self._guard.call(lambda store: store.finish(move))
        if status is None:
            self.behind = True
            self._guard.settle_later(self, move)
        elif self.backlog is not None:
            self._ended(status)

    async def write_end(self, move: Move, store: RequestStore) -> None:
        """Write an end that the store missed, of a resumable request. Raises StoreUnavailable."""
        assert self.backlog is not None, "a plain one's end is router/catch_up.py's"
        await append_pending(self, store)
        if not self.backlog.lost:
            self._ended(await store.finish(move))

    def _ended(self, status: WriteStatus) -> None:
        assert self.backlog is not None, "it is resumable"
        if status is WriteStatus.OK:
            self.backlog.settle()
        else:
            self.backlog.lose()

    def abandon(self) -> None:
        """Keep its lease no longer. After `finish` there is none; if even that failed, the lease
        ends and the record is swept."""
        self._guard.close(self.request_id)

    def took(self, status: WriteStatus | None) -> None:
        """Remember how the store answered a write; None = it did not."""
        if status is None:
            self.behind = True
        elif status is WriteStatus.GAP and self.backlog is not None:
            self.behind = True  # what is missing is on its way, or waits
        elif status is not WriteStatus.OK:
            self._guard.stats.refused += 1
            if self.backlog is not None:
                self.backlog.lose()
            self.recorded = status not in (WriteStatus.GONE, WriteStatus.FENCED)
            self.behind = self.refused = True
            logger.warning(
                "request %s: the store answers %s, goes on unlogged", self.request_id, status
            )


class StoreGuard:
    def __init__(self, store: RequestStore, timing: Timing) -> None:
        self._store = store
        self._heartbeat_s = timing.heartbeat_s
        self._lease_s = timing.router_lease_s
        self._open: dict[str, RequestLedger] = {}
        self._unsettled: dict[str, tuple[RequestLedger, Move]] = {}
        self._expected: dict[str, RequestLedger] = {}
        self._stopped = False
        self.stats = StoreStats()
        self.catch_up = CatchUp()
        self.lease_until = 0.0  # loop time: no other router sweeps what this one holds before
        self.sweeps: Callable[[], bool] = lambda: True  # may it now?
        self.watchers: list[Callable[[Sequence[Swept]], None]] = []  # told after every heartbeat

    @property
    def name(self) -> str:
        return self._store.name

    async def start(self) -> None:
        """Connect; a store that is away now may come later."""
        try:
            await self._store.start()
            self.lease_until = asyncio.get_running_loop().time() + self._lease_s
        except StoreUnavailable as error:
            self._lose(error)

    async def run(self) -> None:
        """Beat and sweep until cancelled, or stopped: a client of Redis was seen to lose the former
        within a call."""
        while not self._stopped:
            await self.beat()
            await asyncio.sleep(self._heartbeat_s)

    async def stop(self) -> None:
        self._stopped = True
        await self._store.stop()

    async def open(self, request: Request, fields: dict[str, str]) -> RequestLedger:
        """Record a new request as QUEUED. Raises InvalidRequest for an id that is in use, and
        Unavailable for a resumable one without the store."""
        ledger = self._expected.pop(request.id, None) or RequestLedger(self, request.id, fields)
        if ledger.recorded:
            return ledger  # adopted
        backlog = ledger.backlog
        if backlog is not None:
            fields = {**fields, **backlog.fields}
        if self.stats.away:
            self.stats.skipped += 1
            return self._unlogged(ledger)
        try:
            record = await self._store.claim(request.id, fields)
        except StoreUnavailable as error:
            self._lose(error)
            return self._unlogged(ledger)
        if record is not None and backlog is not None and record.tries:
            await self.release([request.id])  # swept in this moment: it is there to be adopted
            record = None
        if record is None:
            raise InvalidRequest(f"request id {request.id!r} is in use", field="request_id")
        self._opened(ledger, record)
        return ledger

    def _unlogged(self, ledger: RequestLedger) -> RequestLedger:
        """What becomes of a request that cannot be recorded: a plain one goes on, and is told
        later."""
        if ledger.backlog is not None:
            raise Unavailable("the store is away: no resumable request can be taken now")
        self._open[ledger.request_id] = ledger
        return ledger

    def expect(self, request_id: str, backlog: Backlog) -> None:
        """The next `open` of this id is of a resumable request."""
        ledger = RequestLedger(self, request_id)
        ledger.backlog = backlog
        self._expected[request_id] = ledger

    def adopt(self, record: RequestRecord, backlog: Backlog) -> RequestLedger:
        """The ledger of a request just claimed, which was another router's."""
        ledger = RequestLedger(self, record.id)
        ledger.backlog = backlog
        self._opened(ledger, record)
        self._expected[record.id] = ledger
        return ledger

    def forget(self, request_id: str) -> None:
        """It will not be opened after all. Twice is safe."""
        self._expected.pop(request_id, None)

    async def release(self, request_ids: Sequence[str]) -> None:
        """Give requests up, without an end: another router may adopt them at once."""
        for request_id in request_ids:
            ledger = self._open.pop(request_id, None)
            if ledger is not None:
                ledger.recorded = False
        await self.call(lambda store: store.release(request_ids))

    @property
    def holds_leases(self) -> bool:
        """No other router can have swept what this one holds."""
        return asyncio.get_running_loop().time() < self.lease_until

    def _opened(self, ledger: RequestLedger, record: RequestRecord) -> None:
        ledger.epoch = record.epoch
        ledger.recorded = True
        self._open[ledger.request_id] = ledger
        if ledger.backlog is not None:
            ledger.backlog.opened.set()

    def ledger(self, request_id: str) -> RequestLedger | None:
        """The ledger of a request that is not over."""
        return self._open.get(request_id)

    def close(self, request_id: str) -> None:
        self._open.pop(request_id, None)

    async def settle(self, ledger: RequestLedger, move: Move) -> None:
        """A request ends that owes something: now if the store is there, else when it is back."""
        last = replace(move, catch_up=True)
        done = await self.call(lambda store: self.catch_up.end(store, ledger, last))
        if done is None and self.stats.away:
            self.settle_later(ledger, last)

    def settle_later(self, ledger: RequestLedger, move: Move) -> None:
        if len(self._unsettled) < MAX_UNSETTLED:
            self._unsettled[move.request_id] = ledger, replace(move, catch_up=True)
        elif ledger.backlog is None:
            self.catch_up.forget(ledger)

    def owe(self, entries: Iterable[LogEntry]) -> None:
        """These were shown, and the store was not there."""
        for entry in entries:
            ledger = self._open.get(entry.request_id)
            if ledger is not None and ledger.owes:
                self.catch_up.owe(ledger, entry)

    async def append(self, entries: Sequence[LogEntry]) -> list[WriteStatus] | None:
        return await self.call(lambda store: store.append(entries))

    async def counts(self) -> dict[RequestState, int]:
        """Requests by state; empty while the store is away."""
        return await self.call(lambda store: store.counts()) or {}

    async def call(self, work: Callable[[RequestStore], Awaitable[T]]) -> T | None:
        """The store's answer, or None while it is away. Raises nothing of the store's."""
        if self.stats.away:
            self.stats.skipped += 1
            return None
        try:
            return await self.reach(work)
        except StoreUnavailable:
            return None

    async def reach(self, work: Callable[[RequestStore], Awaitable[T]]) -> T:
        """The store's answer, for those who cannot go on without. Raises StoreUnavailable."""
        try:
            return await work(self._store)
        except StoreUnavailable as error:
            self._lose(error)
            raise

    def post(self, move: Move, told: Callable[[WriteStatus | None], None]) -> None:
        """A move without waiting; `told` the store's answer, None if it is away."""
        if self.stats.away:
            self.stats.skipped += 1
            told(None)
            return

        def answered(answer: WriteStatus | StoreUnavailable) -> None:
            if isinstance(answer, StoreUnavailable):
                self._lose(answer)
                told(None)
            else:
                told(answer)

        self._store.post(move, answered)

    async def beat(self) -> None:
        """One heartbeat: keep what is held, settle what ended meanwhile, sweep what others left."""
        held = [ledger.request_id for ledger in self._open.values() if ledger.recorded]
        # An end that is still to be told needs its lease, too: its tokens may be among the untold.
        held += [i for i, (ledger, _) in self._unsettled.items() if ledger.backlog is not None]
        swept: Sequence[Swept] = ()
        try:
            swept = await self._beat(held)
        except StoreUnavailable as error:
            self._lose(error)
        for watcher in self.watchers:
            watcher(swept)

    async def _beat(self, held: Sequence[str]) -> Sequence[Swept]:
        """Everything that a heartbeat writes; what was swept. Raises StoreUnavailable."""
        started = asyncio.get_running_loop().time()
        lost = await self._store.beat(held)
        self.lease_until = started + self._lease_s
        # What ended while the beat was under way is `lost` to the store, and not open here.
        for request_id in lost:
            ledger = self._open.get(request_id)
            if ledger is not None:
                ledger.took(WriteStatus.FENCED)
        self._return()
        await self.catch_up.all(self._store, [it for it in self._open.values() if it.owes])
        while self._unsettled:
            request_id, (ledger, move) = next(iter(self._unsettled.items()))
            if ledger.backlog is None:
                await self.catch_up.end(self._store, ledger, move)
            else:
                await ledger.write_end(move, self._store)
            del self._unsettled[request_id]
        swept = await self._store.sweep() if self.sweeps() else ()
        for each in swept:
            logger.info("request %s swept: %s, epoch %d", each.request_id, each.state, each.epoch)
        while late := [ledger for ledger in self._open.values() if _is_late(ledger)]:
            for ledger in late:
                await write_missed(ledger, self._store)
        return swept

    def _return(self) -> None:
        if self.stats.away:
            self.stats.away = False
            logger.warning("the store is back")

    def _lose(self, error: StoreUnavailable) -> None:
        self.stats.skipped += 1
        if not self.stats.away:
            self.stats.away = True
            self.stats.outages += 1
            logger.warning("the store is away, requests go on unlogged: %s", error.message)


def _is_late(ledger: RequestLedger) -> bool:
    backlog = ledger.backlog
    return backlog is not None and not backlog.lost and bool(ledger.behind or backlog.pending)
