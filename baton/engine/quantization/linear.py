"""The interface of linear layers, whatever the format of their weights: x W^T + b.

`choose_linear` chooses the format of floating-point weights once at start. float32, and all dtypes
on a GPU: `functional.linear`. bfloat16 on a CPU: weights in panels for Baton's own kernel (AVX-512,
AVX2) if it was compiled; with AMX or without a compiler, weights reordered for oneDNN, which is
1.4-1.8x as fast as `functional.linear` at 4-32 rows. Integer weights are in integer.py.
A model gets its layers from `Linears`, and does not know their formats.
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
        """Compute x [T, in] -> [T, out], both in the model's dtype."""
        ...


@runtime_checkable
class WideLinear(Linear, Protocol):
    """A linear layer that can return its sums without rounding them to the model's dtype."""

    def wide(self, x: Tensor) -> Tensor:
        """Compute x [T, in] -> [T, out] float32."""
        ...


def in_float32(linear: Linear, x: Tensor) -> Tensor:
    """Compute x [T, in] -> [T, out] float32; not rounded in between if the layer is a WideLinear.
    That also saves a pass that casts the whole vocabulary's width."""
    return linear.wide(x) if _is_wide(linear) else linear(x).float()


def _is_wide(linear: Linear) -> TypeGuard[WideLinear]:
    return _is_wide_kind(type(linear))


@functools.cache  # a check against a protocol takes 80 us
def _is_wide_kind(kind: type[Linear]) -> bool:
    return issubclass(kind, WideLinear)


INT8_PEAK: Final = 127
LinearFormat = Callable[[Tensor, Tensor | None], Linear]  # (weight [out, in], bias [out]) -> Linear


class Linears(Protocol):
    """Makes a model's linear layers from a checkpoint's modules, in some weight format."""

    def read(self, modules: Sequence[str], has_bias: bool) -> Linear:
        """Return one layer for modules of the same input, their outputs stacked in this order."""
        ...

    def derived(self, name: str, make: Callable[[Tensor], Tensor]) -> Tensor:
        """Return what `make`, whose name says what it is, computes of the tensor `name`. Processes
        that share weights compute it once."""
        ...

    def head(self, tied: bool) -> Linear:
        """Return the head, the product over the vocabulary; its weight is rounded if so configured.
        `tied`: its weight is the embedding [vocab, H]."""
        ...


class EmbeddingTable(Protocol):
    """Rows to look up: an embedding, or the weights of a tied head, which are then held once."""

    @property
    def outputs(self) -> int:
        """The number of rows."""
        ...

    @property
    def place(self) -> tuple[torch.dtype, torch.device]:
        """The dtype and the device of the rows."""
        ...

    def rows(self, ids: Tensor) -> Tensor:
        """Return the rows `ids` [T] -> [T, in], a new tensor."""
        ...


