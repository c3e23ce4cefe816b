"""Guide: follows one output through a grammar.

Its state is only a replay of the output's tokens: a new guide over the same tokens allows the same
next tokens. So a request that was preempted, moved or failed over begins with a new guide, and a
hand-over carries none.

    free (a thought)  ... its end ...   grammar ... the grammar may end: end-of-sequence allowed

A thought may have a limit: after it only the end of the thought is allowed, token by token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from baton.guided.matcher import FREE, Matcher
from baton.guided.thought import Thinking, ThoughtEnd, ThoughtLimit


@dataclass(frozen=True, eq=False, slots=True)
class Grammar:
    """A compiled grammar.

    `start` is a matcher at the grammar's beginning, which is only cloned. `thought` is the end of
    the free text before the grammar, None if there is no such text. `end_ids` are the tokens that
    end an output. `limit` is that of the thought, None = no limit.
    """

    start: Matcher
    thought: ThoughtEnd | None
    end_ids: frozenset[int]
    limit: ThoughtLimit | None = None

    def guide(self) -> Guide:
        """Return a guide for a new output."""
        return Guide(self)


@dataclass(slots=True)
class _GrammarPlace:
    """Where an output is.

    `tail` is what `ThoughtEnd.follow` remembers while a thought lasts, None after it. `thinking`
    counts the thought's tokens if it has a limit, else None.
    """

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
        """The only token that may come next, because the thought has reached its limit; None =
        any.
        """
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
            return  # the text after the thought may begin in the token that ends the thought
        for token_id in self.grammar.thought.overshooting(self.tail):
            words[token_id // 32] &= np.uint32(~(1 << token_id % 32) & 0xFFFFFFFF)

    def clone(self) -> _GrammarPlace:
        return _GrammarPlace(self.grammar, self.matcher.clone(), self.tail, self.thinking)


class Guide:
    """Follows one output. Only the engine thread may use it."""

    def __init__(
        self, grammar: Grammar, place: _GrammarPlace | None = None, taken: int = 0
    ) -> None:
        self.failure = ""  # why the output cannot go on; "" while it can
        self._grammar = grammar
        self._place = place
        self._taken = taken

    def fork(self) -> Guide:
        """Return a guide for another output that begins with the same tokens."""
        place = None if self._place is None else self._place.clone()
        return Guide(self._grammar, place, self._taken)

    def fill(
        self, history: Sequence[int], num_prompt: int, drafts: Sequence[int], rows: np.ndarray
    ) -> int:
        """Write masks into `rows`, int32 [1 + drafts, words]; return how many were written.

        The first mask is for the token after `history` (prompt first, `num_prompt` tokens), the
        others are for the token after each draft. There is none after a draft that the grammar
        forbids. If the output cannot go on, return 0; then `failure` says why.
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
        """Return the drafts before the first one that the grammar forbids; after a failure none."""
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
        """Take in the new tokens of `history`; begin anew if it has become shorter."""
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
