"""Guide: one output on its way through a grammar.

Its state is a replay of the output's tokens, nothing else: made anew from the same tokens it allows
the same next ones. So a request that was preempted, moved or failed over starts with an empty one,
and a hand-over carries none.

    free (a thought)  ... its end ...   grammar ... the grammar may end: end-of-sequence allowed

A thought may have a limit: behind it nothing but its end is allowed, token by token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from baton.guided.matcher import FREE, Matcher
from baton.guided.thought import Thinking, ThoughtEnd, ThoughtLimit


@dataclass(frozen=True, eq=False, slots=True)
class Grammar:
    """A compiled grammar. `start` stands at its beginning and is only cloned; `thought`: what comes
    before it, None = nothing. `end_ids`: the tokens that end an output."""

    start: Matcher
    thought: ThoughtEnd | None
    end_ids: frozenset[int]
    limit: ThoughtLimit | None = None

    def guide(self) -> Guide:
        """For a new output."""
        return Guide(self)


@dataclass(slots=True)
class _GrammarPlace:
    """Where an output stands. `tail`: the end of a thought under way, None = it is over.
    `thinking`: how far that is, if it has a limit."""

    grammar: Grammar
    matcher: Matcher
    tail: bytes | None
    thinking: Thinking | None

    @classmethod
    def begin(cls, grammar: Grammar) -> _GrammarPlace:
        tail = None if grammar.thought is None else b""
        thinking = None if grammar.limit is None else grammar.limit.begin()
        return cls(grammar, grammar.start.clone(), tail, thinking)

    def advance(self, token_id: int) -> bool:
        if self.tail is None or self.grammar.thought is None:
            return self.matcher.advance(token_id)
        self.tail = self.grammar.thought.follow(self.tail, token_id)
        if self.thinking is not None:
            self.thinking = self.thinking.after(token_id)
        return True

    @property
    def forced(self) -> int | None:
        """The one token that may come next, because the thought has lasted long enough."""
        return None if self.tail is None or self.thinking is None else self.thinking.forced

    def fill(self, row: np.ndarray) -> None:
        if self.tail is None or self.grammar.thought is None:
            self.matcher.fill(row)
            return
        words = row.view(np.uint32)
        forced = self.forced
        if forced is not None:
            row.fill(0)
            words[forced // 32] = np.uint32(1 << forced % 32)
            return
        row.fill(-1)
        if self.matcher is FREE:
            return  # what follows the end may begin in the same token
        for token_id in self.grammar.thought.overshooting(self.tail):
            words[token_id // 32] &= np.uint32(~(1 << token_id % 32) & 0xFFFFFFFF)

    def clone(self) -> _GrammarPlace:
        return _GrammarPlace(self.grammar, self.matcher.clone(), self.tail, self.thinking)


class Guide:
    """Follows one output. Engine thread only."""

    def __init__(
        self, grammar: Grammar, place: _GrammarPlace | None = None, taken: int = 0
    ) -> None:
        self.failure = ""  # why the output cannot go on, if it cannot
        self._grammar = grammar
        self._place = place
        self._taken = taken

    def fork(self) -> Guide:
        """For an output that begins with the same tokens."""
        place = None if self._place is None else self._place.clone()
        return Guide(self._grammar, place, self._taken)

    def fill(
        self, history: Sequence[int], num_prompt: int, drafts: Sequence[int], rows: np.ndarray
    ) -> int:
        """Write the masks of the token after `history` (prompt first, `num_prompt` tokens) and of
        those after each draft into `rows`, int32 [1 + drafts, words]; how many were written. Behind
        a draft that cannot stand none is. 0, and `failure` says why, if the output cannot go on.
        """
        place = self._follow(history, num_prompt)
        for count, row in enumerate(rows):
            if self.failure:
                return 0
            place.fill(row)
            self.failure = place.matcher.error
            if count == len(drafts) or drafts[count] in self._grammar.end_ids:
                return 0 if self.failure else count + 1
            if count == 0:
                place = place.clone()
            if not place.advance(drafts[count]):
                return count + 1
        return len(rows)

    def cut(self, history: Sequence[int], num_prompt: int, drafts: list[int]) -> list[int]:
        """`drafts` up to the first that cannot stand."""
        place = self._follow(history, num_prompt)
        if self.failure:
            return []
        if place.tail is None:
            return drafts[: place.matcher.accepts(drafts)]
        place = place.clone()
        for count, draft in enumerate(drafts):
            if place.tail is None:
                return drafts[: count + place.matcher.accepts(drafts[count:])]
            if place.forced not in (None, draft):
                return drafts[:count]
            place.advance(draft)
        return drafts

    def _follow(self, history: Sequence[int], num_prompt: int) -> _GrammarPlace:
        """Take in what is new; start again if `history` has become shorter."""
        outputs = len(history) - num_prompt
        place = self._place
        if place is None or outputs < self._taken:
            place = self._place = _GrammarPlace.begin(self._grammar)
            self._taken = 0
        for index in range(num_prompt + self._taken, len(history)):
            if not place.advance(history[index]) and not self.failure:
                self.failure = place.matcher.error or "the output so far does not fit the grammar"
        self._taken = outputs
        return place
