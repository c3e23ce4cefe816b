"""A mixture whose experts' weights lie in two tensors, for the grouped Triton kernels: unquantized
ones, and 8-bit floats.

Importing this imports triton.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from baton.engine.kernels.gpu.experts import ExpertWeights, grouped_experts
from baton.engine.kernels.gpu.float8_linear import TritonFloat8Linear
from baton.engine.models.config import ClampedGate
from baton.engine.models.experts import Expert, Experts
from baton.engine.quantization.float8 import (
    Float8Linear,
    Float8Weight,
    ScaledLinear,
    stack_float8,
)
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
    Return `layer` itself if an expert is of integers, if experts differ in format, if only some
    have biases, or with `fixed_shapes`."""
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


_Stackable = PlainLinear | Float8Linear | ScaledLinear | TritonFloat8Linear


def _stacked(linears: Sequence[Linear]) -> ExpertWeights | None:
    """Return the experts' weights in one tensor, with their biases; None if a weight is of
    integers, if formats differ, or if only some have biases."""
    known = [each for each in linears if isinstance(each, _Stackable)]
    biases = [linear.bias for linear in known if linear.bias is not None]
    if len(known) < len(linears) or len(biases) not in (0, len(known)):
        return None
    bias = torch.stack(biases) if biases else None
    weights = [linear.weight for linear in known]
    narrow = [weight for weight in weights if isinstance(weight, Float8Weight)]
    if not narrow:
        plain = [weight for weight in weights if isinstance(weight, Tensor)]
        return ExpertWeights(torch.stack(plain), bias)
    whole = stack_float8(narrow) if len(narrow) == len(weights) else None
    if whole is None:
        return None
    by_expert = (len(narrow), -1)
    scales = whole.scales.unflatten(1, by_expert).transpose(0, 1).contiguous()
    return ExpertWeights(whole.values.unflatten(0, by_expert), bias, scales, whole.rounding)


def _views(of: ExpertWeights) -> list[Linear]:
    biases = [None] * len(of.weight) if of.bias is None else list(of.bias)
    if of.scales is None or of.rounding is None:
        return [PlainLinear(weight, bias) for weight, bias in zip(of.weight, biases, strict=True)]
    parts = zip(of.weight, of.scales, biases, strict=True)
    return [
        TritonFloat8Linear(Float8Weight(values, scales, of.rounding), bias)
        for values, scales, bias in parts
    ]
