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


INT8_PEAK: Final = 127
PEAK_INPUTS: Final = 8  # behind a share of w8a8's inputs: kernels take multiples of 8
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


class RankSums(Protocol):
    """The ranks that share the inputs of a product (parallel/group.py): all of them call alike."""

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over the ranks; may mutate `tensor`."""
        ...

    def all_reduce_max(self, tensor: Tensor) -> Tensor:
        """The greatest of each number; may mutate `tensor`."""
        ...


def row_scales(peaks: Tensor) -> Tensor:
    """Greatest magnitudes of rows [T, 1] float32 -> their scales as int8, symmetric."""
    return peaks.clamp(min=1e-12) / INT8_PEAK


@dataclass(frozen=True, slots=True)
class W8A8Share:
    """A w8a8 product whose inputs lie on several ranks, this one's share of it.

    Rows are rounded by the greatest magnitude over all ranks, and the ranks' sums are integers: so
    the result, on every rank, is that of the product in one piece, bit for bit (as long as sums
    stay below 2^24, which float32 holds exactly). `layer` multiplies by the integers alone: its
    scales are 1, and so are rows' scales, because each row ends with PEAK_INPUTS times INT8_PEAK,
    which its weights multiply by zero.
    """

    layer: Linear
    scale: Tensor  # [out]
    bias: Tensor | None
    exchange: RankSums

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, in of this rank] -> [T, out], the sum over the ranks."""
        rows, scales = self.rounded(x)
        sums = self.exchange.all_reduce(in_float32(self.layer, rows))
        return self._scaled(sums, scales).to(x.dtype)

    def rounded(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, in] -> what `layer` takes, and the rows' scales [T, 1]."""
        wide = x.float()
        scales = row_scales(self.exchange.all_reduce_max(wide.abs().amax(1, keepdim=True)))
        rows = (wide / scales).round_()
        return functional.pad(rows, (0, PEAK_INPUTS), value=INT8_PEAK).to(x.dtype), scales

    def partial(self, rows: Tensor, scales: Tensor) -> Tensor:
        """As `rounded` gives them -> [T, out], what is to be summed over the ranks."""
        return self._scaled(in_float32(self.layer, rows), scales).to(rows.dtype)

    def _scaled(self, sums: Tensor, scales: Tensor) -> Tensor:
        y = sums.mul_(scales).mul_(self.scale)
        return y if self.bias is None else y + self.bias


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
