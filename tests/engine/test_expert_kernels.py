"""A mixture's experts in one compiled call: bit for bit each expert's own products."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from baton.engine.kernels.cpu import library
from baton.engine.kernels.cpu.experts import ChoiceKernel, ExpertKernels
from baton.engine.kernels.cpu.library import CpuKernels, kernels
from baton.engine.kernels.cpu.quantized import integer_kernels_for
from baton.engine.kernels.cpu.step import ChoiceRule
from baton.engine.models.config import ClampedGate
from baton.engine.models.experts import Expert, Experts, compiled_experts
from baton.engine.models.layers.gates import SoftmaxGate
from baton.engine.quantization.integer import SCHEMES, QuantizedFormat, Scheme, quantize
from baton.engine.quantization.linear import Linear, PanelLinear, PlainLinear
from tests.engine.running import Driver, load, relative_error
from tests.golden.random_models import save_random

CPU = torch.device("cpu")
HIDDEN, INNER, COUNT = 96, 160, 5


def noise(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) / math.sqrt(shape[-1])).bfloat16()


def held(
    kernels: CpuKernels, weight: Tensor, scheme: Scheme | None, bias: Tensor | None = None
) -> Linear:
    if scheme is None:
        return PanelLinear(kernels, weight, bias)
    if integer_kernels_for(torch.bfloat16, CPU) is None:
        pytest.skip("no integer kernels here")
    return QuantizedFormat(torch.bfloat16, CPU)(quantize(weight, scheme), bias)


@cache
def mixture(kernels: CpuKernels, scheme: Scheme | None, per_token: int = 2) -> Experts:
    experts = tuple(
        Expert(
            held(kernels, noise(2 * INNER, HIDDEN, seed=index), scheme),
            held(kernels, noise(HIDDEN, INNER, seed=100 + index), scheme),
        )
        for index in range(COUNT)
    )
    return Experts(SoftmaxGate(noise(COUNT, HIDDEN, seed=200), per_token, True), experts, None)


def one_by_one(kernels: CpuKernels, layer: Experts, hidden: Tensor, chosen: Tensor) -> Tensor:
    """Each choice of each row alone."""
    answers = torch.empty(*chosen.shape, hidden.shape[1], dtype=hidden.dtype)
    for row in range(chosen.shape[0]):
        for choice, index in enumerate(chosen[row].tolist()):
            expert = layer.experts[index]
            wide = expert.gate_up(hidden[row : row + 1])
            answers[row, choice] = expert.down(kernels.gated(wide))[0]
    return answers


@pytest.mark.parametrize("scheme", [None, *SCHEMES])
@settings(max_examples=8, deadline=None)
@given(
    rows=st.sampled_from([1, 2, 7, 13, 30, 70]),
    per_token=st.integers(1, 3),
    favourites=st.integers(1, COUNT),
    seed=st.integers(0, 1000),
)
def test_every_choice_gets_its_experts_answer(
    cpu_kernels: CpuKernels,
    scheme: Scheme | None,
    rows: int,
    per_token: int,
    favourites: int,
    seed: int,
) -> None:
    layer = mixture(cpu_kernels, scheme)
    together = compiled_experts(layer, cpu_kernels).together
    assert isinstance(together, ExpertKernels)
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randint(0, favourites, (rows, per_token), generator=generator)
    hidden = noise(rows, HIDDEN, seed=seed)
    answers = together(hidden, chosen)
    assert torch.equal(answers, one_by_one(cpu_kernels, layer, hidden, chosen))


@cache
def clamped(kernels: CpuKernels, scheme: Scheme | None) -> Experts:
    """As `mixture`, with biases, and gates of which some reach their limit."""
    experts = tuple(
        Expert(
            held(kernels, noise(2 * INNER, HIDDEN, seed=index), scheme, noise(2 * INNER, seed=50)),
            held(kernels, noise(HIDDEN, INNER, seed=100 + index), scheme, noise(HIDDEN, seed=51)),
            ClampedGate(0.3, 1.702),
        )
        for index in range(COUNT)
    )
    return Experts(SoftmaxGate(noise(COUNT, HIDDEN, seed=200), 2, True), experts, None)


@pytest.mark.parametrize("scheme", [None, *SCHEMES])
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_biases_and_clamped_gates(
    cpu_kernels: CpuKernels, scheme: Scheme | None, rows: int
) -> None:
    """One by one, the gate is torch's: it rounds after each operation, ours once."""
    layer = clamped(cpu_kernels, scheme)
    together = compiled_experts(layer, cpu_kernels).together
    assert isinstance(together, ExpertKernels)
    hidden = noise(rows, HIDDEN, seed=rows) * 4
    chosen = torch.randint(0, COUNT, (rows, 2), generator=torch.Generator().manual_seed(rows))
    answers = together(hidden, chosen)
    for row in range(rows):
        for choice, index in enumerate(chosen[row].tolist()):
            expert, alone = layer.experts[index], hidden[row : row + 1]
            wide = expert.gate_up(alone)
            gate, up = wide.float().chunk(2, dim=-1)
            assert bool((gate > 0.3).any())
            gate, up = gate.clamp(max=0.3), up.clamp(-0.3, 0.3)
            exact = gate * torch.sigmoid(1.702 * gate) * (up + 1)
            assert relative_error(expert.inner(alone), exact) < 0.01
            assert relative_error(answers[row, choice], expert.down(exact.bfloat16())[0]) < 0.005
            mates = together(alone, chosen[row : row + 1])
            assert torch.equal(mates[0, choice], answers[row, choice])
    hidden[0, 3] = float("nan")
    assert bool(together(hidden, chosen)[0].isnan().all())


