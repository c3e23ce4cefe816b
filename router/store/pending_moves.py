"""PendingMoves: transitions that nobody waits for, held for a moment in which others may follow.

A short request is prefilled, transferred, decoded and ended within this moment, also under load.
Then the store gets one write with the latest state and the fields of all. A write that somebody
does wait for takes the held moves of its request along, so writes still take effect in the order in
which they were asked for. Not here: how a move is written (router/store/redis_store.py). Event loop
only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from router.store.base import Move, OnAnswer

HOLD_S: Final = 0.1


@dataclass(slots=True)
class _Held:
    """One request's moves joined to one, and the callbacks of each."""

    move: Move
    callbacks: list[OnAnswer]


class PendingMoves:
    """`write` gets each joined move, and the callbacks for its answer."""

    def __init__(self, write: Callable[[Move, Sequence[OnAnswer]], None]) -> None:
        self._write = write
        self._held: dict[str, _Held] = {}
        self._timer: asyncio.TimerHandle | None = None

    def hold(self, move: Move, on_answer: OnAnswer) -> None:
        """Write it soon, with whatever else comes of its request."""
        held = self._held.get(move.request_id)
        if held is None:
            self._held[move.request_id] = _Held(move, [on_answer])
        else:
            held.move = _after(held.move, move)
            held.callbacks.append(on_answer)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(HOLD_S, self.flush)

    def taken_along(self, move: Move) -> tuple[Move, Sequence[OnAnswer]]:
        """`move` with what is held of its request, which its caller writes and answers now."""
        held = self._held.pop(move.request_id, None)
        return (move, ()) if held is None else (_after(held.move, move), held.callbacks)

    def flush(self) -> None:
        """Write all that is held."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        held, self._held = self._held, {}
        for each in held.values():
            self._write(each.move, each.callbacks)


def _after(earlier: Move, later: Move) -> Move:
    """Both at once. The states between are skipped, as by one who catches up."""
    return Move(  # not `replace`, which is three times as slow
        request_id=later.request_id,
        epoch=later.epoch,
        state=later.state,
        fields={**earlier.fields, **later.fields},
        catch_up=True,
        min_tokens=later.min_tokens,
        min_ends=later.min_ends,
        kept=later.kept,
    )
