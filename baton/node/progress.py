"""Progress: does this node's engine get on? The node's health is made of this alone.

Each heartbeat asks the engine thread a question, which it answers between two steps, and looks how
many layers its steps have gone through. No progress is

    no answer    a step (or a call) has not come back, and went through no layer, for `limit_s`
    no step      it answers, has work that nobody else holds up, and made no step for `limit_s`
    no question  the heartbeat itself has stopped for `stall_s`: the event loop hangs

`limit_s` is `stall_s`, or more on a machine that was seen to be that slow. A step itself may take
as long as it likes: a chunk of a large model on a few cores takes minutes.

Never a peer's: a request that waits for KV, or for an export to be fetched, says nothing of this
node. Written on the event loop, read from any thread. Times are the clock's, in seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from baton.engine.core.engine import Engine
from baton.protocol.clock import Clock

PATIENCE: Final = 3  # times the longest pause that a working engine has made


@dataclass(frozen=True, slots=True)
class ProgressAnswer:
    """What the engine says of itself between two steps. `held_up`: it can do nothing before blocks
    come free."""

    steps: int
    has_work: bool
    held_up: bool

    @classmethod
    def of(cls, engine: Engine, *, held: bool = False) -> ProgressAnswer:
        """Engine thread. `held`: it is not to step, whatever it has."""
        return cls(engine.stats.num_steps, engine.has_work and not held, engine.stalled)


class EngineProgress:
    """The life: ask() and answered() in turn, from the first heartbeat on."""

    def __init__(self, clock: Clock, stall_s: float) -> None:
        self._clock = clock
        self._stall_s = stall_s
        self._asked_at: float | None = None  # of the open question
        self._beat_at: float | None = None
        self.beats = 0
        self._steps = -1
        self._layers = 0
        self._moved_at = clock.monotonic()  # the last sign of life in the engine's work
        self._longest_s = 0.0  # between two such signs, with work and without a stall

    def ask(self, layers: int) -> bool:
        """A heartbeat. Whether to put the question: not while one is open. `layers`: how many the
        engine's steps have gone through (EngineStats.num_layers)."""
        self._beat_at = now = self._clock.monotonic()
        self.beats += 1
        if layers != self._layers:
            self._layers = layers
            self._moved()
        if self._asked_at is not None:
            return False
        self._asked_at = now
        return True

    def answered(self, answer: ProgressAnswer, waits_for_others: bool) -> None:
        """`waits_for_others`: exports or fetches are under way, whose ends free blocks."""
        self._asked_at = None
        if answer.steps != self._steps:
            self._steps = answer.steps
            self._moved()
        elif not answer.has_work or (answer.held_up and waits_for_others):
            self._moved_at = self._clock.monotonic()

    def _moved(self) -> None:
        pause_s = self._pause_s
        if pause_s < self.limit_s:
            self._longest_s = max(self._longest_s, pause_s)
        self._moved_at = self._clock.monotonic()

    @property
    def limit_s(self) -> float:
        """The engine may make a pause of so many seconds before it counts as stalled."""
        return max(self._stall_s, PATIENCE * self._longest_s)

    @property
    def _pause_s(self) -> float:
        """Since the last sign of life, or since the question that it has not answered."""
        since = self._moved_at if self._asked_at is None else max(self._moved_at, self._asked_at)
        return self._clock.monotonic() - since

    @property
    def silent_s(self) -> float:
        """Seconds for which the open question has waited; the length of a step, unless it hangs."""
        asked = self._asked_at
        return 0.0 if asked is None else self._clock.monotonic() - asked

    @property
    def stalled(self) -> bool:
        """No progress for too long."""
        beat_s = 0.0 if self._beat_at is None else self._clock.monotonic() - self._beat_at
        return self._pause_s >= self.limit_s or beat_s >= self._stall_s
