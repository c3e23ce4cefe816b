"""A mixture whose experts' unquantized weights lie in two tensors, for the grouped Triton kernels.

Importing this imports triton.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from baton.engine.kernels.gpu.experts import ExpertWeights, grouped_experts
from baton.engine.models.config import ClampedGate
from baton.engine.models.experts import Expert, Experts
from baton.engine.quantization.linear import Linear, PlainLinear


@dataclass(frozen=True, slots=True)
class Together:
    """The experts of a layer in two tensors: gate_up [E, 2 * I, H], down [E, H, I], each with
    biases if the model has any. `some`: see grouped_experts."""

    gate_up: ExpertWeights
    down: ExpertWeights
    clamped: ClampedGate | None
    some: bool = False

    def __call__(self, hidden: Tensor, chosen: Tensor) -> Tensor:
        """Return the answer of each chosen expert for each token, [T, per_token, H]; hidden [T, H],
        chosen [T, per_token]."""
        clamped = None if self.clamped is None else (self.clamped.limit, self.clamped.alpha)
        return grouped_experts(hidden, chosen, self.gate_up, self.down, clamped, self.some)


def stacked(layer: Experts) -> Experts:
    """Return `layer` with its experts' weights stacked; each expert becomes a view of the stack.
    Return `layer` itself if an expert is quantized, if only some experts have biases, or with
    `fixed_shapes`."""
    gate_up = _stacked([expert.gate_up for expert in layer.experts])
    down = _stacked([expert.down for expert in layer.experts])
    if layer.fixed_shapes or gate_up is None or down is None:
        return layer
    clamped = layer.experts[0].clamped
    views = tuple(
        Expert(first, second, clamped)
        for first, second in zip(_views(gate_up), _views(down), strict=True)
    )
    together = Together(gate_up, down, clamped, layer.elsewhere)
    return replace(layer, experts=views, together=together)


def _stacked(linears: Sequence[Linear]) -> ExpertWeights | None:
    """Return the experts' weights in one tensor, with their biases; None if a weight is quantized
    or only some have biases."""
    plain = [linear for linear in linears if isinstance(linear, PlainLinear)]
    biases = [linear.bias for linear in plain if linear.bias is not None]
    if len(plain) < len(linears) or len(biases) not in (0, len(plain)):
        return None
    weight = torch.stack([linear.weight for linear in plain])
    return ExpertWeights(weight, torch.stack(biases) if biases else None)


def _views(of: ExpertWeights) -> list[PlainLinear]:
    biases = [None] * len(of.weight) if of.bias is None else list(of.bias)
    return [PlainLinear(weight, bias) for weight, bias in zip(of.weight, biases, strict=True)]
