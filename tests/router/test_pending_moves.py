"""Moves that nobody waits for: held a moment, written as one, taken along by what is waited for."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from baton.protocol.errors import StoreUnavailable
from baton.protocol.request import RequestState
from router.store.base import Move, OnAnswer, WriteStatus
from router.store.pending_moves import PendingMoves

S = RequestState


@dataclass
class Written:
    """What was written, and an event set by the first of it."""

    moves: list[Move] = field(default_factory=list[Move])
    some: asyncio.Event = field(default_factory=asyncio.Event)

    def __call__(self, move: Move, callbacks: Sequence[OnAnswer]) -> None:
        self.moves.append(move)
        for each in callbacks:
            each(WriteStatus.OK)
        self.some.set()


async def test_a_request_s_moves_are_written_as_one_by_themselves() -> None:
    written, answers = Written(), list[WriteStatus | StoreUnavailable]()
    pending = PendingMoves(written)
    pending.hold(Move("a", 1, S.PREFILL, {"p": "1", "x": "1"}), answers.append)
    pending.hold(Move("b", 3, S.DECODE), answers.append)
    pending.hold(Move("a", 1, S.TRANSFER, {"d": "2", "x": "2"}), answers.append)
    assert written.moves == []
    await asyncio.wait_for(written.some.wait(), 30)
    fields = {"p": "1", "d": "2", "x": "2"}
    one = Move("a", 1, S.TRANSFER, fields, catch_up=True)
    assert written.moves == [one, Move("b", 3, S.DECODE)]
    assert answers == [WriteStatus.OK] * 3
    pending.flush()
    assert len(written.moves) == 2


async def test_what_is_waited_for_takes_along_its_own_request_s_moves_only() -> None:
    written, answers = Written(), list[WriteStatus | StoreUnavailable]()
    pending = PendingMoves(written)
    last = Move("a", 1, S.FINISHED, {"n": "3"})
    assert pending.taken_along(last) == (last, ())
    pending.hold(Move("a", 1, S.DECODE, {"d": "2"}), answers.append)
    pending.hold(Move("b", 1, S.DECODE), answers.append)
    both, who = pending.taken_along(last)
    assert both == Move("a", 1, S.FINISHED, {"d": "2", "n": "3"}, catch_up=True)
    assert (len(who), answers) == (1, [])
    pending.flush()
    assert written.moves == [Move("b", 1, S.DECODE)]
    assert answers == [WriteStatus.OK]
