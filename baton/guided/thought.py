"""The end of a model's thoughts, and their limit.

The end is a text in the output; after it the grammar applies. After the limit that text is written
for the model. It may begin and end within tokens, so it is looked for in their bytes. A token that
would end the thought and contain more is forbidden, because no grammar would have checked the rest.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace
from functools import cached_property

from baton.guided.vocabulary import Vocabulary


class ThoughtEnd:
    """Finds `marker` in outputs over one vocabulary. Immutable; all outputs share it."""

    def __init__(self, marker: str, vocabulary: Vocabulary) -> None:
        self._marker = marker.encode()
        self._tokens = vocabulary.tokens
        self._special = vocabulary.specials.get(marker)

    def follow(self, tail: bytes, token_id: int) -> bytes | None:
        """Return what to remember after `token_id`; None = the marker is complete.

        `tail` is what was remembered before.
        """
        if token_id == self._special:
            return None
        text = tail + self._tokens[token_id]
        if self._marker in text:
            return None
        return text[-(len(self._marker) - 1) :] if len(self._marker) > 1 else b""

    def overshooting(self, tail: bytes) -> list[int]:
        """Return the tokens that would complete the marker and contain more text after it."""
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
        """Return the tokens that begin with `start` and are longer."""
        found: list[int] = []
        at = bisect_left(self._by_text, (start, len(self._tokens)))
        while at < len(self._by_text) and self._by_text[at][0].startswith(start):
            found.append(self._by_text[at][1])
            at += 1
        return found


@dataclass(frozen=True, slots=True)
class ThoughtLimit:
    """The limit of a thought: when it has `most` tokens, `end_ids` follow.

    The thought begins after `start`; None = it begins with the output.
    """

    start: ThoughtEnd | None
    end_ids: tuple[int, ...]
    most: int

    def begin(self) -> Thinking:
        """Return the state of a new output."""
        return Thinking(self, None if self.start is None else b"")


@dataclass(frozen=True, slots=True)
class Thinking:
    """How far the thought of one output is.

    `waiting` is what `start` remembers before the thought has begun; None = it has begun, `count`
    tokens ago. It is not used after the thought.
    """

    limit: ThoughtLimit
    waiting: bytes | None
    count: int = 0

    def after(self, token_id: int) -> Thinking:
        if self.waiting is None or self.limit.start is None:
            return replace(self, count=self.count + 1)
        return replace(self, waiting=self.limit.start.follow(self.waiting, token_id))

    @property
    def forced(self) -> int | None:
        """The token that must come next; None = any token may."""
        index = self.count - self.limit.most
        if self.waiting is not None or not 0 <= index < len(self.limit.end_ids):
            return None
        return self.limit.end_ids[index]
