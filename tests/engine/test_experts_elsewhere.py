"""A mixture of which some experts lie elsewhere: parts sum to the whole, or rows are sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from unittest import mock

import pytest
import torch
from torch import Tensor

from baton.engine.kernels.cpu.experts import ExpertKernels
from baton.engine.kernels.cpu.library import CpuKernels
from baton.engine.models.experts import Expert, Experts, Mix, compiled_experts
from baton.engine.models.layers.gates import SoftmaxGate
from baton.engine.quantization.linear import PanelLinear, PlainLinear
from tests.engine.running import relative_error

HIDDEN, INNER, COUNT = 64, 32, 6


def noise(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) / shape[-1] ** 0.5).to(dtype)


def whole(kernels: CpuKernels | None = None) -> Experts:
    dtype = torch.float32 if kernels is None else torch.bfloat16
    weights = [
        (
            noise(2 * INNER, HIDDEN, seed=index, dtype=dtype),
            noise(HIDDEN, INNER, seed=100 + index, dtype=dtype),
        )
        for index in range(COUNT)
    ]
    experts = tuple(
        Expert(PlainLinear(gate_up, None), PlainLinear(down, None))
        if kernels is None
        else Expert(PanelLinear(kernels, gate_up, None), PanelLinear(kernels, down, None))
        for gate_up, down in weights
    )
    gate = SoftmaxGate(noise(COUNT, HIDDEN, seed=200, dtype=dtype), 3, True)
    return Experts(gate, experts, None)


def parts(layer: Experts, ends: Sequence[int]) -> list[Experts]:
    """`layer` cut behind these experts."""
    starts = [0, *ends[:-1]]
    return [
        replace(layer, experts=layer.experts[start:end], first=start, elsewhere=True)
        for start, end in zip(starts, ends, strict=True)
    ]


@dataclass
class AllToAll:
    """Sends each row to the parts that it chose an expert of; counts what it sends."""

    parts: Sequence[Experts]
    sent: int = 0

    def __call__(self, hidden: Tensor, weights: Tensor, chosen: Tensor, own: Mix) -> Tensor:
        mixed = torch.zeros_like(hidden)
        for part in self.parts:
            here = (chosen >= part.first) & (chosen < part.first + len(part.experts))
            rows = here.any(dim=1).nonzero()[:, 0]
            self.sent += len(rows)
            mixed[rows] += part.own(hidden[rows], weights[rows], chosen[rows])
        return mixed


@pytest.mark.parametrize("ends", [[2, 4, 6], [1, 6], [5, 6]])
@pytest.mark.parametrize("fixed_shapes", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 2, 40])
def test_parts_sum_to_the_whole(ends: list[int], fixed_shapes: bool, rows: int) -> None:
    layer = replace(whole(), fixed_shapes=fixed_shapes)
    hidden = noise(rows, HIDDEN, seed=5)
    expected = layer(hidden, ())
    got = sum(part(hidden, ()) for part in parts(layer, ends))
    assert isinstance(got, Tensor)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def test_a_choice_that_lies_elsewhere_is_not_computed() -> None:
    layer = whole()
    hidden = noise(8, HIDDEN, seed=5)
    chosen = layer.gate(hidden)[1]
    for part in parts(layer, [2, 6]):
        with mock.patch.object(Expert, "inner", autospec=True, side_effect=Expert.inner) as inner:
            part(hidden, ())
        computed = sum(len(call.args[1]) for call in inner.call_args_list)
        here = (chosen >= part.first) & (chosen < part.first + len(part.experts))
        assert computed == int(here.sum())


@pytest.mark.parametrize("rows", [0, 1, 30])
def test_compiled_parts_sum_to_the_whole(cpu_kernels: CpuKernels, rows: int) -> None:
    layer = whole(cpu_kernels)
    hidden = noise(rows, HIDDEN, seed=5, dtype=torch.bfloat16)
    expected = compiled_experts(layer, cpu_kernels)(hidden, ())
    compiled = [compiled_experts(part, cpu_kernels) for part in parts(layer, [2, 6])]
    chosen = layer.gate(hidden)[1]
    with mock.patch.object(
        ExpertKernels, "__call__", autospec=True, side_effect=ExpertKernels.__call__
    ) as called:
        got = [part(hidden, ()) for part in compiled]
    assert sum(call.args[2].numel() for call in called.call_args_list) == chosen.numel()
    if rows:
        assert relative_error(got[0] + got[1], expected) < 0.01
    # A part says of its own choices what the whole says of them, bit for bit.
    together, part = compiled_experts(layer, cpu_kernels).together, compiled[1]
    assert together is not None
    assert part.together is not None
    here = chosen >= 2
    local = torch.where(here, chosen - 2, 4)
    assert torch.equal(part.together(hidden, local)[here], together(hidden, chosen)[here])
    assert not part.together(hidden, local)[~here].any()


@pytest.mark.parametrize("fixed_shapes", [False, True])
def test_rows_may_be_sent_to_experts_elsewhere(fixed_shapes: bool) -> None:
    layer = replace(whole(), fixed_shapes=fixed_shapes)
    hidden = noise(20, HIDDEN, seed=5)
    cut = parts(layer, [2, 4, 6])
    dispatch = AllToAll(cut)
    got = replace(cut[0], dispatch=dispatch)(hidden, ())
    torch.testing.assert_close(got, layer(hidden, ()), atol=1e-5, rtol=1e-5)
    assert 20 < dispatch.sent <= 60
