"""The compiled sampling kernels against torch's twin: the same tokens, whatever the rows."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.engine.kernels.cpu.library import CpuKernels
from baton.engine.kernels.cpu.sampling import SamplingKernels
from baton.engine.sampling import sampler
from baton.engine.sampling.sampler import Draw, sample, sample_plainly
from baton.protocol.errors import InternalError
from baton.protocol.sampling import SamplingParams


def draw_of(temperature: float, seed: int, position: int = 0, **params: Any) -> Draw:
    return Draw(SamplingParams(temperature=temperature, seed=seed, **params), 0, position)


@st.composite
def rows(draw: st.DrawFn) -> tuple[torch.Tensor, list[Draw]]:
    """Logits with ties, infinities and unequal spreads, and draws of all kinds."""
    size = draw(st.sampled_from([1, 2, 15, 16, 17, 64, 100, 1023, 1024, 1025, 5000]))
    count = draw(st.integers(1, 5))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    logits = torch.randn(count, size, generator=generator) * draw(st.sampled_from([0, 0.5, 3, 60]))
    if draw(st.booleans()):
        logits = logits.round()
    for row in range(count):
        if draw(st.booleans()):  # as a grammar's mask
            kept = draw(st.integers(0, size - 1))
            ruled_out = torch.rand(size, generator=generator) < 0.9
            ruled_out[kept] = False
            logits[row, ruled_out] = -torch.inf
    temperature = st.sampled_from([0.0, 1e-5, 0.05, 0.7, 1.0, 2.0])
    filters = st.sampled_from(
        [{}, {}, {"top_k": 3}, {"top_k": 200}, {"top_p": 0.5}, {"top_p": 0.9, "top_k": 40},
         {"min_p": 0.1}, {"min_p": 0.01, "top_p": 0.95}]
    )  # fmt: skip
    draws = [
        draw_of(
            draw(temperature), draw(st.integers(0, 2**64 - 1)), draw(st.integers(0, 99)),
            **draw(filters),
        )
        for _ in range(count)
    ]  # fmt: skip
    return logits, draws


@pytest.mark.usefixtures("cpu_kernels")
@settings(deadline=None, max_examples=60)
@given(rows())
def test_the_twin_draws_the_same_tokens(given_rows: tuple[torch.Tensor, list[Draw]]) -> None:
    logits, draws = given_rows
    assert sample(logits, draws) == sample_plainly(logits, draws)


@pytest.mark.usefixtures("cpu_kernels")
def test_a_large_vocabulary() -> None:
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(4, 151_936, generator=generator) * 2
    draws = [draw_of(temperature, 77) for temperature in (0.0, 0.6, 1.0, 1.7)]
    assert sample(logits, draws) == sample_plainly(logits, draws)


def test_the_kernel_decides_nearly_every_row_itself(cpu_kernels: CpuKernels) -> None:
    logits = torch.zeros(64, 3000)
    highest, ids = cpu_kernels.sampling.highest(logits)
    assert ids == [0] * 64, "the lowest id on ties"
    won = cpu_kernels.sampling.race(logits, torch.tensor(highest), [1.0] * 64, list(range(64)))
    assert None not in won
    assert len(set(won)) > 32


@pytest.mark.parametrize("count", [1, 5, 128, 999, 1000])
@pytest.mark.parametrize("order", ["random", "rising", "falling", "ties"])
def test_the_highest_of_a_row(cpu_kernels: CpuKernels, count: int, order: str) -> None:
    logits = torch.randn(2, 1000, generator=torch.Generator().manual_seed(8))
    if order == "ties":
        logits = logits.round()
    elif order != "random":
        logits = logits.sort(descending=order == "falling").values
    values, ids = cpu_kernels.sampling.top(logits, count)
    assert torch.equal(logits.gather(1, ids), values)
    assert torch.equal(values.sort(descending=True).values, logits.topk(count).values)
    assert all(len(set(row)) == count for row in ids.tolist())


def test_a_row_with_little_left_is_filled_up(cpu_kernels: CpuKernels) -> None:
    logits = torch.full((1, 300), -torch.inf)
    logits[0, 7], logits[0, 299] = 1.0, 2.0
    values, ids = cpu_kernels.sampling.top(logits, 4)
    assert sorted(zip(values[0].tolist(), ids[0].tolist(), strict=True)) == [
        (-math.inf, 0), (-math.inf, 0), (1.0, 7), (2.0, 299),
    ]  # fmt: skip
    with pytest.raises(ValueError, match="no 301 highest"):
        cpu_kernels.sampling.top(logits, 301)


@pytest.mark.usefixtures("cpu_kernels")
def test_a_row_s_part_of_a_larger_tensor() -> None:
    wide = torch.randn(3, 200, generator=torch.Generator().manual_seed(1))
    part = wide[:, 40:160]
    draws = [draw_of(temperature, 3) for temperature in (0.0, 1.0, 0.3)]
    assert not part.is_contiguous()
    assert sample(part, draws) == sample_plainly(part.contiguous(), draws)


class Undecided:
    """Kernels to which every race is too close."""

    def highest(self, logits: torch.Tensor) -> tuple[list[float], list[int]]:
        values, ids = logits.max(-1)
        return values.tolist(), ids.tolist()

    def race(self, logits: torch.Tensor, *_: object) -> list[int | None]:
        return [None] * logits.shape[0]


def test_torch_decides_what_the_kernel_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(2))
    draws = [draw_of(temperature, 9) for temperature in (1.0, 0.0, 1.0)]
    monkeypatch.setattr(sampler, "_kernels", lambda _: Undecided())
    assert sample(logits, draws) == sample_plainly(logits, draws)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("choose", [sample, sample_plainly])
@pytest.mark.parametrize("place", [0, 70, 1500])
def test_no_token_of_what_is_no_number(choose: Any, bad: float, place: int) -> None:
    logits = torch.zeros(2, 1501)
    logits[1, place] = bad
    with pytest.raises(InternalError, match="not numbers"):
        choose(logits, [draw_of(0.0, 1), draw_of(1.0, 1)])


@pytest.mark.parametrize("choose", [sample, sample_plainly])
def test_no_token_of_nothing(choose: Any) -> None:
    with pytest.raises(InternalError, match="not numbers"):
        choose(torch.full((1, 40), -torch.inf), [draw_of(1.0, 1)])


def test_what_the_kernels_do_not_take_is_refused(cpu_kernels: CpuKernels) -> None:
    compiled: SamplingKernels = cpu_kernels.sampling
    with pytest.raises(ValueError, match="float32"):
        compiled.highest(torch.zeros(2, 3, dtype=torch.float64))
    with pytest.raises(ValueError, match="float32"):
        compiled.highest(torch.zeros(3, 2).T)
    with pytest.raises(ValueError, match="one maximum"):
        compiled.race(torch.zeros(2, 3), torch.zeros(2), [1.0], [1, 2])
