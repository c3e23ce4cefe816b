"""RequestLedger: one request's state and epoch, and the writes that the store has missed of it.

Not here: when the store counts as away (router/store/guard.py), and how a request catches up
(router/store/catch_up.py).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from baton.protocol.errors import InvalidRequest, StoreUnavailable
from baton.protocol.events import TokenEvent
from baton.protocol.request import Request, RequestState, check_transition
from router.store.base import (
    NO_FIELDS,
    LogEntry,
    Move,
    WriteStatus,
)
from router.store.catch_up import Owed
from router.store.log_details import entry_of

if TYPE_CHECKING:
    from router.resumable.run_log import RunLog
    from router.store.guard import StoreGuard


logger = logging.getLogger(__name__)


class IdInUse(InvalidRequest):
    """Another request has this id."""

    def __init__(self) -> None:
        super().__init__("this request id was used already", field="request_id")


def description(request: Request) -> dict[str, str]:
    """Return the fields of a plain request's record."""
    return {
        "seed": str(request.params.seed),
        "prompt_tokens": str(len(request.prompt_ids)),
        "max_tokens": str(request.params.max_tokens),
    }


class RequestLedger:
    """State and epoch of one request. While its router lives they are valid here, and each change
    is written to the store.

    `recorded`: the store has the record and this router owns it. `claiming`: the claim is under
    way; then `recorded` is set in advance. `behind`: a write was skipped. `refused`: the store has
    refused a write, so nothing more is written. `owed`: the writes that the store has missed.
    `log`: for a resumable request, which shows only logged tokens; None for a plain request.
    `shown`: a plain request's tokens that are not on their way into the log yet.
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
        self.shown: list[TokenEvent] = []
        self._in_use = False  # the store has such a request already
        self._claimed: asyncio.Future[None] | None = None  # what the journey waits for, if it does
        self._posted = 0  # posted moves that the store has not answered
        self._appending: list[TokenEvent | LogEntry] = []  # what is on its way into the log
        self._appended: asyncio.Event | None = None  # set when nothing is on its way any more

    def claimed(self, answer: int | StoreUnavailable | None) -> None:
        """Take the answer to the claim: the epoch, None for an id that is in use, or the error."""
        self.claiming, self.recorded = False, isinstance(answer, int)
        if isinstance(answer, StoreUnavailable):
            self._guard.lose(answer)  # the request goes on without a record
        elif answer is None:
            self._in_use = self.refused = True
            self.abandon()
        else:
            self.epoch = answer
            self.owed.fields.clear()  # the claim has written them
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
        """Return the entry to append for an event of a resumable request; the event counts as on
        its way until `append_over`.

        None if there is nothing to append now: the store has refused the request, or it is owed.
        """
        # The ledger's epoch: a prefill that outlived a failover still reports the old one.
        entry = entry_of(event, self.epoch, int(time.time()))
        if self.refused or self.owes or self.owed.cut:
            self._guard.owe(self, [entry])
            return None
        self._appending.append(event)
        return entry

    def due(self) -> list[LogEntry]:
        """Return the entries of the `shown` tokens, to append now, with neighbours in one. They
        count as on their way until `append_over`."""
        events, self.shown = self.shown, []
        runs: list[tuple[TokenEvent, list[int]]] = []
        last: dict[int, tuple[TokenEvent, list[int]]] = {}  # by sample
        for event in events:
            first, ids = last.get(event.sample, (event, []))
            if event.position != first.position + len(ids):
                first, ids = event, []
            if not ids:
                last[event.sample] = first, ids
                runs.append((first, ids))
            ids += event.token_ids
        entries = [
            LogEntry(self.request_id, self.epoch, first.position, tuple(ids), first.sample)
            for first, ids in runs
        ]
        if self.refused or self.owes or self.owed.cut:
            self._guard.owe(self, entries)
            return []
        self._appending += entries
        return entries

    def append_over(self, what: TokenEvent | LogEntry) -> None:
        """Note that the append of an event or an entry is over, with or without success."""
        self._appending.remove(what)
        if self._appended is not None and not self._appending:
            self._appended.set()

    async def settle(self) -> list[TokenEvent]:
        """Wait until all tokens are in the log; return the events that are not shown yet.

        Needed before a new epoch: these events are valid output of the old epoch, because readers
        of the log will see them.
        """
        self._guard.flush(self)
        events = [each for each in self._appending if isinstance(each, TokenEvent)]
        while self._appending:
            self._appended = asyncio.Event()
            await self._appended.wait()  # the store's answers have a deadline
        return events

    @property
    def owes(self) -> bool:
        """Whether something has to be written when the store is back."""
        unclaimed = self.log is None and not self.recorded  # resumable ones are recorded to begin
        return not self.refused and (self.behind or unclaimed)

    async def move(self, state: RequestState, **fields: str) -> None:
        """Move the request to a non-terminal state, and write that. Raises IllegalTransition."""
        if state is RequestState.QUEUED:
            await self.settle()  # behind the next epoch, tokens of this one would be fenced
        move = self._moved(state, fields)
        if move is not None:
            self.took(await self._guard.call(lambda store: store.move(move)), fields)

    def post(self, state: RequestState, **fields: str) -> None:
        """Move the request to a non-terminal state without waiting for the store.

        The write takes effect before the next call for this request. Raises IllegalTransition.
        """
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
        """Change the state; return the move to write, or None if it must be caught up later."""
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
        """Move the request to a terminal state and write that; then the ledger is closed.

        `kept` False: nothing was shown, so record and log are deleted and the id is free. Raises
        IllegalTransition.
        """
        if self.claiming:
            await self._claim_over()
        check_transition(self.state, state)
        due = self.due()
        entries = [it for it in self._appending if isinstance(it, LogEntry)]
        kept = kept or bool(self._appending)
        # A posted move may still fail. Then this move takes its place.
        behind = self.behind or self._posted > 0
        move = Move(self.request_id, self.epoch, state, fields, behind, kept=kept, entries=entries)
        if self.log is not None and not kept:
            self.log.withdraw()
        if self.log is not None and state is RequestState.FINISHED:
            shown = self.log.told  # a client that asks again must get all that was shown
            tokens, ends = shown.num_tokens, len(shown.ended)
            move = msgspec.structs.replace(move, min_tokens=tokens, min_ends=ends)
        self.state = state
        self.abandon()
        if self.owes:
            self._guard.owe(self, entries)  # what is on its way may fail, too
            await self._guard.settle(self, msgspec.structs.replace(move, entries=()))
            return
        if not self.recorded:
            return
        status = await self._guard.call(lambda store: store.finish(move))
        for entry in due:
            self.append_over(entry)
        if status is None or (entries and status is WriteStatus.GAP):  # one before was lost
            self.behind = True
            self._guard.owe(self, entries)
            self._guard.settle_later(self, msgspec.structs.replace(move, entries=()))
        elif self.log is not None:
            self.ended(status)

    def ended(self, status: WriteStatus) -> None:
        """Take the store's answer to the terminal state."""
        if self.log is not None and status is WriteStatus.OK:
            self.log.settle()
        elif self.log is not None and self.log.kept:
            logger.warning("request %s: the store answers its end with %s", self.request_id, status)
            self.log.lose()

    def abandon(self) -> None:
        """Stop renewing the request's lease.

        After `finish` there is no lease. If `finish` failed, the lease runs out and the record is
        swept.
        """
        self._guard.ledgers.pop(self.request_id, None)

    def took(self, status: WriteStatus | None, fields: Mapping[str, str] = NO_FIELDS) -> None:
        """Take the store's answer to a write. `status` None: the store did not answer, so it has
        missed the `fields`."""
        if status is None:
            self.behind = True
            self.owed.fields |= fields
        elif status is not WriteStatus.OK:
            known, self.behind, self.refused = self.refused, True, True
            self._guard.catch_up.forget(self)
            if self.log is not None:
                self.log.lose()
            # A resumable request is given up: the router that sweeps it goes on from its log.
            gone = self.log is not None or status in (WriteStatus.GONE, WriteStatus.FENCED)
            self.recorded = self.recorded and not gone
            if not known:  # else a write that was on its way at the first refusal
                self._guard.stats.refused += 1
                logger.warning(
                    "request %s: the store answers %s, goes on unlogged", self.request_id, status
                )