def test_a_layer_says_what_torch_says(cpu_kernels: CpuKernels) -> None:
    layer = mixture(cpu_kernels, None)
    hidden = noise(40, HIDDEN, seed=7)
    theirs = replace(
        layer,
        experts=tuple(
            Expert(
                PlainLinear(noise(2 * INNER, HIDDEN, seed=index), None),
                PlainLinear(noise(HIDDEN, INNER, seed=100 + index), None),
            )
            for index in range(COUNT)
        ),
    )
    ours = compiled_experts(layer, cpu_kernels)
    assert relative_error(ours(hidden, ()), theirs(hidden, ())) < 0.02
    assert compiled_experts(layer, cpu_kernels)(hidden[:0], ()).shape == (0, HIDDEN)


@settings(max_examples=50)
@given(
    rows=st.integers(0, 5),
    experts=st.sampled_from([4, 31, 64, 200]),
    per_token=st.integers(1, 4),
    normalized=st.booleans(),
    equal=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_rows_choose_as_softmax_and_topk_do(
    rows: int, experts: int, per_token: int, normalized: bool, equal: bool, seed: int
) -> None:
    served = kernels()
    if served is None:
        return
    logits = noise(rows, experts, seed=seed) * 30
    logits = logits.round() if equal else logits  # many equals, or nearly none
    rule = ChoiceRule(experts, per_token, normalized, 2.5)
    weights, chosen = ChoiceKernel(served, rule)(logits)
    order = logits.float().argsort(dim=1, descending=True, stable=True)[:, :per_token]
    assert torch.equal(chosen, order), "of equals the first"
    expected = logits.float().softmax(dim=1).gather(1, order)
    if normalized:
        expected = expected / expected.sum(dim=1, keepdim=True)
    assert torch.allclose(weights.float(), 2.5 * expected, rtol=2**-7, atol=1e-30)


def test_a_row_of_no_numbers_chooses_some_experts(cpu_kernels: CpuKernels) -> None:
    logits = torch.full((1, 8), float("nan")).bfloat16()
    weights, chosen = ChoiceKernel(cpu_kernels, ChoiceRule(8, 3, True))(logits)
    assert chosen.tolist() == [[0, 1, 2]]
    assert bool(weights.isnan().all())


def test_other_formats_stay_as_they_are(cpu_kernels: CpuKernels) -> None:
    layer = mixture(cpu_kernels, None)
    first, *rest = layer.experts
    plain = PlainLinear(noise(HIDDEN, INNER, seed=1), None)
    narrow = Expert(
        PanelLinear(cpu_kernels, noise(2 * 24, HIDDEN, seed=1), None),
        PanelLinear(cpu_kernels, noise(HIDDEN, 24, seed=1), None),
    )
    for experts in (
        (Expert(first.gate_up, plain), *rest),
        (narrow,) * COUNT,
    ):
        other = replace(layer, experts=experts)
        assert compiled_experts(other, cpu_kernels) is other
    fixed = replace(layer, fixed_shapes=True)
    assert compiled_experts(fixed, cpu_kernels) is fixed


def test_a_loaded_model_takes_them_together(cpu_kernels: CpuKernels, tmp_path: Path) -> None:
    path = save_random(tmp_path, "mixtral", num_local_experts=4, head_dim=32)
    ids = list(range(3, 40))
    with mock.patch.object(
        ExpertKernels, "_run", autospec=True, side_effect=ExpertKernels._run
    ) as called:
        model = load(path, dtype="bfloat16")
        ours = Driver(model).logits(ids, range(8), [len(ids)])
    assert called.call_count == len(model.info.layers)
    with mock.patch.object(library, "_found", return_value=(None, "")):
        theirs = Driver(load(path, dtype="bfloat16")).logits(ids, range(8), [len(ids)])
    assert relative_error(ours, theirs) < 0.05
