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

from baton.errors import InvalidRequest, StoreUnavailable
from baton.events import TokenEvent
from baton.request import Request, RequestState, check_transition
from baton.timing import Timing
from router.catch_up import CatchUp, Owed
from router.store import NO_FIELDS, LogEntry, Move, RequestStore, WriteStatus

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
        return not self.refused and (self.behind or not self.recorded)

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
        status = await self._guard.call(lambda store: store.finish(move))
        if status is None:
            self.behind = True
            self._guard.settle_later(self, move)

    def abandon(self) -> None:
        """Keep its lease no longer. After `finish` there is none; if even that failed, the lease
        ends and the record is swept."""
        self._guard.close(self.request_id)

    def took(self, status: WriteStatus | None) -> None:
        """Remember how the store answered a write; None = it did not."""
        if status is None:
            self.behind = True
        elif status is not WriteStatus.OK:
            self._guard.stats.refused += 1
            self.recorded = status not in (WriteStatus.GONE, WriteStatus.FENCED)
            self.behind = self.refused = True
            logger.warning(
                "request %s: the store answers %s, goes on unlogged", self.request_id, status
            )


class StoreGuard:
    def __init__(self, store: RequestStore, timing: Timing) -> None:
        self._store = store
        self._heartbeat_s = timing.heartbeat_s
        self._open: dict[str, RequestLedger] = {}
        self._unsettled: dict[str, tuple[RequestLedger, Move]] = {}
        self.stats = StoreStats()
        self.catch_up = CatchUp()

    @property
    def name(self) -> str:
        return self._store.name

    async def start(self) -> None:
        """Connect; a store that is away now may come later."""
        try:
            await self._store.start()
        except StoreUnavailable as error:
            self._lose(error)

    async def run(self) -> None:
        """Beat and sweep until cancelled."""
        while True:
            await self.beat()
            await asyncio.sleep(self._heartbeat_s)

    async def stop(self) -> None:
        await self._store.stop()

    async def open(self, request: Request, fields: dict[str, str]) -> RequestLedger:
        """Record a new request as QUEUED. Raises InvalidRequest for an id that is in use."""
        ledger = RequestLedger(self, request.id, fields)
        if self.stats.away:
            self.stats.skipped += 1
            self._open[request.id] = ledger
            return ledger
        try:
            record = await self._store.claim(request.id, fields)
        except StoreUnavailable as error:
            self._lose(error)
            self._open[request.id] = ledger
            return ledger
        if record is None:
            raise InvalidRequest(f"request id {request.id!r} is in use", field="request_id")
        ledger.epoch = record.epoch
        ledger.recorded = True
        self._open[request.id] = ledger
        return ledger

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
        else:
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
            return await work(self._store)
        except StoreUnavailable as error:
            self._lose(error)
            return None

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
        try:
            # What ended while the beat was under way is `lost` to the store, and not open here.
            for request_id in await self._store.beat(held):
                ledger = self._open.get(request_id)
                if ledger is not None:
                    ledger.took(WriteStatus.FENCED)
            self._return()
            await self.catch_up.all(self._store, [it for it in self._open.values() if it.owes])
            while self._unsettled:
                request_id, (ledger, move) = next(iter(self._unsettled.items()))
                await self.catch_up.end(self._store, ledger, move)
                del self._unsettled[request_id]
            for swept in await self._store.sweep():
                logger.info(
                    "request %s swept: %s, epoch %d", swept.request_id, swept.state, swept.epoch
                )
        except StoreUnavailable as error:
            self._lose(error)

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
