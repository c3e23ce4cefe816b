"""A byte vocabulary with a few longer tokens; outputs walked through matchers without a model."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from baton.guided.matcher import Matcher
from baton.guided.vocabulary import Vocabulary

MERGED = (b'{"', b'":', b'", ', b"}}", b"true", b"</think>", b"k>\n", b"</think>\n", b"  ", b"12")
SPECIALS = {"<s>": 266, "[CALL]": 268}
EOS, END = 267, 269  # two tokens that end an output
VOCAB_SIZE = 280  # with padding


def vocabulary() -> Vocabulary:
    tokens = [bytes([byte]) for byte in range(256)] + list(MERGED)
    tokens += [b""] * (VOCAB_SIZE - len(tokens))
    return Vocabulary(tuple(tokens), SPECIALS, (EOS, END), encode)


def encode(text: str) -> list[int]:
    """The longest tokens first, as a tokenizer might."""
    rest, ids, known = text.encode(), [], sorted(MERGED, key=len, reverse=True)
    while rest:
        piece = next((token for token in known if rest.startswith(token)), rest[:1])
        ids.append(256 + MERGED.index(piece) if piece in MERGED else rest[0])
        rest = rest[len(piece) :]
    return ids


def allowed(matcher: Matcher) -> set[int]:
    """Ids that may come next."""
    row = np.zeros(-(-VOCAB_SIZE // 32), np.int32)
    matcher.fill(row)
    bits = np.unpackbits(row.view(np.uint8), bitorder="little")[:VOCAB_SIZE]
    return set(np.flatnonzero(bits).tolist())


def walk(matcher: Matcher, tokens: Sequence[int]) -> Matcher:
    """The matcher after `tokens`, all of which it must allow."""
    for token in tokens:
        assert token in allowed(matcher), token
        assert matcher.advance(token)
    return matcher


def random_output(matcher: Matcher, seed: int, plain: bool = False, limit: int = 400) -> bytes:
    """Bytes of a random walk to an end; `plain`: ASCII where there is a choice."""
    draw, out, vocab = random.Random(seed), b"", vocabulary()
    for _ in range(limit):
        may_come = allowed(matcher)
        ascii_only = {token for token in may_come if vocab.tokens[token].isascii()}
        token = draw.choice(sorted((plain and ascii_only) or may_come))
        assert matcher.advance(token)
        if token in vocab.eos_token_ids:
            return out
        out += vocab.tokens[token]
    raise AssertionError(f"no end after {limit} tokens: {out!r}")
