"""The seam of guided decoding: a backend compiles grammars for a vocabulary, a matcher follows one.

Not here: what grammars look like as text (baton/guided/grammars.py), whose tokens are matched
(guide.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from baton.protocol.sampling import GuidedDecoding
from baton.text.tokenizer import Tokenizer


@dataclass(frozen=True, eq=False, slots=True)
class Vocabulary:
    """What each id adds to a text, as clients will read it: `tokens[id]`, b"" for ids without a
    token. Specials add nothing; their own text is in `specials`."""

    tokens: tuple[bytes, ...]
    specials: Mapping[str, int]
    eos_token_ids: tuple[int, ...]
    encode: Callable[[str], Sequence[int]]

    @property
    def num_words(self) -> int:
        """int32 words of a mask with one bit per id."""
        return -(-len(self.tokens) // 32)


def load_vocabulary(model_dir: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> Vocabulary:
    """Of a checkpoint's tokenizer, for a model of `vocab_size` ids (padding included). Takes up to
    a second for a large one. Raises ModelRefused."""
    tokenizer = Tokenizer.load(model_dir)
    specials = {tokenizer.token(token_id) or "": token_id for token_id in tokenizer.special_ids}
    skipped = {*specials.values(), *eos_token_ids}
    known = min(vocab_size, tokenizer.vocab_size)
    tokens = [b"" if i in skipped else tokenizer.token_bytes(i) for i in range(known)]
    return Vocabulary(
        tokens=tuple(tokens) + (b"",) * (vocab_size - known),
        specials={text: i for text, i in specials.items() if text and i < vocab_size},
        eos_token_ids=tuple(i for i in eos_token_ids if i < vocab_size),
        encode=lambda text: tokenizer.encode(text, add_special_tokens=False),
    )


class Matcher(Protocol):
    """How far one output has come in a grammar. Owned by one thread at a time.

    End-of-sequence tokens are allowed exactly where the grammar may end.
    """

    @property
    def error(self) -> str:
        """Why it cannot go on (a limit of the backend was met); "" while it can."""
        ...

    def fill(self, row: np.ndarray) -> None:
        """Write the mask of the next token into `row`, int32 [num_words]: bit i of word w is id
        32 w + i, 1 = allowed."""
        ...

    def advance(self, token_id: int) -> bool:
        """Take the next token; False, and it is of no more use, if the grammar forbids it."""
        ...

    def accepts(self, token_ids: Sequence[int]) -> int:
        """How many of `token_ids` the grammar would allow, one after another. Changes nothing."""
        ...

    def clone(self) -> Matcher:
        """Another one at the same place: for forks, beams and drafts."""
        ...


class Backend(Protocol):
    """Compiles grammars for one vocabulary; from several threads at once."""

    def compile(self, guided: GuidedDecoding) -> Matcher:
        """A matcher at the grammar's start. Raises InvalidRequest (field `guided`),
        UnsupportedFeature for what only another backend may know."""
        ...
