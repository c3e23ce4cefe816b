"""PendingMoves: holds transitions that nobody waits for until more of the same request follow.

They are held for HOLD_S. A short request is prefilled, transferred, decoded and ended within this
time, also under load. Then the store gets one write with the latest state and the fields of all
moves. A write that somebody waits for includes the held moves of its request, so writes take effect
in the order of the calls. How a move is written is in router/store/redis_store.py. Event loop only.
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
    """One request's held moves joined into one, and the callbacks of all of them."""

    move: Move
    callbacks: list[OnAnswer]


class PendingMoves:
    """The held moves of all requests. `write` writes a joined move and calls its callbacks."""

    def __init__(self, write: Callable[[Move, Sequence[OnAnswer]], None]) -> None:
        self._write = write
        self._held: dict[str, _Held] = {}
        self._timer: asyncio.TimerHandle | None = None

    def hold(self, move: Move, on_answer: OnAnswer) -> None:
        """Hold a move, to write it soon together with further moves of its request."""
        held = self._held.get(move.request_id)
        if held is None:
            self._held[move.request_id] = _Held(move, [on_answer])
        else:
            held.move = _after(held.move, move)
            held.callbacks.append(on_answer)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(HOLD_S, self.flush)

    def taken_along(self, move: Move) -> tuple[Move, Sequence[OnAnswer]]:
        """Join `move` with the held moves of its request; return both as one, and the callbacks.

        The caller writes the joined move now, and calls the callbacks with the answer.
        """
        held = self._held.pop(move.request_id, None)
        return (move, ()) if held is None else (_after(held.move, move), held.callbacks)

    def flush(self) -> None:
        """Write all held moves now."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        held, self._held = self._held, {}
        for each in held.values():
            self._write(each.move, each.callbacks)


def _after(earlier: Move, later: Move) -> Move:
    """Join two moves into one. It skips the states between them, so it is a catch-up move."""
    return Move(  # not `replace`, which is three times as slow
        request_id=later.request_id,
        epoch=later.epoch,
        state=later.state,
        fields={**earlier.fields, **later.fields},
        catch_up=True,
        min_tokens=later.min_tokens,
        min_ends=later.min_ends,
        kept=later.kept,
        entries=later.entries,
    )
