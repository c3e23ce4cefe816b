"""RequestLedger: the store as one request sees it: its state and epoch, and what it still owes.

Not here: when the store counts as away (router/store/guard.py), and how a request catches up
(router/store/catch_up.py).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

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
