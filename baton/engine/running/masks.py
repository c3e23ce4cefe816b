"""Masks on logits: what a grammar, or a list of token ids, does not allow becomes -inf, before
anything else looks at a row.

So temperature, filters, penalties, bias and noise choose among what is allowed; min_tokens and bad
words that would leave nothing yield to it (penalties.py). Log probabilities are told of
the logits before this.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from baton.engine.state.interface import SequenceChunk


class AskedRows(Protocol):
    """A chunk that samples, from row `first` on: one row, and one after each draft; or, where it
    fans out, the same row for each of its samples."""

    @property
    def chunk(self) -> SequenceChunk: ...
    @property
    def first(self) -> int: ...
    @property
    def drafts(self) -> Sequence[int]: ...


def apply(logits: Tensor, asked: Sequence[AskedRows]) -> None:
    """Mask the rows of logits [N, vocab] float32 whose chunks have guides, or name the tokens that
    they allow. Mutates them.

    A row of which nothing would be left keeps its logits: its guide says what went wrong, or nobody
    looks at it.
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
    """rows [n, vocab] float32: -inf but for the tokens `ids`."""
    allowed = torch.tensor(ids, dtype=torch.int64, device=rows.device)
    kept = rows[:, allowed]
    rows.fill_(-torch.inf)
    rows[:, allowed] = kept


def _mask(row: Tensor, words: np.ndarray) -> None:
    """row [vocab] float32: -inf where the bit is 0."""
    if row.device.type == "cpu":
        _mask_on_cpu(row.numpy(), words)
        return
    allowed = np.unpackbits(words.view(np.uint8), bitorder="little", count=row.shape[0])
    row.masked_fill_(torch.from_numpy(allowed).to(row.device) == 0, -torch.inf)


def _mask_on_cpu(row: np.ndarray, words: np.ndarray) -> None:
    """In numpy: torch's masked_fill_ took 700 us at 152k words, this 23 (nearly all are allowed) to
    120 us, and 30 where few are."""
    some = np.flatnonzero(words)
    if 4 * some.size < words.size:  # a JSON text between its strings
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
