"""The end of a model's thoughts: a text in its output from which on a grammar holds, and a limit
after which that text is written for the model.

Tokens do not know where it begins and ends, so it is looked for in their bytes. A token that would
end the thought and say more at once is ruled out: what it said more would have met no grammar.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace
from functools import cached_property

from baton.guided.vocabulary import Vocabulary


class ThoughtEnd:
    """`marker` in outputs over one vocabulary. Immutable; shared by all outputs."""

    def __init__(self, marker: str, vocabulary: Vocabulary) -> None:
        self._marker = marker.encode()
        self._tokens = vocabulary.tokens
        self._special = vocabulary.specials.get(marker)

    def follow(self, tail: bytes, token_id: int) -> bytes | None:
        """What to remember after `token_id`, given what was remembered before; None = the marker
        is complete."""
        if token_id == self._special:
            return None
        text = tail + self._tokens[token_id]
        if self._marker in text:
            return None
        return text[-(len(self._marker) - 1) :] if len(self._marker) > 1 else b""

    def overshooting(self, tail: bytes) -> list[int]:
        """Tokens that would complete the marker and go on behind it."""
        ruled_out = list(self._containing)
        marker = self._marker
        for size in range(1, len(marker)):
            if tail.endswith(marker[:size]):
                ruled_out.extend(self._longer_than(marker[size:]))
        return ruled_out

    @cached_property
    def _containing(self) -> list[int]:
        return [
            token_id
            for token_id, text in enumerate(self._tokens)
            if self._marker in text[:-1] and not text.endswith(self._marker)
        ]

    @cached_property
    def _by_text(self) -> list[tuple[bytes, int]]:
        return sorted((text, token_id) for token_id, text in enumerate(self._tokens) if text)

    def _longer_than(self, start: bytes) -> list[int]:
        """Tokens that begin with `start` and go on."""
        found: list[int] = []
        at = bisect_left(self._by_text, (start, len(self._tokens)))
        while at < len(self._by_text) and self._by_text[at][0].startswith(start):
            found.append(self._by_text[at][1])
            at += 1
        return found


@dataclass(frozen=True, slots=True)
class ThoughtLimit:
    """`end_ids` follow when a thought has `most` tokens. It begins behind `start`, None = with the
    output."""

    start: ThoughtEnd | None
    end_ids: tuple[int, ...]
    most: int

    def begin(self) -> Thinking:
        """Of a new output."""
        return Thinking(self, None if self.start is None else b"")


@dataclass(frozen=True, slots=True)
class Thinking:
    """How far the thought of one output is. `waiting`: what is remembered while it has not begun;
    None = it has, `count` tokens ago. Asked no more once it is over."""

    limit: ThoughtLimit
    waiting: bytes | None
    count: int = 0

    def after(self, token_id: int) -> Thinking:
        if self.waiting is None or self.limit.start is None:
            return replace(self, count=self.count + 1)
        return replace(self, waiting=self.limit.start.follow(self.waiting, token_id))

    @property
    def forced(self) -> int | None:
        """The token that must be next; None = any may."""
        index = self.count - self.limit.most
        if self.waiting is not None or not 0 <= index < len(self.limit.end_ids):
            return None
        return self.limit.end_ids[index]
