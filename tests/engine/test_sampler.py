"""The sampler: exact supports, right distribution,
and no dependence on batch mates or paths taken."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.engine.sampling import sampler
from baton.engine.sampling.sampler import Draw, sample
from baton.protocol.errors import InternalError
from baton.protocol.sampling import SamplingParams


def draw(seed: int | None = 0, position: int = 0, sample_index: int = 0, **params: Any) -> Draw:
    """One draw; keyword arguments are sampling parameters."""
    return Draw(SamplingParams(seed=seed, **params), sample_index, position)


def logits_of(rows: int, vocab: int, seed: int = 0, spread: float = 2.0) -> torch.Tensor:
    """Random logits, [rows, vocab]."""
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * spread


def repeated(logits: list[float], draws: list[Draw]) -> list[int]:
    """The same row of logits for every draw."""
    return sample(torch.tensor([logits]).expand(len(draws), -1).contiguous(), draws)


def test_greedy_takes_the_lowest_id_on_ties() -> None:
    assert repeated([0.0, 3.0, 1.0, 3.0], [draw(None, temperature=0.0)]) == [1]
    assert repeated([0.0, 3.0, 1.0, 3.5], [draw(None, temperature=1e-6)]) == [3]


@pytest.mark.parametrize("params", [{}, {"top_k": 4}, {"top_p": 0.999}, {"temperature": 2.0}])
def test_the_distribution_is_the_softmax(params: dict[str, Any]) -> None:
    logits = [0.0, 1.0, -1.0, 2.0]
    count = 20_000
    tokens = repeated(logits, [draw(seed, **params) for seed in range(count)])
    expected = torch.tensor(logits).div(params.get("temperature", 1.0)).softmax(-1) * count
    observed = torch.tensor([tokens.count(i) for i in range(4)])
    chi_square = ((observed - expected) ** 2 / expected).sum()
    assert float(chi_square) < 16.3  # 3 degrees of freedom, p = 0.001; seeds are fixed


def test_positions_and_samples_are_independent_draws() -> None:
    logits, count = [0.0] * 8, 8_000
    by_position = repeated(logits, [draw(5, position=i) for i in range(count)])
    by_sample = repeated(logits, [draw(5, sample_index=i) for i in range(count)])
    for tokens in (by_position, by_sample):
        assert all(abs(n - count / 8) < 130 for n in Counter(tokens).values())
    pairs = Counter(itertools.pairwise(by_position))
    assert len(pairs) == 64
    assert max(pairs.values()) < 2 * count / 64


def test_seeds_of_64_bits_matter_in_every_bit() -> None:
    row = [0.0] * 512
    seeds = [0, 1, 2**31, 2**32, 2**53, 2**63, 2**64 - 1]
    tokens = repeated(row, [draw(seed) for seed in seeds])
    assert len(set(tokens)) == len(seeds)
    assert tokens == repeated(row, [draw(seed) for seed in seeds])


PARAMS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.3, 1.0, 1.7]),
        "top_k": st.sampled_from([-1, 0, 1, 3, 40]),
        "top_p": st.sampled_from([0.1, 0.7, 0.95, 1.0]),
        "min_p": st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    }
)


@settings(deadline=None, max_examples=60)
@given(st.lists(PARAMS, min_size=1, max_size=6), st.integers(0, 2**64 - 1), st.integers(0, 99))
def test_batch_mates_change_nothing(mates: list[dict[str, Any]], seed: int, position: int) -> None:
    logits = logits_of(len(mates), 50, seed % 1000).round(decimals=1)  # rounded: many ties
    draws = [draw((seed + i) % 2**64, position, **mate) for i, mate in enumerate(mates)]
    together = sample(logits, draws)
    alone = [sample(logits[i : i + 1], [draws[i]])[0] for i in range(len(mates))]
    assert together == alone
    assert together[::-1] == sample(logits.flip(0), draws[::-1])


@settings(deadline=None, max_examples=60)
@given(PARAMS, st.integers(0, 2**32))
def test_equals_the_plain_definition(params: dict[str, Any], seed: int) -> None:
    logits = logits_of(1, 50, seed % 1000).round(decimals=1)
    assert sample(logits, [draw(seed, **params)]) == [plain_choice(logits[0], draw(seed, **params))]


def plain_choice(logits: torch.Tensor, one: Draw) -> int:
    """The definition, in Python floats: filter, add noise by vocabulary id, take the best."""
    p = one.params
    if one.greedy:
        return int(logits.argmax())
    scaled = ((logits - logits.max()) / p.temperature).tolist()
    order = sorted(range(len(scaled)), key=lambda i: (-scaled[i], i))
    order = [i for i in order if p.min_p == 0 or scaled[i] >= math.log(p.min_p)]
    if p.top_k > 0:
        order = order[: p.top_k]
    mass = sum(math.exp(scaled[i]) for i in order)
    kept, before = [], 0.0
    for i in order:
        if before < p.top_p * mass or p.top_p == 1.0:
            kept.append(i)
        before += math.exp(scaled[i])
    return max(kept, key=lambda i: scaled[i] + plain_gumbel(one.key, i))


def plain_gumbel(key: int, token: int) -> float:
    """SplitMix64 at (key, token), in Python integers."""
    mask = 2**64 - 1
    z = (key + (token + 1) * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    z ^= z >> 31
    return -math.log(-math.log(((z >> 12) + 0.5) / 2**52))


@pytest.mark.parametrize(
    ("params", "support"),
    [
        ({"top_k": 2}, {3, 1}),
        ({"top_k": 1}, {3}),
        ({"top_p": 0.6}, {3}),  # 3 alone has 0.64
        ({"top_p": 0.7}, {3, 1}),
        ({"min_p": 0.3}, {3, 1}),
        ({"min_p": 0.1}, {3, 1, 0}),
        ({"top_k": 2, "top_p": 0.75}, {3, 1}),  # renormalised after top-k: 3 has 0.73
        ({"top_k": 2, "top_p": 0.7}, {3}),
        ({"min_p": 0.3, "top_p": 0.72}, {3}),
    ],
)
def test_supports(params: dict[str, Any], support: set[int]) -> None:
    tokens = repeated([0.0, 1.0, -1.0, 2.0], [draw(seed, **params) for seed in range(600)])
    assert set(tokens) == support


@pytest.mark.parametrize(
    "params",
    [
        {"top_k": 10},
        {"top_p": 0.6},
        {"top_k": 300, "top_p": 0.99},
        {"top_k": 300, "top_p": 0.5},  # the mass that top-p shares out lies beyond the candidates
        {"top_k": 16, "top_p": 0.9},
        {"min_p": 0.2},
        {"min_p": 0.01, "top_p": 0.8},
    ],
)
def test_few_candidates_give_what_the_whole_vocabulary_gives(
    params: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Rounded: ties across the border of the candidates.
    logits = logits_of(200, 400).round(decimals=1)
    draws = [draw(i, i, **params) for i in range(200)]
    monkeypatch.setattr(sampler, "CANDIDATES", ())
    whole = sample(logits, draws)
    monkeypatch.setattr(sampler, "CANDIDATES", (4, 16))
    assert sample(logits, draws) == whole
    assert whole[:8] == [plain_choice(logits[i], draws[i]) for i in range(8)]


def test_slabs_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = logits_of(9, 300)
    draws = [draw(i, top_k=5 if i % 2 else 0) for i in range(9)]
    whole = sample(logits, draws)
    monkeypatch.setattr(sampler, "SLAB_ELEMENTS", 1)
    assert sample(logits, draws) == whole


def test_approximate_finalists_contain_the_exact_winner() -> None:
    logits = logits_of(64, 2000, spread=1.0)
    draws = [draw(seed) for seed in range(64)]
    tokens = sample(logits, draws)
    for row, one in enumerate(draws):
        assert tokens[row] == plain_choice(logits[row], one)


def test_masked_logits_are_never_drawn() -> None:
    row = [-math.inf, 0.0, -math.inf, 0.5]
    cases: list[dict[str, Any]] = [{}, {"top_k": 3}, {"top_p": 0.999}]
    for params in cases:
        tokens = repeated(row, [draw(seed, **params) for seed in range(200)])
        assert set(tokens) == {1, 3}


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_not_numbers_are_an_error(bad: float) -> None:
    cases: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 1.0}, {"top_k": 2}]
    for params in cases:
        with pytest.raises(InternalError, match="not numbers"):
            repeated([0.0, bad, 1.0], [draw(**params)])
