"""The store as requests see it: StoreGuard for the router, a RequestLedger for each request.

A plain request goes on when the store does not answer: the call is skipped, counted, and nothing is
tried again until a heartbeat got through (so an outage costs each request at most one timeout). A
request that missed a write is `behind`: what it owes is written when the store is back
(router/store/catch_up.py), ended ones included. The life: start() -> run() as a task -> stop().
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

from baton.protocol.errors import InvalidRequest, StoreUnavailable, Unavailable
from baton.protocol.events import TokenEvent
from baton.protocol.request import Request, RequestState, check_transition
from baton.runtime.timing import Timing
from router.store.base import (
    NO_FIELDS,
    LogEntry,
    Move,
    RequestRecord,
    RequestStore,
    Swept,
    WriteStatus,
)
from router.store.catch_up import CatchUp, Owed
from router.store.log_details import entry_of

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


def description(request: Request) -> dict[str, str]:
    """What the record says of a plain request."""
    return {
        "seed": str(request.params.seed),
        "prompt_tokens": str(len(request.prompt_ids)),
        "max_tokens": str(request.params.max_tokens),
    }


class RequestLedger:
    """State and epoch of one request: the truth while its router lives, written through.

    `recorded`: the store has a record and it is ours; while it is `claiming`, on its way. `behind`:
    a write was skipped. `refused`: the store does not take its writes any more, so nothing is owed.
    `owed`: writes that it missed. `log`: of a resumable request, which shows only what is logged.
    """

    def __init__(
        self,
        guard: StoreGuard,
        request_id: str,
        fields: Mapping[str, str] = NO_FIELDS,
        log: RunLog | None = None,
    ) -> None:
        self._guard = guard
        self.request_id = request_id
        self.state = RequestState.QUEUED
        self.epoch = 1
        self.recorded = False
        self.claiming = False
        self.behind = False
        self.refused = False
        self.log = log
        self.owed = Owed(dict(fields)) if log is None else log.owed
        self._in_use = False  # the store has such a request already
        self._claimed: asyncio.Future[None] | None = None  # its journey waits for the record
        self._posted = 0  # moves that the store has not answered
        self._appending: list[TokenEvent] = []  # on their way into the log
        self._appended: asyncio.Event | None = None  # set when none is on its way any more

    def claimed(self, answer: int | StoreUnavailable | None) -> None:
        """The answer to the claim: its epoch, or None for an id that is in use."""
        self.claiming, self.recorded = False, isinstance(answer, int)
        if isinstance(answer, StoreUnavailable):
            self._guard.lose(answer)  # it goes on unlogged
        elif answer is None:
            self._in_use = self.refused = True
            self.abandon()
        else:
            self.epoch = answer
            self.owed.fields.clear()  # the claim has said them
        if self._claimed is not None and not self._claimed.done():
            self._claimed.set_result(None)

    async def accepted(self) -> None:
        """Wait until the record is there, or the store is away. Raises InvalidRequest for an id
        that is in use."""
        if self.claiming:
            await self._claim_over()
        if self._in_use:
            raise IdInUse()

    async def _claim_over(self) -> None:
        self._claimed = asyncio.get_running_loop().create_future()
        await self._claimed  # the store's answers have a deadline

    def entry(self, event: TokenEvent) -> LogEntry | None:
        """What to append for an event now, until `append_over`; None: nothing, or it waits for the
        store."""
        if self.refused:
            return None
        # The ledger's epoch: a prefill that outlived a failover still reports the old one.
        if self.log is not None:
            entry = entry_of(event, self.epoch, int(time.time()))
        elif event.token_ids:
            entry = LogEntry(
                event.request_id, self.epoch, event.position, event.token_ids, event.sample
            )
        else:
            return None
        if self.owes or self.owed.cut:
            self._guard.owe([entry])
            return None
        self._appending.append(event)
        return entry

    def append_over(self, event: TokenEvent) -> None:
        """The store has answered what `entry` gave for `event`, or will not."""
        self._appending.remove(event)
        if self._appended is not None and not self._appending:
            self._appended.set()

    async def settle(self) -> list[TokenEvent]:
        """Wait until the events that are on their way into the log are there, and return them.
        Needed before a new epoch: they are valid output of the old owner, and readers of the log
        will believe them."""
        events = list(self._appending)
        if events:
            self._appended = asyncio.Event()
            await self._appended.wait()  # the store's answers have a deadline
        return events

    @property
    def owes(self) -> bool:
        """Is there something to write when the store is back?"""
        unclaimed = self.log is None and not self.recorded  # a resumable one must be, to begin
        return not self.refused and (self.behind or unclaimed)

    async def move(self, state: RequestState, **fields: str) -> None:
        """One transition to a non-terminal state. Raises IllegalTransition."""
        move = self._moved(state, fields)
        if move is not None:
            self.took(await self._guard.call(lambda store: store.move(move)), fields)

    def post(self, state: RequestState, **fields: str) -> None:
        """`move` that nobody waits for: the store answers before it answers what is asked next."""
        move = self._moved(state, fields)
        if move is not None:
            self._posted += 1
            self._guard.post(move, partial(self._answered, move))

    def _answered(self, move: Move, answer: WriteStatus | StoreUnavailable | None) -> None:
        self._posted -= 1
        if isinstance(answer, StoreUnavailable):
            self._guard.lose(answer)
            answer = None
        if answer is not WriteStatus.OK:
            self.took(answer, move.fields)

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

    async def finish(self, state: RequestState, *, kept: bool = True, **fields: str) -> None:
        """The terminal state; afterwards the ledger is closed. Not `kept`: nothing was shown, and
        the id may be used again. Raises IllegalTransition."""
        if self.claiming:
            await self._claim_over()
        kept = kept or bool(self._appending)
        check_transition(self.state, state)
        # A posted move may still fail: then this one takes its place.
        behind = self.behind or self._posted > 0
        move = Move(self.request_id, self.epoch, state, fields, catch_up=behind, kept=kept)
        if self.log is not None and not kept:
            self.log.withdraw()
        if self.log is not None and state is RequestState.FINISHED:
            shown = self.log.told  # whoever asks again must get as much
            move = replace(move, min_tokens=shown.num_tokens, min_ends=len(shown.ended))
        self.state = state
        self.abandon()
        if self.owes:
            await self._guard.settle(self, move)
            return
        if not self.recorded:
            return
        status = await self._guard.call(lambda store: store.finish(move))
        if status is None:
            self.behind = True
            self._guard.settle_later(self, move)
        elif self.log is not None:
            self.ended(status)

    def ended(self, status: WriteStatus) -> None:
        """How the store answered its terminal state."""
        if self.log is not None and status is WriteStatus.OK:
            self.log.settle()
        elif self.log is not None and self.log.kept:
            logger.warning("request %s: the store answers its end with %s", self.request_id, status)
            self.log.lose()

    def abandon(self) -> None:
        """Do not keep its lease any longer. After `finish` there is none; if that failed, the lease
        ends and the record is swept."""
        self._guard.ledgers.pop(self.request_id, None)

    def took(self, status: WriteStatus | None, fields: Mapping[str, str] = NO_FIELDS) -> None:
        """Remember how the store answered a write; None = it did not, and lacks its `fields`."""
        if status is None:
            self.behind = True
            self.owed.fields |= fields
        elif status is not WriteStatus.OK:
            known, self.behind, self.refused = self.refused, True, True
            self._guard.catch_up.forget(self)
            if self.log is not None:
                self.log.lose()
            # A resumable request is given up: whoever sweeps it goes on from its log.
            gone = self.log is not None or status in (WriteStatus.GONE, WriteStatus.FENCED)
            self.recorded = self.recorded and not gone
            if not known:  # else one that was on its way
                self._guard.stats.refused += 1
                logger.warning(
                    "request %s: the store answers %s, goes on unlogged", self.request_id, status
                )


class IdInUse(InvalidRequest):
    """Another request has this id."""

    def __init__(self) -> None:
        super().__init__("this request id was used already", field="request_id")


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

    def ledger(self, request_id: str) -> RequestLedger | None:
        """The ledger of a request that is not over."""
        return self.ledgers.get(request_id)

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
