"""A mixture whose experts answer in one compiled call (kernels/cpu/experts.h), if that can be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from baton.engine.kernels.cpu.experts import ExpertKernels
from baton.engine.kernels.cpu.library import CpuKernels
from baton.engine.kernels.cpu.quantized import PackedIntegers
from baton.engine.kernels.cpu.step import StepLinear
from baton.engine.models.compiled_step import step_linears
from baton.engine.models.experts import Experts

VECTOR = 16  # numbers: rows are a multiple of them


def compiled(layer: Experts, kernels: CpuKernels) -> Experts:
    """`layer` with its experts in one call; `layer` itself if a weight's format or a size is not
    for it, or if its shapes are to be fixed."""
    gate_ups = step_linears([expert.gate_up for expert in layer.experts])
    downs = step_linears([expert.down for expert in layer.experts])
    if gate_ups is None or downs is None or layer.fixed_shapes:
        return layer
    if not (_alike(gate_ups) and _alike(downs)):
        return layer
    hidden, inner = _inputs(gate_ups[0]), _inputs(downs[0])
    if hidden % VECTOR or inner % VECTOR:
        return layer
    return replace(layer, together=ExpertKernels(kernels, gate_ups, downs, inner))


def _alike(linears: Sequence[StepLinear]) -> bool:
    """Whether they have one format, and no biases."""
    return len({_format(each) for each in linears}) == 1 and all(x.bias is None for x in linears)


def _format(linear: StepLinear) -> tuple[object, ...]:
    weights = linear.weights
    if isinstance(weights, PackedIntegers):
        return type(weights), weights.groups, weights.bits, weights.has_zeros
    return (type(weights),)


def _inputs(linear: StepLinear) -> int:
    weights = linear.weights
    return 2 * weights.shape[1] if isinstance(weights, Tensor) else weights.inputs
