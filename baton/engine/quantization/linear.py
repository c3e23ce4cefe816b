"""The one seam for weight formats: how x W^T + b is done, chosen once at start.

`choose_linear` is about plain weights. float32 and everything on a GPU: `functional.linear`.
bfloat16 on a CPU: weights in panels for our own kernel (AVX-512, AVX2), where it was compiled, but
with AMX or without a compiler reordered for oneDNN, 1.4-1.8x `functional.linear` at 4-32 rows.
Integer weights: quantization.py.
`Linears` is what a model asks for its layers; which format each gets is not the model's business.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, TypeGuard, runtime_checkable

import torch
from torch import Tensor
from torch.nn import functional

from baton.engine.kernels.cpu.library import CpuKernels, product_kernels_for

logger = logging.getLogger(__name__)


class Linear(Protocol):
    """A linear layer whose weights are held in some format."""

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, in] -> [T, out], both in the model's dtype."""
        ...


@runtime_checkable
class WideLinear(Linear, Protocol):
    """One whose format can leave its sums unrounded."""

    def wide(self, x: Tensor) -> Tensor:
        """x [T, in] -> [T, out] float32."""
        ...


def in_float32(linear: Linear, x: Tensor) -> Tensor:
    """x [T, in] -> [T, out] float32, unrounded where the format has them so: a second pass over a
    vocabulary's width takes as long as choosing from it."""
    return linear.wide(x) if _is_wide(linear) else linear(x).float()


def _is_wide(linear: Linear) -> TypeGuard[WideLinear]:
    return _is_wide_kind(type(linear))


@functools.cache  # a check against a protocol takes 80 us
def _is_wide_kind(kind: type[Linear]) -> bool:
    return issubclass(kind, WideLinear)


# Part of some rows [T, in] -> the greatest magnitudes of the whole rows, [T, 1] in their dtype.
Peaks = Callable[[Tensor], Tensor]
PEAK_INPUTS: Final = 8  # behind a part of w8a8's inputs: kernels take multiples of 8
LinearFormat = Callable[[Tensor, Tensor | None], Linear]  # (weight [out, in], bias [out]) -> Linear


class Linears(Protocol):
    """Where a model gets its linear layers from: a checkpoint's modules, in some weight format."""

    def read(self, modules: Sequence[str], has_bias: bool) -> Linear:
        """Modules of one input as one layer, their outputs stacked in this order."""
        ...

    def head(self, tied: Tensor | None) -> Linear:
        """The product over the vocabulary, rounded if so configured: of the embedding [vocab, H] in
        hand if it is tied to it, else of the checkpoint's own."""
        ...


@dataclass(frozen=True, slots=True)
class PlainLinear:
    """Weights as the checkpoint stores them: `weight` [out, in]."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        """See Linear."""
        return functional.linear(x, self.weight, self.bias)


class PackedLinear:
    """Weights reordered once into the layout that oneDNN multiplies from. CPU, bfloat16."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """See Linear."""
        return torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")


class PanelLinear:
    """Weights in panels for the compiled kernel (kernels/cpu/linear.h). CPU, bfloat16."""

    def __init__(self, kernels: CpuKernels, weight: Tensor, bias: Tensor | None) -> None:
        self._kernels = kernels
        self._outputs = weight.shape[0]
        self.panels = kernels.pack(weight)
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """See Linear."""
        return self._kernels.linear(x, self.panels, self.bias, self._outputs)

    def wide(self, x: Tensor) -> Tensor:
        """See WideLinear."""
        return self._kernels.linear(x, self.panels, self.bias, self._outputs, torch.float32)


@dataclass(frozen=True, slots=True)
class SideBySide:
    """Layers of one input whose formats differ: run one by one, their outputs stacked."""

    layers: tuple[Linear, ...]

    def __call__(self, x: Tensor) -> Tensor:
        """See Linear."""
        return torch.cat([layer(x) for layer in self.layers], dim=-1)


@dataclass(frozen=True, slots=True)
class Peaked:
    """A layer of w8a8 for a part of each row's inputs. Behind them it puts the greatest magnitude
    of the whole row, which its weights multiply by zero: so the layer rounds as for whole rows."""

    layer: Linear
    peaks: Peaks

    def __call__(self, x: Tensor) -> Tensor:
        """See Linear."""
        return self.layer(self.extended(x))

    def extended(self, x: Tensor) -> Tensor:
        """x [T, in] -> what `layer` takes, [T, in + PEAK_INPUTS]."""
        return torch.cat((x, self.peaks(x).expand(-1, PEAK_INPUTS)), 1)


def choose_linear(dtype: torch.dtype, device: torch.device) -> LinearFormat:
    """The fastest format that works here for this dtype; tried on a small product, logged."""
    compiled = product_kernels_for(dtype, device)
    if compiled is not None:
        logger.info("linear layers: bfloat16 weights in panels, compiled kernel")
        return functools.partial(_in_panels, compiled)
    if device.type == "cpu" and dtype == torch.bfloat16 and _packing_works():
        logger.info("linear layers: bfloat16 weights packed for oneDNN")
        return PackedLinear
    logger.info("linear layers: torch, %s on %s", dtype, device.type)
    return PlainLinear


def _in_panels(compiled: CpuKernels, weight: Tensor, bias: Tensor | None) -> Linear:
    """Panels hold pairs of inputs: an odd number of them is torch's."""
    if weight.shape[1] % 2:
        return PlainLinear(weight, bias)
    return PanelLinear(compiled, weight, bias)


def _packing_works() -> bool:
    """Whether oneDNN's packed product exists here and agrees with torch's."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 64, generator=generator).bfloat16()
    weight = torch.randn(48, 64, generator=generator).bfloat16()
    bias = torch.randn(48, generator=generator).bfloat16()
    try:
        packed = PackedLinear(weight, bias)(x)
    except (AttributeError, RuntimeError, NotImplementedError) as error:
        logger.info("oneDNN cannot pack bfloat16 weights here: %s", error)
        return False
    return torch.allclose(packed.float(), functional.linear(x, weight, bias).float(), atol=0.25)
