"""Proposers guess the next tokens of a sequence; the target model checks the guesses in one step.

A guess is accepted only if the target's own sample at that position is the same token (runner.py).
So a proposer changes how fast tokens come, never which tokens come. This file has the seam
(`Proposer`), prompt lookup (`NgramProposer`), which needs no model, and `HeadProposer`, which hands
on what a draft head has guessed. draft.py has the proposer that uses a small model.
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
    """A question to a proposer: which tokens, at most `max_drafts`, follow `history`?

    `history` holds all known tokens, prompt first. `position` is the index, in the output, of the
    first guessed token. From `params`, `sample_index` and `position` follow the random numbers with
    which the target will sample at `position`. `made`: the guesses of the model's draft head.
    """

    request_id: str
    history: Sequence[int]
    max_drafts: int
    params: SamplingParams
    position: int
    sample_index: int = 0
    made: Sequence[int] = ()


class Proposer(Protocol):
    """Guesses tokens. The engine thread owns it; it may keep state per (request, sample)."""

    def propose(self, asks: Sequence[DraftAsk]) -> list[list[int]]:
        """Return, per ask and in order, at most max_drafts tokens; an empty list means no guess."""
        ...

    def forget(self, request_id: str) -> None:
        """Drop the state of a request and its samples. Unknown ids are ignored."""
        ...


class HeadProposer:
    """Hands on the guesses that the model's draft head made in the step before (head_drafts.py)."""

    def propose(self, asks: Sequence[DraftAsk]) -> list[list[int]]:
        """See Proposer.propose."""
        return [list(ask.made[: ask.max_drafts]) for ask in asks]

    def forget(self, request_id: str) -> None:
        """Do nothing: the guesses belong to the sequence."""


class NgramProposer:
    """Prompt lookup: finds where the last n tokens occurred before, and guesses what followed
    there.

    The longest n in [min_n, max_n] that occurred before is used; of its occurrences, the latest. If
    the text that followed there reaches the end of the sequence, the guess repeats it: a loop is
    guessed for as long as asked. Source: Saxena, "Prompt Lookup Decoding", 2023.
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
        """See Proposer.propose. Each ask costs one vectorised pass over its history."""
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
    """The tokens of one sequence in an array that grows, so that numpy can search it."""

    count: int = 0
    memory: np.ndarray = field(default_factory=lambda: np.empty(_INITIAL_CAPACITY, np.int64))

    def follow(self, history: Sequence[int]) -> None:
        """Append the new tokens of `history`; begin anew if it does not continue the known text.

        Only its length and the last known token are compared.
        """
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
        """Return the index after the latest earlier occurrence of the longest tail, None if none.

        A tail is the last n tokens; n is at least min_n and at most max_n.
        """
        tokens = self.memory[: self.count]
        if self.count <= min_n:
            return None
        # Last positions of the candidates, which are all but the tail itself; narrowed token by
        # token.
        found = np.flatnonzero(tokens[:-1] == tokens[-1])
        length = 1
        while found.size and length < max_n:
            longer = found[found >= length]
            longer = longer[tokens[longer - length] == tokens[-1 - length]]
            if not longer.size:
                break
            found, length = longer, length + 1
        return int(found[-1]) + 1 if found.size and length >= min_n else None
