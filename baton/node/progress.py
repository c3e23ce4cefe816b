"""Progress: does this node's engine get on? The node's health is made of this alone.

Each heartbeat asks the engine thread a question, which it answers between two steps. No progress is

    no answer    a step (or a call) has not come back for `stall_s`
    no step      it answers, has work that nobody else holds up, and made no step for `stall_s`
    no question  the heartbeat itself has stopped: the event loop hangs

Never a peer's: a request that waits for KV, or for an export to be fetched, says nothing of this
node. Written on the event loop, read from any thread. Times are the clock's, in seconds.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.clock import Clock
from baton.engine.engine import Engine


@dataclass(frozen=True, slots=True)
class Answer:
    """What the engine says of itself between two steps. `held_up`: it can do nothing before blocks
    come free."""

    steps: int
    has_work: bool
    held_up: bool

    @classmethod
    def of(cls, engine: Engine, *, held: bool = False) -> Answer:
        """Engine thread. `held`: it is not to step, whatever it has."""
        return cls(engine.stats.num_steps, engine.has_work and not held, engine.stalled)


class Progress:
    """The life: ask() and answered() in turn, from the first heartbeat on."""

    def __init__(self, clock: Clock, stall_s: float) -> None:
        self._clock = clock
        self._stall_s = stall_s
        self._asked_at: float | None = None  # of the open question
        self._beat_at: float | None = None
        self.beats = 0
        self._steps = -1
        self._moved_at = clock.monotonic()  # the last sign of life in the engine's work

    def ask(self) -> bool:
        """A heartbeat. Whether to put the question: not while one is open."""
        self._beat_at = now = self._clock.monotonic()
        self.beats += 1
        if self._asked_at is not None:
            return False
        self._asked_at = now
        return True

    def answered(self, answer: Answer, waits_for_others: bool) -> None:
        """`waits_for_others`: exports or fetches are under way, whose ends free blocks."""
        self._asked_at = None
        moved = answer.steps != self._steps
        self._steps = answer.steps
        if moved or not answer.has_work or (answer.held_up and waits_for_others):
            self._moved_at = self._clock.monotonic()

    @property
    def silent_s(self) -> float:
        """Seconds for which the open question has waited; the length of a step, unless it hangs."""
        asked = self._asked_at
        return 0.0 if asked is None else self._clock.monotonic() - asked

    @property
    def stalled(self) -> bool:
        """No progress for `stall_s`."""
        now = self._clock.monotonic()
        beat = now if self._beat_at is None else self._beat_at
        idle_s = now - self._moved_at if self._asked_at is None else 0.0
        return max(self.silent_s, now - beat, idle_s) >= self._stall_s
