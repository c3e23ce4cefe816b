"""Masks on logits: a token that a grammar or a list of token ids does not allow becomes -inf.

Masks are applied before all else, so temperature, filters, penalties, bias and noise choose among
allowed tokens. If min_tokens and bad words would forbid the rest, they have no effect
(penalties.py). Reported log probabilities are those of the logits before the masks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from baton.engine.state.interface import SequenceChunk


class AskedRows(Protocol):
    """A chunk that samples, whose rows of logits begin at `first`.

    It has one row, and one more after each draft. A chunk that fans out has one row for each of its
    samples instead.
    """

    @property
    def chunk(self) -> SequenceChunk: ...
    @property
    def first(self) -> int: ...
    @property
    def drafts(self) -> Sequence[int]: ...


def apply(logits: Tensor, asked: Sequence[AskedRows]) -> None:
    """Mask, in place, the rows of logits [N, vocab] float32 whose chunks have a guide or allowed
    tokens.

    A row whose mask would leave no token keeps its logits: either its guide reports an error, or
    nobody uses the row.
    """
    vocab_size = logits.shape[1]
    for one in asked:
        guide, params = one.chunk.guide, one.chunk.sample
        if params is not None and params.allowed_token_ids:  # then there is no guide
            num_rows = max(len(one.chunk.fan_out), 1 + len(one.drafts))
            _keep_only(logits[one.first : one.first + num_rows], params.allowed_token_ids)
        if guide is None:
            continue
        rows = np.zeros((1 + len(one.drafts), -(-vocab_size // 32)), np.int32)
        count = guide.fill(one.chunk.history, one.chunk.num_prompt, one.drafts, rows)
        copies = max(1, len(one.chunk.fan_out))
        for index in range(count * copies):
            if rows[index // copies].any():
                _mask(logits[one.first + index], rows[index // copies])


def _keep_only(rows: Tensor, ids: Sequence[int]) -> None:
    """Set rows [n, vocab] float32 to -inf, except at the tokens `ids`."""
    allowed = torch.tensor(ids, dtype=torch.int64, device=rows.device)
    kept = rows[:, allowed]
    rows.fill_(-torch.inf)
    rows[:, allowed] = kept


def _mask(row: Tensor, words: np.ndarray) -> None:
    """Set row [vocab] float32 to -inf where the token's bit in `words` is 0."""
    if row.device.type == "cpu":
        _mask_on_cpu(row.numpy(), words)
        return
    allowed = np.unpackbits(words.view(np.uint8), bitorder="little", count=row.shape[0])
    row.masked_fill_(torch.from_numpy(allowed).to(row.device) == 0, -torch.inf)


def _mask_on_cpu(row: np.ndarray, words: np.ndarray) -> None:
    """Do `_mask` in numpy.

    Over 152k words torch's masked_fill_ took 700 us; this takes 23 to 120 us if most tokens are
    allowed, and 30 us if few are.
    """
    some = np.flatnonzero(words)
    if 4 * some.size < words.size:  # few tokens are allowed: JSON between its strings
        bits = np.unpackbits(words[some].view(np.uint8), bitorder="little").reshape(-1, 32)
        word, bit = np.nonzero(bits)
        ids = 32 * some[word] + bit
        ids = ids[ids < row.shape[0]]
        kept = row[ids]
        row.fill(-np.inf)
        row[ids] = kept
        return
    allowed = np.unpackbits(words.view(np.uint8), bitorder="little", count=row.shape[0])
    np.copyto(row, -np.inf, where=~allowed.view(np.bool_))
