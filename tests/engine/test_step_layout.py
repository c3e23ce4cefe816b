"""How a step is laid out for a model: slots and tables, and cosines and sines of positions."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from baton.engine.kernels.rope import FEWEST_KEPT, MOST_BYTES, Frequencies, PairRotation, Rotation
from baton.engine.state.batch import flatten
from baton.engine.state.interface import SequenceChunk
from baton.protocol.kv_spec import HeldBlocks

BLOCK = 4
CPU = torch.device("cpu")


@st.composite
def steps(draw: st.DrawFn) -> list[SequenceChunk]:
    """Sequences in two layer groups, of which the second has lost blocks before its window; half of
    the steps only decode."""
    most = draw(st.sampled_from([1, 9]))
    chunks: list[SequenceChunk] = []
    for index in range(draw(st.integers(1, 4))):
        start, count = draw(st.integers(0, 40)), draw(st.integers(1, most))
        num_blocks = -(-(start + count) // BLOCK)
        lost = draw(st.integers(0, start // BLOCK))
        ids = draw(st.permutations(range(100 * index, 100 * index + num_blocks)))
        held = HeldBlocks(tuple(ids)), HeldBlocks(tuple(ids[lost:]), lost)
        tokens = draw(st.lists(st.integers(0, 999), min_size=count, max_size=count))
        chunks.append(SequenceChunk(str(index), tokens, start, held))
    return chunks


@given(steps())
def test_each_row_lies_in_its_sequences_block(chunks: list[SequenceChunk]) -> None:
    step = flatten(chunks, cast("Any", None), BLOCK, CPU)
    assert step.token_ids.tolist() == [token for chunk in chunks for token in chunk.token_ids]
    rows = [(chunk, chunk.start + i) for chunk in chunks for i in range(len(chunk.token_ids))]
    assert step.positions.tolist() == [position for _, position in rows]
    for group, table in enumerate(step.batch.tables):
        held = [chunk.blocks[group] for chunk in chunks]
        assert table.first == tuple(each.first for each in held)
        for each, blocks in zip(held, table.blocks.tolist(), strict=True):
            width = len(blocks)
            assert blocks == [*each.ids, *[each.ids[-1]] * width][:width]
        found = [divmod(slot, BLOCK) for slot in table.slots.tolist()]
        assert found == [
            (chunk.blocks[group].ids[at // BLOCK - chunk.blocks[group].first], at % BLOCK)
            for chunk, at in rows
        ]


@pytest.mark.parametrize("factor", [1.0, 1.3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_kept_rotations_are_those_of_the_positions(dtype: torch.dtype, factor: float) -> None:
    each = torch.rand(32, generator=torch.Generator().manual_seed(2))
    frequencies = Frequencies(each, factor, PairRotation.NEIGHBOURS)
    most = MOST_BYTES // (2 * 32 * dtype.itemsize)
    for positions in ([0], [5, 3, 5], [FEWEST_KEPT, 1], [most - 1], [most, 2], [7], []):
        at = torch.tensor(positions, dtype=torch.int64)
        found = frequencies.at(at, dtype)
        wanted = Rotation.at(at, each, dtype, factor, PairRotation.NEIGHBOURS)
        assert torch.equal(found.cos, wanted.cos)
        assert torch.equal(found.sin, wanted.sin)
        assert (found.pairs, found.rotated) == (wanted.pairs, 64)


def test_rotations_are_kept_as_far_as_they_were_asked_for() -> None:
    frequencies = Frequencies(torch.rand(8), 1.0, PairRotation.HALVES)
    few = frequencies.table(7, torch.bfloat16)
    assert few is not None
    assert len(few.cos) == FEWEST_KEPT
    assert frequencies.table(FEWEST_KEPT - 1, torch.bfloat16) is few
    more = frequencies.table(FEWEST_KEPT, torch.bfloat16)
    assert more is not None
    assert len(more.cos) == 2 * FEWEST_KEPT
    assert torch.equal(more.cos[:FEWEST_KEPT], few.cos)
    most = MOST_BYTES // (2 * 8 * torch.bfloat16.itemsize)
    assert frequencies.table(most, torch.bfloat16) is None
    assert frequencies.table(0, torch.bfloat16) is more
