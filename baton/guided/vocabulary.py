"""The vocabulary against which grammars and thoughts are matched: what each token adds to a
text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from baton.text.tokenizer import Tokenizer


@dataclass(frozen=True, eq=False, slots=True)
class Vocabulary:
    """What each id adds to a text, as clients will read it.

    `tokens[id]` are the bytes, b"" for ids without a token and for special tokens. The texts of
    special tokens are in `specials`.
    """

    tokens: tuple[bytes, ...]
    specials: Mapping[str, int]
    eos_token_ids: tuple[int, ...]
    encode: Callable[[str], Sequence[int]]

    @property
    def num_words(self) -> int:
        """The number of int32 words of a mask with one bit per id."""
        return -(-len(self.tokens) // 32)


def load_vocabulary(model_dir: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> Vocabulary:
    """Return the vocabulary of a checkpoint's tokenizer.

    It is for a model of `vocab_size` ids (padding included). A large one takes up to a second.
    Raises ModelRefused.
    """
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
