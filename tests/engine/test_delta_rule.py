"""The gated delta rule: chunks, single tokens, transformers' own, and the compiled kernel."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import Qwen3NextConfig
from transformers.models.qwen3_next import modeling_qwen3_next

from baton.engine.kernels.cpu.delta_rule import CompiledDeltaRule
from baton.engine.kernels.cpu.library import CpuKernels
from baton.engine.kernels.delta_rule import (
    DeltaRule,
    DeltaSizes,
    DeltaWeights,
    TorchDeltaRule,
    in_chunks,
    one_token,
)
from baton.engine.state.batch import Span

SLOTS = 5
UNTOUCHED = 7.0  # in the slots that no span has
SIZES = st.tuples(
    st.integers(1, 3), st.integers(1, 3), st.integers(1, 5), st.integers(1, 9), st.integers(2, 5)
).map(lambda n: DeltaSizes(n[0], n[0] * n[1], 16 * n[2], 16 * n[3], n[4]))


def noise(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def weights_of(sizes: DeltaSizes, dtype: torch.dtype = torch.float32) -> DeltaWeights:
    return DeltaWeights(
        conv=(noise(1, sizes.channels, sizes.taps) / 2).to(dtype),
        decay=-(noise(2, sizes.value_heads).exp()),
        step_bias=noise(3, sizes.value_heads),
        norm=(1 + noise(4, sizes.value_dim) / 4).to(dtype),
        epsilon=1e-6,
    )


@dataclass(slots=True)
class Run:
    """A rule over states of its own."""

    rule: DeltaRule
    conv: Tensor
    matrices: Tensor

    @classmethod
    def of(cls, rule: DeltaRule, sizes: DeltaSizes, dtype: torch.dtype) -> Run:
        conv = torch.full((SLOTS, sizes.channels, sizes.taps), UNTOUCHED).to(dtype)
        shape = (SLOTS, sizes.value_heads, sizes.key_dim, sizes.value_dim)
        return cls(rule, conv, torch.full(shape, UNTOUCHED))

    def step(self, x: Tensor, spans: Sequence[Span]) -> Tensor:
        return self.rule(x, self.conv, self.matrices, spans)


def spans_of(seed: int, steps: int, longest: int) -> list[list[Span]]:
    """Steps of three sequences in slots 3, 0, 4: spans of random lengths, in random orders."""
    choose = random.Random(seed)
    computed = {3: 0, 0: 0, 4: 0}
    found: list[list[Span]] = []
    for _ in range(steps):
        row, spans = 0, list[Span]()
        for slot in choose.sample(sorted(computed), choose.randint(1, 3)):
            count = choose.choice([1, 1, choose.randint(2, longest)])
            spans.append(Span(row, count, computed[slot], state_slot=slot))
            row, computed[slot] = row + count, computed[slot] + count
        found.append(spans)
    return found


def far(ours: Tensor, exact: Tensor) -> float:
    """The greatest difference over the greatest magnitude."""
    return float((ours.double() - exact.double()).abs().max() / exact.double().abs().max())


@pytest.mark.parametrize("length", [1, 63, 64, 65, 200])
def test_chunks_are_single_tokens_one_after_the_other(length: int) -> None:
    q, k, v = (noise(seed, 2, 3, length, 16) for seed in (1, 2, 3))
    k = k / k.norm(dim=-1, keepdim=True)
    decays, rates = -noise(4, 2, 3, length).exp(), noise(5, 2, 3, length).sigmoid()
    start = matrices = noise(6, 2, 3, 16, 16)
    read: list[Tensor] = []
    for t in range(length):
        at = slice(t, t + 1)
        given = (q[:, :, at], k[:, :, at], v[:, :, at], decays[:, :, at], rates[:, :, at])
        found, matrices = one_token(*given, matrices)
        read.append(found)
    whole, behind = in_chunks(q, k, v, decays, rates, start)
    assert far(whole, torch.cat(read, dim=2)) < 1e-5
    assert far(behind, matrices) < 1e-5


def test_a_prompt_is_transformers() -> None:
    """The same numbers as its layer, whatever the steps."""
    config = Qwen3NextConfig(
        hidden_size=64, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16,
        linear_value_head_dim=24, num_hidden_layers=1, layer_types=["linear_attention"],
    )  # fmt: skip
    layer: Any = modeling_qwen3_next.Qwen3NextGatedDeltaNet(config, 0)
    layer.requires_grad_(False)
    sizes = DeltaSizes(2, 4, 16, 24, 4)
    layer.norm.weight.data = 1 + noise(1, 24) / 4
    layer.out_proj = torch.nn.Identity()
    weights = DeltaWeights(
        layer.conv1d.weight[:, 0], -layer.A_log.exp(), layer.dt_bias, layer.norm.weight,
        config.rms_norm_eps,
    )  # fmt: skip
    hidden = noise(2, 1, 90, 64)
    expected = layer(hidden)[0]
    parts = layer.fix_query_key_value_ordering(layer.in_proj_qkvz(hidden), layer.in_proj_ba(hidden))
    x = torch.cat([part.reshape(90, -1) for part in parts], dim=1)
    run = Run.of(TorchDeltaRule(sizes, weights), sizes, torch.float32)
    outputs: list[Tensor] = []
    for start, stop in itertools.pairwise((0, 7, 8, 9, 80, 90)):
        outputs.append(run.step(x[start:stop], [Span(0, stop - start, start, state_slot=2)]))
    assert far(torch.cat(outputs), expected) < 1e-5
    assert (run.matrices[[0, 1, 3, 4]] == UNTOUCHED).all()


@settings(max_examples=12, deadline=None)
@given(sizes=SIZES, seed=st.integers(0, 1000))
def test_the_compiled_rule_is_torchs(cpu_kernels: CpuKernels, sizes: DeltaSizes, seed: int) -> None:
    weights = weights_of(sizes, torch.bfloat16)
    ours = Run.of(CompiledDeltaRule(cpu_kernels, sizes, weights), sizes, torch.bfloat16)
    twin = Run.of(TorchDeltaRule(sizes, weights), sizes, torch.bfloat16)
    for index, spans in enumerate(spans_of(seed, 4, 90)):
        rows = sum(span.num_rows for span in spans)
        x = noise(seed + index, rows, sizes.inputs).bfloat16()
        assert far(ours.step(x, spans), twin.step(x, spans)) < 1e-2
        assert torch.equal(ours.conv, twin.conv)
        assert far(ours.matrices[[3, 0, 4]], twin.matrices[[3, 0, 4]]) < 1e-5
    assert (ours.matrices[[1, 2]] == UNTOUCHED).all()


def test_a_sequence_of_the_compiled_rule_depends_on_no_other(cpu_kernels: CpuKernels) -> None:
    sizes = DeltaSizes(2, 4, 32, 48, 4)
    rule = CompiledDeltaRule(cpu_kernels, sizes, weights_of(sizes, torch.bfloat16))
    together, alone = (Run.of(rule, sizes, torch.bfloat16) for _ in range(2))
    for index, spans in enumerate(spans_of(5, 6, 70)):
        x = noise(index, sum(span.num_rows for span in spans), sizes.inputs).bfloat16()
        whole = together.step(x, spans)
        for span in spans:
            rows = slice(span.first_row, span.first_row + span.num_rows)
            one = Span(0, span.num_rows, span.start, state_slot=span.state_slot)
            assert torch.equal(alone.step(x[rows], [one]), whole[rows])
    assert torch.equal(together.matrices, alone.matrices)
    assert torch.equal(together.conv, alone.conv)


def test_strong_decays_leave_numbers(cpu_kernels: CpuKernels) -> None:
    """A decay that leaves nothing of the matrices, and one that is nearly none."""
    sizes = DeltaSizes(1, 2, 16, 16, 4)
    weights = weights_of(sizes, torch.bfloat16)
    weights = DeltaWeights(
        weights.conv, torch.tensor([-500.0, -1e-6]), weights.step_bias, weights.norm, 1e-6
    )
    ours = Run.of(CompiledDeltaRule(cpu_kernels, sizes, weights), sizes, torch.bfloat16)
    twin = Run.of(TorchDeltaRule(sizes, weights), sizes, torch.bfloat16)
    x = noise(1, 40, sizes.inputs).bfloat16()
    spans = [Span(0, 40, 0, state_slot=0)]
    assert far(ours.step(x, spans), twin.step(x, spans)) < 1e-2
    assert far(ours.matrices[0], twin.matrices[0]) < 1e-5


def test_sizes_of_the_compiled_rule() -> None:
    assert CompiledDeltaRule.suits(DeltaSizes(1, 1, 16, 48, 4))
    assert not CompiledDeltaRule.suits(DeltaSizes(1, 1, 16, 24, 4))
    assert not CompiledDeltaRule.suits(DeltaSizes(1, 1, 20, 16, 4))