@dataclass(frozen=True, slots=True)
class PlainLinear:
    """Weights as the checkpoint stores them: `weight` [out, in]."""

    weight: Tensor
    bias: Tensor | None

    @property
    def outputs(self) -> int:
        """See EmbeddingTable."""
        return self.weight.shape[0]

    @property
    def place(self) -> tuple[torch.dtype, torch.device]:
        """See EmbeddingTable."""
        return self.weight.dtype, self.weight.device

    def rows(self, ids: Tensor) -> Tensor:
        """See EmbeddingTable."""
        return self.weight.index_select(0, ids)

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

    @property
    def outputs(self) -> int:
        """Width of the product."""
        return self._outputs

    @property
    def place(self) -> tuple[torch.dtype, torch.device]:
        """See EmbeddingTable."""
        return self.panels.dtype, self.panels.device

    def rows(self, ids: Tensor) -> Tensor:
        """See EmbeddingTable. Panels [in / 2, outputs, 2] have a row's neighbours side by side."""
        pairs, size = self.panels.view(torch.int32).squeeze(-1), self.panels.shape[-2]
        found = pairs[ids // size, :, ids % size]
        return found.contiguous().view(self.panels.dtype)

    def __call__(self, x: Tensor) -> Tensor:
        """See Linear."""
        return self._kernels.linear(x, self.panels, self.bias, self._outputs)

    def wide(self, x: Tensor) -> Tensor:
        """See WideLinear."""
        return self._kernels.linear(x, self.panels, self.bias, self._outputs, torch.float32)


@dataclass(frozen=True, slots=True)
class SideBySide:
    """Layers of the same input in different formats. They run one by one; outputs are stacked."""

    layers: tuple[Linear, ...]

    def __call__(self, x: Tensor) -> Tensor:
        """See Linear."""
        return torch.cat([layer(x) for layer in self.layers], dim=-1)


class RankSums(Protocol):
    """Sums over the ranks that share a product's inputs (parallel/group.py). All ranks must make
    the same calls."""

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Return the sum of `tensor` over the ranks; may mutate `tensor`."""
        ...

    def all_reduce_max(self, tensor: Tensor) -> Tensor:
        """Return the maximum of each number over the ranks; may mutate `tensor`."""
        ...


def row_scales(peaks: Tensor) -> Tensor:
    """Return the scales by which rows are rounded to int8, [T, 1]. `peaks` [T, 1] float32: the
    greatest magnitude of each row."""
    return peaks.clamp(min=1e-12) / INT8_PEAK


@dataclass(frozen=True, slots=True)
class Int8Share:
    """One rank's share of a product with rows of int8 (w8a8, w4a8), whose inputs lie on several
    ranks.

    Rows are rounded by their greatest magnitude over all ranks, so they are those of the whole
    product. `layer` takes them as they are: its scale for a row is 1. w8a8: `layer` has no scales
    of outputs either, so the ranks add integers, and the result on every rank equals that of the
    whole product bit for bit, as long as sums stay below 2^24, which float32 holds exactly. w4a8:
    the ranks add float32 numbers, so results differ by the order of sums alone.
    """

    layer: Linear
    scale: Tensor | None  # [out]; None = `layer` has them
    bias: Tensor | None
    exchange: RankSums

    def __call__(self, x: Tensor) -> Tensor:
        """Compute x [T, inputs of this rank] -> [T, out], summed over the ranks."""
        rows, scales = self.rounded(x)
        sums = self.exchange.all_reduce(in_float32(self.layer, rows))
        return self._scaled(sums, scales).to(x.dtype)

    def rounded(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Round x [T, in]; return integers [T, in] in x's dtype and the rows' scales [T, 1]. NaN on
        any rank makes a row's scale infinite on all: integers have no NaN."""
        wide = x.float()
        peaks = wide.abs().amax(1, keepdim=True).nan_to_num_(torch.inf, torch.inf)
        scales = row_scales(self.exchange.all_reduce_max(peaks))
        return (wide / scales).round_().to(x.dtype), scales

    def partial(self, rows: Tensor, scales: Tensor) -> Tensor:
        """Compute this rank's part [T, out] of the sum over the ranks, of the two results of
        `rounded`."""
        return self._scaled(in_float32(self.layer, rows), scales).to(rows.dtype)

    def _scaled(self, sums: Tensor, scales: Tensor) -> Tensor:
        y = sums.mul_(scales)
        if self.scale is not None:
            y = y.mul_(self.scale)
        return y if self.bias is None else y + self.bias


def choose_linear(dtype: torch.dtype, device: torch.device) -> LinearFormat:
    """Return the fastest format of floating-point weights that works on this machine for `dtype`.
    oneDNN's is tested on a small product. The choice is logged."""
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
    """Make a layer of panels, which hold pairs of inputs; for an odd number of inputs a layer that
    uses torch."""
    if weight.shape[1] % 2:
        return PlainLinear(weight, bias)
    return PanelLinear(compiled, weight, bias)


def _packing_works() -> bool:
    """Whether oneDNN's packed product exists on this machine and agrees with torch's."""
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
