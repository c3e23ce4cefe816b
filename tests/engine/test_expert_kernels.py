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
from baton.engine.kernels.cpu.experts import ExpertKernels, SharedAnswers
from baton.engine.kernels.cpu.gates import ChoiceKernel, ChoiceRule
from baton.engine.kernels.cpu.library import CpuKernels, kernels
from baton.engine.kernels.cpu.quantized import integer_kernels_for
from baton.engine.models.config import ClampedGate
from baton.engine.models.experts import Expert, Experts, compiled_experts
from baton.engine.models.layers.gates import (
    CompiledGate,
    ExpertGroups,
    SigmoidGate,
    SoftmaxGate,
    compiled_gate,
)
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
    logits = noise(rows, experts, seed=seed).float() * 30.0001
    logits = logits.round() if equal else logits  # many equals, or nearly none
    rule = ChoiceRule(experts, per_token, normalized, 2.5, rounded=True)
    weights, chosen = ChoiceKernel(served, rule)(logits)
    logits = logits.bfloat16()
    order = logits.float().argsort(dim=1, descending=True, stable=True)[:, :per_token]
    assert torch.equal(chosen, order), "of equals the first"
    expected = logits.float().softmax(dim=1).gather(1, order)
    if normalized:
        expected = expected / expected.sum(dim=1, keepdim=True)
    assert torch.allclose(weights.float(), 2.5 * expected, rtol=2**-7, atol=1e-30)


def test_a_row_of_no_numbers_chooses_some_experts(cpu_kernels: CpuKernels) -> None:
    logits = torch.full((1, 8), float("nan"))
    for sigmoid in (False, True):
        rule = ChoiceRule(8, 3, True, groups=2, kept=1, sigmoid=sigmoid)
        weights, chosen = ChoiceKernel(cpu_kernels, rule)(logits)
        assert chosen.tolist() == [[0, 1, 2]]
        assert bool(weights.isnan().all())


@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(1, 5),
    groups=st.sampled_from([(1, 1), (4, 1), (4, 3), (8, 2)]),
    per_token=st.integers(1, 6),
    kind=st.tuples(st.booleans(), st.booleans()),
    seed=st.integers(0, 1000),
)
def test_gates_in_float32_choose_as_torch_does(
    cpu_kernels: CpuKernels,
    rows: int,
    groups: tuple[int, int],
    per_token: int,
    kind: tuple[bool, bool],
    seed: int,
) -> None:
    """The gates of DeepSeek-V2 and V3: groups, biases that only choose, scaled weights."""
    sigmoid, normalized = kind
    router, hidden = noise(48, HIDDEN, seed=seed).float(), noise(rows, HIDDEN, seed=seed + 1) * 20
    limits = ExpertGroups(*groups) if groups[0] > 1 else None
    bias = noise(48, seed=seed + 2).float()
    gate: SigmoidGate | SoftmaxGate = (
        SigmoidGate(router, bias, per_token, normalized, limits, 2.5)
        if sigmoid
        else SoftmaxGate(router, per_token, normalized, limits, 2.5)
    )
    compiled = compiled_gate(gate, cpu_kernels)
    assert isinstance(compiled, CompiledGate)
    (weights, chosen), (expected, theirs) = compiled(hidden), gate(hidden)
    scores = (hidden.float() @ router.T).sigmoid() + bias if sigmoid else hidden.float() @ router.T
    if limits is not None:
        scores = scores.masked_fill(limits.others(scores, 2 if sigmoid else 1), -torch.inf)
    order = scores.gather(1, theirs).argsort(dim=1, descending=True)
    theirs, expected = theirs.gather(1, order), expected.gather(1, order)
    assert torch.equal(chosen, theirs)
    assert torch.allclose(weights.float(), expected, rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("rows", [1, 7, 40])
def test_what_all_rows_share_is_added(cpu_kernels: CpuKernels, rows: int, gated: bool) -> None:
    layer = compiled_experts(mixture(cpu_kernels, None), cpu_kernels)
    hidden = noise(rows, HIDDEN, seed=rows)
    weights, chosen = layer.gate(hidden)
    shared = SharedAnswers(
        noise(rows, HIDDEN, seed=5), noise(1, HIDDEN, seed=6) * 30 if gated else None
    )
    assert layer.mix is not None
    alone = layer.mix(hidden, weights.bfloat16(), chosen, None)
    both = layer.mix(hidden, weights.bfloat16(), chosen, shared)
    assert relative_error(both, alone.float() + shared.gated(hidden).float()) < 0.005
    for row in range(rows):
        one = slice(row, row + 1)
        own = SharedAnswers(shared.rows[one], shared.gate)
        assert torch.equal(
            layer.mix(hidden[one], weights[one].bfloat16(), chosen[one], own)[0], both[row]
        )


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
