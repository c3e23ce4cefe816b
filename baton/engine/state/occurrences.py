"""Occurrences: how often each token is in a text that only grows.

Penalties ask at every step which tokens occurred and how often. Counting the whole text each time
would make steps slower as the text grows. `Occurrences` counts only the new tokens, so a step costs
the tokens that it adds and a copy of one number per distinct token.

    tokens   5 6 7 5 9 | 5 6       distinct [5 6 7 9], counts [1 1 0 0]     (| = end of the prompt)

It belongs to one sequence and is only a cache: made anew from the same tokens it gives the same
counts. So a preempted, failed over or forked sequence starts with an empty one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

_INITIAL: Final = 64


@dataclass(eq=False, slots=True)
class Occurrences:
    """Distinct tokens of one sequence, in the order of their first appearance."""

    _taken: int = 0  # tokens of the text that are in the counts
    _whole: bool = True  # whether tokens of the prompt are listed, too
    _slots: dict[int, int] = field(default_factory=dict)
    _ids: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    _counts: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))

    def count(
        self, history: Sequence[int], num_prompt: int, whole: bool, ahead: Sequence[int] = ()
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return (distinct tokens, how often each is in the output), both int64 [n].

        The arrays are valid until the next call. `history` is the text, prompt first (`num_prompt`
        tokens); since the last call it may only have grown. `whole`: tokens of the prompt are
        listed too, with count 0 unless they are also in the output. `ahead`: drafts that follow
        `history` in this call alone; they count as output.
        """
        if whole != self._whole or len(history) < self._taken:
            self._restart(whole)
        if not self._taken:
            self._take_first(history, num_prompt)
        for token in history[self._taken :]:
            slot = self._slot(token)  # first: it may replace the arrays
            self._counts[slot] += 1
        self._taken = len(history)
        known = len(self._slots)
        if not ahead:
            return self._ids[:known], self._counts[:known]
        new = [token for token in dict.fromkeys(ahead) if token not in self._slots]
        slots = {token: known + i for i, token in enumerate(new)}
        ids = np.concatenate([self._ids[:known], np.array(new, np.int64)])
        counts = np.concatenate([self._counts[:known], np.zeros(len(new), np.int64)])
        for token in ahead:
            counts[self._slots.get(token, slots.get(token))] += 1
        return ids, counts

    def _restart(self, whole: bool) -> None:
        self._taken, self._whole = 0, whole
        self._slots.clear()

    def _take_first(self, history: Sequence[int], num_prompt: int) -> None:
        """Count a whole text at once with numpy, because it may be long."""
        start = 0 if self._whole else num_prompt
        text = np.array(history[start:], dtype=np.int64)
        ids, inverse = np.unique(text, return_inverse=True)
        outputs = inverse[num_prompt - start :]
        self._ids = np.empty(max(_INITIAL, 2 * len(ids)), np.int64)
        self._counts = np.empty_like(self._ids)
        self._ids[: len(ids)] = ids
        self._counts[: len(ids)] = np.bincount(outputs, minlength=len(ids))
        self._slots = {token: slot for slot, token in enumerate(ids.tolist())}
        self._taken = len(history)

    def _slot(self, token: int) -> int:
        slot = self._slots.get(token)
        if slot is not None:
            return slot
        slot = self._slots[token] = len(self._slots)
        if slot == len(self._ids):
            self._ids = np.resize(self._ids, 2 * slot)
            self._counts = np.resize(self._counts, 2 * slot)
        self._ids[slot], self._counts[slot] = token, 0
        return slot
