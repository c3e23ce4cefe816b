"""The gated delta rule on a GPU beside its torch twin, for bench/gpu_cases.py."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.engine.kernels.delta_rule import DeltaRule, DeltaWeights, TorchDeltaRule
from baton.engine.kernels.gpu.delta_rule import TritonDeltaRule
from baton.engine.state.batch import Span
from bench.gpu_case import NAMES, TOLERANCE, CaseShape, KernelCase, noise


def delta_cases(shape: CaseShape, dtype: torch.dtype) -> Iterator[KernelCase]:
    """Yield the gated delta rule over single tokens, and over a prompt from its begin and one that
    goes on."""
    singles = [(1 + context, 1) for context in shape.contexts]
    prompts = [(0, shape.prefills[0][1] // 2), (7, 2)]
    for kind, lengths in (("decode", singles), ("prefill", prompts)):
        made = _Delta.make(shape, dtype, lengths)
        sizes, rows = shape.linear, sum(count for _, count in lengths)
        cells = sizes.value_heads * sizes.key_dim * sizes.value_dim
        yield KernelCase(
            f"delta rule, {kind}, {NAMES[dtype]}",
            lambda made=made, sizes=sizes: made.run(TritonDeltaRule(sizes, made.weights)),
            lambda made=made, sizes=sizes: made.run(TorchDeltaRule(sizes, made.weights)),
            TOLERANCE[dtype], made.x.nbytes + 8 * cells * len(lengths), 7 * rows * cells,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Delta:
    """Rows of spans in every second slot, from the last one on; a span that begins finds NaN."""

    weights: DeltaWeights
    x: Tensor
    conv: Tensor
    matrices: Tensor
    spans: tuple[Span, ...]

    @classmethod
    def make(
        cls, shape: CaseShape, dtype: torch.dtype, lengths: Sequence[tuple[int, int]]
    ) -> _Delta:
        """Make one layer's weights and states. `lengths`: tokens there, new ones."""
        sizes, spans, row = shape.linear, list[Span](), 0
        slots = 2 * len(lengths)
        conv = noise(shape, 25, slots, sizes.channels, sizes.taps).to(dtype)
        held = (slots, sizes.value_heads, sizes.key_dim, sizes.value_dim)
        matrices = noise(shape, 26, *held)
        for index, (start, count) in enumerate(lengths):
            slot = slots - 1 - 2 * index
            spans.append(Span(row, count, start, state_slot=slot))
            row += count
            if not start:
                conv[slot], matrices[slot] = torch.nan, torch.nan
        weights = DeltaWeights(
            conv=(noise(shape, 27, sizes.channels, sizes.taps) / 2).to(dtype),
            decay=-noise(shape, 28, sizes.value_heads).exp(),
            step_bias=noise(shape, 29, sizes.value_heads),
            norm=(1 + noise(shape, 30, sizes.value_dim) / 4).to(dtype),
            epsilon=1e-6,
        )
        x = noise(shape, 31, row, sizes.inputs).to(dtype)
        return cls(weights, x, conv, matrices, tuple(spans))

    def run(self, rule: DeltaRule) -> list[Tensor]:
        """Return the rows, and the states of all slots, advanced from the same ones."""
        conv, matrices = self.conv.clone(), self.matrices.clone()
        return [rule(self.x, conv, matrices, self.spans), conv, matrices]
