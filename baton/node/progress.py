"""Progress: whether this node's engine makes progress. It alone decides about the node's health.

With each heartbeat the engine thread is asked a question, which it answers between two steps, and
the layers that its steps have gone through are counted. There is no progress in these cases:

    no answer    a step (or a call) has not come back, and went through no layer, for `limit_s`
    no step      it answers, has work that nobody else holds up, and made no step for `limit_s`
    no question  the heartbeat itself has stopped for `stall_s`: the event loop hangs

`limit_s` is `stall_s`, or more on a machine where longer pauses were measured. A step may take as
long as it likes: a chunk of a large model on a few cores takes minutes.

Waiting for peers does not count: a request that waits for KV, or for its export to be fetched, says
nothing about this node. Written on the event loop, read from any thread. Times are in seconds of
the clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from baton.engine.core.engine import Engine
from baton.protocol.clock import Clock

PATIENCE: Final = 3  # a stall is this many times the longest pause of a working engine


@dataclass(frozen=True, slots=True)
class ProgressAnswer:
    """The engine's answer between two steps.

    `held_up`: it has work, but can do nothing until blocks become free.
    """

    steps: int
    has_work: bool
    held_up: bool

    @classmethod
    def of(cls, engine: Engine, *, held: bool = False) -> ProgressAnswer:
        """Return the answer of `engine`. Call it on the engine thread.

        `held`: the engine has been told to make no step, whatever work it has.
        """
        return cls(engine.stats.num_steps, engine.has_work and not held, engine.stalled)


class EngineProgress:
    """Judges progress. Life: ask() and answered() in turn, from the first heartbeat on."""

    def __init__(self, clock: Clock, stall_s: float) -> None:
        self._clock = clock
        self._stall_s = stall_s
        self._asked_at: float | None = None  # when the open question was asked; None = none is open
        self._beat_at: float | None = None
        self.beats = 0
        self._steps = -1
        self._layers = 0
        self._moved_at = clock.monotonic()  # when the engine last showed progress
        # The longest pause between two such moments, with work and without a stall.
        self._longest_s = 0.0

    def ask(self, layers: int) -> bool:
        """Note a heartbeat. Return whether to ask the engine: not while a question is open.

        `layers`: the layers that the engine's steps have gone through (EngineStats.num_layers).
        """
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
        """Note the engine's answer.

        `waits_for_others`: exports or fetches are under way, whose ends will free blocks.
        """
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
        """The longest pause, in seconds, that does not count as a stall."""
        return max(self._stall_s, PATIENCE * self._longest_s)

    @property
    def _pause_s(self) -> float:
        """Seconds since the last progress, or since the open question if that came later."""
        since = self._moved_at if self._asked_at is None else max(self._moved_at, self._asked_at)
        return self._clock.monotonic() - since

    @property
    def silent_s(self) -> float:
        """Seconds for which the open question has waited; 0 if none is open.

        They are the length of the current step, unless the engine hangs.
        """
        asked = self._asked_at
        return 0.0 if asked is None else self._clock.monotonic() - asked

    @property
    def stalled(self) -> bool:
        """Whether there has been no progress for too long."""
        beat_s = 0.0 if self._beat_at is None else self._clock.monotonic() - self._beat_at
        return self._pause_s >= self.limit_s or beat_s >= self._stall_s
