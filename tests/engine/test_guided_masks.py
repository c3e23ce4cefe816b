"""Masks on logits: whatever the bits, what they forbid is -inf and the rest is untouched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from baton.engine.running import masks
from baton.engine.state.interface import SequenceChunk
from baton.protocol.sampling import SamplingParams


class Bits:
    """A guide that allows what it was told, row by row."""

    failure = ""

    def __init__(self, rows: Sequence[np.ndarray]) -> None:
        self._rows = rows

    def fill(self, _: object, __: int, drafts: Sequence[int], rows: np.ndarray) -> int:
        rows[:] = self._rows
        return 1 + len(drafts)


@dataclass(frozen=True)
class Row:
    chunk: SequenceChunk
    first: int
    drafts: Sequence[int]


@given(
    st.integers(1, 700),
    st.sampled_from([0.0, 0.001, 0.02, 0.5, 0.98, 1.0]),
    st.integers(0, 3),
    st.integers(0, 2**32 - 1),
)
def test_the_fast_ways_equal_the_plain_one(
    vocab_size: int, share: float, drafts: int, seed: int
) -> None:
    random = np.random.default_rng(seed)
    words = -(-vocab_size // 32)
    allowed = random.random((1 + drafts, 32 * words)) < share
    rows = [np.packbits(row, bitorder="little").view(np.int32) for row in allowed]
    logits = torch.from_numpy(random.standard_normal((2 + drafts, vocab_size)).astype(np.float32))
    expected = logits.clone()
    for index, row in enumerate(allowed):
        if row.any():  # of which nothing would be left keeps its logits
            expected[1 + index, torch.from_numpy(~row[:vocab_size])] = -torch.inf
    guide: Any = Bits(rows)
    chunk = SequenceChunk("r", (1,), 0, (), history=(1,), num_prompt=1, guide=guide)
    masks.apply(logits, [Row(chunk, 1, (9,) * drafts)])
    assert torch.equal(logits, expected)


@given(st.lists(st.integers(0, 63), min_size=1, max_size=70), st.integers(0, 3), st.booleans())
def test_a_list_of_tokens_masks_every_row_of_its_chunk(
    allowed: list[int], copies: int, fans_out: bool
) -> None:
    logits = torch.randn(copies + 3, 64, generator=torch.Generator().manual_seed(len(allowed)))
    expected = logits.clone()
    expected[1 : copies + 2, [id_ for id_ in range(64) if id_ not in allowed]] = -torch.inf
    chunk = SequenceChunk(
        "r", (1,), 0, (), history=(1,), num_prompt=1,
        sample=SamplingParams(allowed_token_ids=tuple(allowed)),
        fan_out=tuple(range(copies + 1)) if fans_out else (),
    )  # fmt: skip
    masks.apply(logits, [Row(chunk, 1, () if fans_out else (9,) * copies)])
    assert torch.equal(logits, expected)
