"""Matcher: how far one output has come in a grammar; and its implementation by llguidance.

llguidance is an Earley parser over derivatives of regexes. Measured with a vocabulary of 152k
random words (bench.engine_guided): compiling a grammar takes a millisecond, a mask 10-1,100 us (4
ms in the free text around tags), a token 2 us, a clone 16 us.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

import llguidance
import numpy as np

from baton.guided.grammar_text import limits, llguidance_grammar, reason_of
from baton.guided.spec import FIELD
from baton.guided.vocabulary import Vocabulary
from baton.protocol.errors import InvalidRequest, UnsupportedFeature
from baton.protocol.sampling import GuidedDecoding


class Matcher(Protocol):
    """How far one output has come in a grammar. One thread at a time owns it.

    End-of-sequence tokens are allowed exactly where the grammar may end.
    """

    @property
    def error(self) -> str:
        """Why it cannot go on (it met a limit of the library); "" while it can."""
        ...

    def fill(self, row: np.ndarray) -> None:
        """Write the mask of the next token into `row`, int32 [num_words].

        Bit i of word w stands for id 32 w + i; 1 = allowed.
        """
        ...

    def advance(self, token_id: int) -> bool:
        """Take the next token. Return False, and become useless, if the grammar forbids it."""
        ...

    def accepts(self, token_ids: Sequence[int]) -> int:
        """Return how many of `token_ids`, in order, the grammar would allow. Changes nothing."""
        ...

    def clone(self) -> Matcher:
        """Return another matcher at the same place, for forks, beams and drafts."""
        ...


class FreeMatcher:
    """A Matcher that allows every token. It has no state."""

    error = ""

    def fill(self, row: np.ndarray) -> None:
        row.fill(-1)

    def advance(self, token_id: int) -> bool:
        return True

    def accepts(self, token_ids: Sequence[int]) -> int:
        return len(token_ids)

    def clone(self) -> FreeMatcher:
        return self


FREE: Final = FreeMatcher()


class GrammarCompiler:
    """Compiles grammars for one vocabulary. Several threads may use it at once.

    Raises UnsupportedFeature for a vocabulary without end-of-sequence tokens.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        if not vocabulary.eos_token_ids:
            message = "guided: this model names no end-of-sequence token, so nothing could end"
            raise UnsupportedFeature(message, field=FIELD)
        self._specials = vocabulary.specials
        self._num_words = vocabulary.num_words
        wrapper = llguidance.TokenizerWrapper(_Wrapped(vocabulary))
        self._tokenizer = llguidance.LLTokenizer(
            wrapper, n_vocab=len(vocabulary.tokens), eos_token=list(vocabulary.eos_token_ids)
        )

    def compile(self, guided: GuidedDecoding) -> Matcher:
        """Return a matcher at the grammar's start.

        Raises InvalidRequest (field `guided`), and UnsupportedFeature for structural tags that
        cannot be written.
        """
        text = llguidance_grammar(guided, self._specials)
        matcher = llguidance.LLMatcher(self._tokenizer, text, log_level=0, limits=limits())
        if matcher.is_error():
            raise InvalidRequest(f"guided: {reason_of(matcher.get_error())}", field=FIELD)
        start = _LlguidanceMatcher(matcher)
        # The first mask builds the lexer, once for all clones. This happens here, not on the
        # engine's thread, so that an error is the request's and not its output's.
        start.fill(np.zeros(self._num_words, np.int32))
        if matcher.is_error():
            raise InvalidRequest(f"guided: {start.error}", field=FIELD)
        return start


class _LlguidanceMatcher:
    """A Matcher over llguidance."""

    def __init__(self, matcher: llguidance.LLMatcher) -> None:
        self._matcher = matcher

    @property
    def error(self) -> str:
        return reason_of(self._matcher.get_error())

    def fill(self, row: np.ndarray) -> None:
        assert row.flags.c_contiguous, "the mask is written through its address"
        self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)

    def advance(self, token_id: int) -> bool:
        return self._matcher.consume_token(token_id)

    def accepts(self, token_ids: Sequence[int]) -> int:
        return self._matcher.validate_tokens(list(token_ids))

    def clone(self) -> _LlguidanceMatcher:
        return _LlguidanceMatcher(self._matcher.deep_copy())


class _Wrapped:
    """A vocabulary in the form that llguidance.TokenizerWrapper needs."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.eos_token_id = vocabulary.eos_token_ids[0]
        self.bos_token_id = None
        self.special_token_ids = sorted({*vocabulary.specials.values(), *vocabulary.eos_token_ids})
        self.tokens = list(vocabulary.tokens)
        for text, token_id in vocabulary.specials.items():
            self.tokens[token_id] = text.encode()
        for token_id in vocabulary.eos_token_ids:
            self.tokens[token_id] = self.tokens[token_id] or f"<eos {token_id}>".encode()
        self._encode = vocabulary.encode

    def __call__(self, text: str | bytes) -> list[int]:
        return list(self._encode(text if isinstance(text, str) else text.decode()))
