"""Proposers: who guesses the next tokens of a sequence, for the target model to check in one step.

A guess is never trusted: it stands iff the target's own keyed sample is the same token (runner.py),
so a proposer decides how fast tokens come, never which. Here: the seam, and prompt lookup
(NgramProposer), which needs no model. A small model as proposer: draft.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

import numpy as np

from baton.protocol.errors import ConfigError
from baton.protocol.sampling import SamplingParams

_INITIAL_CAPACITY: Final = 256  # tokens


@dataclass(frozen=True, slots=True)
class DraftAsk:
    """Guess up to `max_drafts` tokens after `history` (all known tokens, prompt first).

    `position` is the absolute output index of the first guess; with `params` and `sample_index` it
    says which keyed sample the target will draw there.
    """

    request_id: str
    history: Sequence[int]
    max_drafts: int
    params: SamplingParams
    position: int
    sample_index: int = 0


class Proposer(Protocol):
    """Guesses tokens. Owned by the engine thread; may keep state per (request, sample)."""

    def propose(self, asks: Sequence[DraftAsk]) -> list[list[int]]:
        """Per ask, in order, at most max_drafts tokens; none where nothing is worth a try."""
        ...

    def forget(self, request_id: str) -> None:
        """Drop what is kept of a request and its samples. Idempotent; unknown ids are fine."""
        ...


class NgramProposer:
    """Prompt lookup: what followed the latest earlier occurrence of the sequence's last n tokens.

    The longest n in [min_n, max_n] that occurred before wins, then its most recent occurrence. A
    continuation that runs into the end goes on periodically: a loop is guessed as long as asked.
    Source: Saxena, "Prompt Lookup Decoding", 2023.
    """

    def __init__(self, min_n: int = 2, max_n: int = 4) -> None:
        """Raises ConfigError unless 1 <= min_n <= max_n."""
        if not 1 <= min_n <= max_n:
            raise ConfigError(
                f"prompt lookup needs 1 <= min_n <= max_n, got {min_n} and {max_n}", field="min_n"
            )
        self._min_n = min_n
        self._max_n = max_n
        self._texts: dict[str, dict[int, _Text]] = {}  # by request, by sample

    def propose(self, asks: Sequence[DraftAsk]) -> list[list[int]]:
        """See Proposer.propose. One vectorised pass over the history per ask."""
        return [self._propose(ask) for ask in asks]

    def forget(self, request_id: str) -> None:
        """See Proposer.forget."""
        self._texts.pop(request_id, None)

    def _propose(self, ask: DraftAsk) -> list[int]:
        samples = self._texts.setdefault(ask.request_id, {})
        text = samples.setdefault(ask.sample_index, _Text())
        text.follow(ask.history)
        end = text.continuation(self._min_n, self._max_n)
        if end is None:
            return []
        period = len(ask.history) - end
        return [ask.history[end + i % period] for i in range(ask.max_drafts)]


@dataclass(slots=True)
class _Text:
    """The tokens of one sequence as an array that grows, so that a search is vectorised."""

    count: int = 0
    memory: np.ndarray = field(default_factory=lambda: np.empty(_INITIAL_CAPACITY, np.int64))

    def follow(self, history: Sequence[int]) -> None:
        """Take in what is new; start again if `history` is not a continuation (its end shows)."""
        total = len(history)
        if total < self.count or (self.count and history[self.count - 1] != self._last):
            self.count = 0
        if total > len(self.memory):
            grown = np.empty(2 * total, np.int64)
            grown[: self.count] = self.memory[: self.count]
            self.memory = grown
        self.memory[self.count : total] = history[self.count :]
        self.count = total

    @property
    def _last(self) -> int:
        return int(self.memory[self.count - 1])

    def continuation(self, min_n: int, max_n: int) -> int | None:
        """Where the latest earlier occurrence of the longest known tail ends."""
        tokens = self.memory[: self.count]
        if self.count <= min_n:
            return None
        # Last positions of candidates, all but the tail itself; narrowed token by token.
        found = np.flatnonzero(tokens[:-1] == tokens[-1])
        length = 1
        while found.size and length < max_n:
            longer = found[found >= length]
            longer = longer[tokens[longer - length] == tokens[-1 - length]]
            if not longer.size:
                break
            found, length = longer, length + 1
        return int(found[-1]) + 1 if found.size and length >= min_n else None
