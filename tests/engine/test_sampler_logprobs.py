"""What is told about tokens: exact ranks and alternatives, also on ties, whatever the slabs."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.engine.sampling import logprobs
from baton.protocol.errors import InternalError
from baton.protocol.events import TokenLogprob


def logits_of(rows: int, vocab: int = 30, seed: int = 0) -> torch.Tensor:
    """Rounded: many ties."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, vocab, generator=generator) * 2).round()


def plain(row: torch.Tensor, token: int, count: int) -> list[tuple[int, int]]:
    """The definition: (token, rank) of the token itself, then of the best others."""
    values = row.tolist()
    order = sorted(range(len(values)), key=lambda i: (-values[i], i))
    rank = {token: place for place, token in enumerate(order, start=1)}
    return [(token, rank[token]), *((t, rank[t]) for t in order[:count] if t != token)]


def pairs(told: tuple[TokenLogprob, ...]) -> list[tuple[int, int]]:
    return [(one.token_id, one.rank) for one in told]


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 29), st.integers(0, 31)), min_size=1, max_size=8),
    st.integers(0, 10**6),
)
def test_ranks_and_alternatives(rows: list[tuple[int, int]], seed: int) -> None:
    logits = logits_of(len(rows), seed=seed)
    tokens, counts = [token for token, _ in rows], [count for _, count in rows]
    told = logprobs.report(logits, tokens, counts)
    expected = logits.log_softmax(-1)
    for row, (token, count) in enumerate(rows):
        assert pairs(told[row]) == plain(logits[row], token, count)
        assert all(one.logprob == float(expected[row, one.token_id]) for one in told[row])
        assert told[row] == logprobs.report(logits[row : row + 1], [token], [count])[0]


def test_slabs_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = logits_of(9)
    tokens, counts = list(range(9)), [0, 5, 1, 0, 2, 20, 3, 0, 0]
    whole = logprobs.report(logits, tokens, counts), logprobs.candidates(logits, counts)
    monkeypatch.setattr(logprobs, "SLAB_ELEMENTS", 1)
    assert (logprobs.report(logits, tokens, counts), logprobs.candidates(logits, counts)) == whole


def test_candidates_are_the_best_and_allowed() -> None:
    logits = torch.tensor([[0.0, 2.0, -math.inf, 2.0, 1.0], [-math.inf, 3.0] + [-math.inf] * 3])
    scores = logits.log_softmax(-1)
    first, second = logprobs.candidates(scores, [5, 2])
    assert pairs(first) == [(1, 1), (3, 2), (4, 3), (0, 4)]
    assert pairs(second) == [(1, 1)]
    assert second[0].logprob == 0.0
    assert sum(math.exp(one.logprob) for one in first) == pytest.approx(1.0)
    assert [pairs(row) for row in logprobs.candidates(scores, [2, 1])] == [
        [(1, 1), (3, 2)],
        [(1, 1)],
    ]


def test_logits_that_are_not_numbers_are_an_error() -> None:
    with pytest.raises(InternalError, match="not numbers"):
        logprobs.candidates(torch.tensor([[0.0, math.nan]]), [1])


def test_tokens_asked_for_by_their_ids_come_with_their_ranks() -> None:
    (row,) = logits_of(1)
    everything = plain(row, 4, 30)
    rank = dict(everything)
    told = logprobs.report_ids(row, 4, [9, 2, 4, 9])
    assert pairs(told) == [(4, rank[4]), *sorted([(9, rank[9]), (2, rank[2])], key=lambda x: x[1])]
    expected = row.log_softmax(-1)
    assert [one.logprob for one in told] == [float(expected[one.token_id]) for one in told]


def test_minus_one_is_the_whole_vocabulary() -> None:
    logits = logits_of(2)
    assert logprobs.report(logits, [3, 5], [-1, 0]) == logprobs.report(logits, [3, 5], [30, 0])
    assert len(logprobs.report(logits, [3, 5], [-1, 0])[0]) == 30
