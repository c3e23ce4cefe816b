"""A mixture whose experts' plain weights lie in two tensors, for the grouped Triton kernels.

Importing this imports triton.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from baton.engine.kernels.gpu.experts import grouped_experts
from baton.engine.models.experts import Expert, Experts
from baton.engine.quantization.linear import Linear, PlainLinear


@dataclass(frozen=True, slots=True)
class Together:
    """gate_up [E, 2 * I, H], down [E, H, I]; `some`: see grouped_experts."""

    gate_up: Tensor
    down: Tensor
    some: bool = False

    def __call__(self, hidden: Tensor, chosen: Tensor) -> Tensor:
        """chosen [T, per_token] -> what each choice of each token says, [T, per_token, H]."""
        return grouped_experts(hidden, chosen, self.gate_up, self.down, self.some)


def stacked(layer: Experts) -> Experts:
    """`layer` with its experts' weights stacked, each expert a view of them; `layer` itself if one
    of them is biased or quantized, or if its shapes are to be fixed."""
    if layer.fixed_shapes:
        return layer
    weights = [(_plain(expert.gate_up), _plain(expert.down)) for expert in layer.experts]
    gate_ups = [gate_up for gate_up, _ in weights if gate_up is not None]
    downs = [down for _, down in weights if down is not None]
    if len(gate_ups) < len(weights) or len(downs) < len(weights):
        return layer
    gate_up, down = torch.stack(gate_ups), torch.stack(downs)
    views = tuple(
        Expert(PlainLinear(first, None), PlainLinear(second, None))
        for first, second in zip(gate_up, down, strict=True)
    )
    return replace(layer, experts=views, together=Together(gate_up, down, layer.elsewhere))


def _plain(linear: Linear) -> Tensor | None:
    return linear.weight if isinstance(linear, PlainLinear) and linear.bias is None else None
