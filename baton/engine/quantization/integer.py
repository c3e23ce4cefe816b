"""Integer weights: rounding floating-point weights to them, and linear layers that use them.

    scheme   weights                             activations      product
    int8     int8, a scale per output channel    as they are      widened slabs; few rows: ATen's
    w8a8     int8, a scale per output channel    int8 per token   int8 x int8 -> int32, exact
    int4     4 bits, scale and zero per group    as they are      few rows: ATen's; else widened

For bfloat16 on a CPU, Baton's own kernels are used if they were compiled; they widen integers in
registers (kernels/cpu/quantized.py). `QuantizedFormat` tests every kernel on a small product when a
model is loaded, against `IntWeight.dequantized` and `functional.linear`.
quantized_checkpoint.py reads integers that a checkpoint stores.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional

from baton.engine.kernels.cpu.quantized import (
    FLOATS4,
    MAX_INPUTS,
    QUAD,
    IntegerKernels,
    integer_kernels_for,
)
from baton.engine.kernels.gpu.support import triton_serves
from baton.engine.quantization.linear import Linear, RankSums, W8A8Share, row_scales

logger = logging.getLogger(__name__)

Scheme = Literal["int8", "w8a8", "int4"]
SCHEMES: Final = get_args(Scheme)
GROUP_SIZES: Final = (64, 32)  # of int4 on load: the first that divides the inputs
SLAB_BYTES: Final = 2 << 20  # widened weights that one product reads: they stay in the caches
SLAB_OUTPUTS: Final = 8192  # rounded at once: a float32 copy of a whole head would take gigabytes
FEW_ROWS: Final = 8  # up to here ATen's int8 kernel beat widening (measured on AVX-512)
FEW_ROWS_INT4: Final = 16  # the same for the int4 kernel
INT4_KERNEL_GROUPS: Final = (32, 64, 128, 256)
INT4_KERNEL_ROWS: Final = 64  # outputs per tile of the packed layout
CUDA_INT_ROWS: Final = 32  # cuBLAS wants more than 16 rows


@dataclass(frozen=True, slots=True)
class IntWeight:
    """w[o, i] = (values[o, i] - zeros[o, g]) * scales[o, g] for the i-th input of group g.

    values [out, in] int8 (4 bits: -8..7), scales [out, groups] float32, zeros [out, groups] float32
    or None = all 0. A group is a run of in / groups columns of values. `order` [in]: column j
    belongs to input order[j]; None = to input j. `int8_activations`: inputs are rounded to int8 per
    token. `exchange`: other ranks hold the other inputs, and the last PEAK_INPUTS columns are 0
    (W8A8Share). `floats`: the weights are 4-bit floats (E2M1); values hold twice their numbers.
    """

    bits: Literal[4, 8]
    values: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    order: Tensor | None = None
    int8_activations: bool = False
    exchange: RankSums | None = None
    floats: bool = False

    @property
    def shape(self) -> torch.Size:
        """[out, in]."""
        return self.values.shape

    @property
    def num_groups(self) -> int:
        return self.scales.shape[1]

    @property
    def num_bytes(self) -> int:
        """Bytes of the weight as layers keep it: packed integers, scales, zeros and order. Only
        compiled kernels keep 4-bit floats, and their scales are float16."""
        parts = (self.zeros, self.order)
        return (
            self.values.numel() * self.bits // 8
            + self.scales.nbytes // (2 if self.floats else 1)
            + sum(part.nbytes for part in parts if part is not None)
        )

    @property
    def group_size(self) -> int:
        return self.values.shape[1] // self.num_groups

    def to(self, device: torch.device) -> IntWeight:
        """Return the weight on `device`; `order` stays where it is."""
        zeros = None if self.zeros is None else self.zeros.to(device)
        return replace(
            self, values=self.values.to(device), scales=self.scales.to(device), zeros=zeros
        )

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """Return the weight [out, in] in `dtype`, computed in float32."""
        weight = self.values.float().unflatten(1, (self.num_groups, -1))
        if self.zeros is not None:
            weight -= self.zeros[:, :, None]
        weight = (weight * self.scales[:, :, None]).flatten(1).to(dtype)
        if self.order is None:
            return weight
        inputs = int(self.order.max()) + 1  # some columns may be padding of zeros (parts.py)
        return weight.new_zeros(len(weight), inputs).index_add_(1, self.order, weight)


def quantize(weight: Tensor, scheme: Scheme) -> IntWeight:
    """Round weight [out, in] to nearest, a slab of outputs at a time.

    int8 and w8a8: symmetric, a scale per output. int4: from minimum to maximum of each group.
    Raises ValueError if no group size divides the inputs (int4).
    """
    slabs = [_quantize(slab.float(), scheme) for slab in weight.split(SLAB_OUTPUTS)]
    whole = stack_weights(slabs)
    assert whole is not None, "slabs of one weight have one format"
    return whole


def _quantize(weight: Tensor, scheme: Scheme) -> IntWeight:
    """Round one slab, a float32 weight; see quantize."""
    if scheme != "int4":
        scales = weight.abs().amax(1, keepdim=True).clamp_(min=1e-12) / 127
        values = (weight / scales).round_().clamp_(-127, 127).to(torch.int8)
        return IntWeight(8, values, scales, int8_activations=scheme == "w8a8")
    size = next((size for size in GROUP_SIZES if weight.shape[1] % size == 0), None)
    if size is None:
        raise ValueError(f"{weight.shape[1]} inputs make no groups of {GROUP_SIZES[-1]}")
    groups = weight.unflatten(1, (-1, size))
    low, high = groups.amin(2).clamp_(max=0), groups.amax(2).clamp_(min=0)  # 0 stays exact
    scales = (high - low).clamp_(min=1e-12) / 15
    zeros = (-low / scales).round_() - 8
    values = (groups / scales[:, :, None]).round_() + zeros[:, :, None]
    return IntWeight(4, values.clamp_(-8, 7).to(torch.int8).flatten(1), scales, zeros)


def stack_weights(parts: list[IntWeight]) -> IntWeight | None:
    """Return the parts stacked along their outputs; None if their formats differ."""
    first = parts[0]
    if len(parts) == 1:
        return first
    for part in parts[1:]:
        same = (part.bits, part.group_size, part.int8_activations, part.floats) == (
            first.bits, first.group_size, first.int8_activations, first.floats,
        )  # fmt: skip
        if not same or not _equal(part.order, first.order):
            return None
    zeros = None
    if any(part.zeros is not None for part in parts):
        zeros = torch.cat(
            [torch.zeros_like(p.scales) if p.zeros is None else p.zeros for p in parts]
        )
    return IntWeight(
        first.bits,
        torch.cat([part.values for part in parts]),
        torch.cat([part.scales for part in parts]),
        zeros,
        first.order,
        first.int8_activations,
        floats=first.floats,
    )


def _equal(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return torch.equal(a, b)


class QuantizedFormat:
    """Makes linear layers of integer weights for one dtype and device; tests the kernels once."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = dtype
        self._triton = triton_serves(device)
        on_cpu = device.type == "cpu"
        self._compiled = _tried(integer_kernels_for(dtype, device))
        half_cpu = on_cpu and dtype == torch.bfloat16
        self._int_product = works("torch._int_mm", lambda: try_int_product(device))
        self._int8_kernel = half_cpu and works("_weight_int8pack_mm", try_int8_kernel)
        self._int4_kernel = half_cpu and works("_weight_int4pack_mm_for_cpu", try_int4_kernel)

    def __call__(self, weight: IntWeight, bias: Tensor | None) -> Linear:
        """Return the fastest layer that this machine has for `weight`; bias [out] or None."""
        if weight.exchange is not None:
            integers = replace(weight, scales=torch.ones_like(weight.scales))
            layer = self._unordered(integers, None)
            return W8A8Share(layer, weight.scales.flatten(), bias, weight.exchange)
        layer = self._unordered(weight, bias)
        return layer if weight.order is None else Reordered(layer, weight.order)

    def _unordered(self, weight: IntWeight, bias: Tensor | None) -> Linear:
        outputs, inputs = weight.values.shape
        if self._compiled is not None:
            if W8A8Panels.takes(weight):
                return W8A8Panels(self._compiled, weight, bias)
            if IntegerPanels.takes(weight):
                return IntegerPanels(self._compiled, weight, bias)
        if weight.floats:
            return WidenedLinear(weight, bias, few_rows_kernel=False)
        if weight.int8_activations and weight.num_groups == 1 and weight.zeros is None:
            fits = outputs % 8 == 0 and inputs % 8 == 0
            return W8A8Linear(weight, bias, int_product=self._int_product and fits)
        if self._triton:
            from baton.engine.kernels.gpu.int_linear import TritonIntLinear  # imports triton

            if TritonIntLinear.suits(weight):
                return TritonIntLinear(weight, bias)
        if weight.bits == 8:
            kernel = self._int8_kernel and weight.num_groups == 1 and weight.zeros is None
            return WidenedLinear(weight, bias, few_rows_kernel=kernel)
        fits = weight.group_size in INT4_KERNEL_GROUPS and outputs % INT4_KERNEL_ROWS == 0
        if self._int4_kernel and fits:
            return Int4Linear(weight, bias, self._dtype)
        return NibbleLinear(weight, bias)


@dataclass(frozen=True, slots=True)
class Reordered:
    """A layer whose columns are sorted by group; the inputs are put into the same `order`."""

    layer: Linear
    order: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """See Linear."""
        return self.layer(x.index_select(1, self.order))


class IntegerPanels:
    """Weights of 4 or 8 bits in panels for the compiled kernel (kernels/cpu/quantized.h)."""

    def __init__(self, kernels: IntegerKernels, weight: IntWeight, bias: Tensor | None) -> None:
        self._kernels = kernels
        bits = FLOATS4 if weight.floats else weight.bits
        self.packed = kernels.pack(weight.values, weight.scales, weight.zeros, bits)
        self.bias = bias

    @staticmethod
    def takes(weight: IntWeight) -> bool:
        """Whether the kernel supports `weight`."""
        return not weight.int8_activations and weight.group_size % QUAD == 0

    def __call__(self, x: Tensor) -> Tensor:
        """See Linear."""
        return self._kernels.linear(x, self.packed, self.bias)

    def wide(self, x: Tensor) -> Tensor:
        """See WideLinear."""
        return self._kernels.linear(x, self.packed, self.bias, torch.float32)


class W8A8Panels:
    """W8A8Linear with the compiled kernel (kernels/cpu/w8a8.h); results are equal bit for bit."""

    def __init__(self, kernels: IntegerKernels, weight: IntWeight, bias: Tensor | None) -> None:
        self._kernels = kernels
        self.packed = kernels.pack_w8a8(weight.values, weight.scales.flatten())
        self.bias = bias

    @staticmethod
    def takes(weight: IntWeight) -> bool:
        """Whether the kernel supports `weight`."""
        simple = weight.num_groups == 1 and weight.zeros is None
        return weight.int8_activations and simple and weight.shape[1] <= MAX_INPUTS

    def __call__(self, x: Tensor) -> Tensor:
        """See Linear."""
        return self._kernels.w8a8_linear(x, self.packed, self.bias)

    def wide(self, x: Tensor) -> Tensor:
        """See WideLinear."""
        return self._kernels.w8a8_linear(x, self.packed, self.bias, torch.float32)


class WidenedLinear:
    """int8 weights, widened to the input's dtype slab by slab; the product is multiplied by the
    scale.

    bfloat16 holds an int8 exactly, so only the product and the multiplication by the scale round.
    """

    def __init__(self, weight: IntWeight, bias: Tensor | None, *, few_rows_kernel: bool) -> None:
        self._weight, self._bias = weight, bias
        self._scale = weight.scales.flatten() if weight.num_groups == 1 else None
        self._kernel_scale = weight.scales.flatten().bfloat16() if few_rows_kernel else None

    def __call__(self, x: Tensor) -> Tensor:
        """See Linear."""
        if self._kernel_scale is not None and x.shape[0] <= FEW_ROWS:
            kernel = torch.ops.aten._weight_int8pack_mm
            out = kernel(x.contiguous(), self._weight.values, self._kernel_scale)
            return out if self._bias is None else out + self._bias
        slabs = slab_rows(self._weight.values.shape, x.dtype)
        return _add_bias(torch.cat([self._slab(x, rows) for rows in slabs], 1), self._bias, x.dtype)

    def _slab(self, x: Tensor, rows: slice) -> Tensor:
        if self._scale is not None and self._weight.zeros is None:
            product = functional.linear(x, self._weight.values[rows].to(x.dtype))
            return product * self._scale[rows]
        return functional.linear(x, _slab_of(self._weight, rows).dequantized(x.dtype))


class W8A8Linear:
    """int8 weights, and inputs rounded to int8 per token. The sums are exact integers, so a row's
    result depends on no other row, whatever the kernel.
    """

    def __init__(self, weight: IntWeight, bias: Tensor | None, *, int_product: bool) -> None:
        self._values = weight.values.contiguous()
        self._scale, self._bias = weight.scales.flatten(), bias
        self._int_product = int_product

    def __call__(self, x: Tensor) -> Tensor:
        """See Linear."""
        return self.wide(x).to(x.dtype)

    def wide(self, x: Tensor) -> Tensor:
        """See WideLinear."""
        rounded, scales = round_rows(x)
        if self._int_product:
            sums = int_product(rounded, self._values).float()
        else:
            slabs = slab_rows(self._values.shape, torch.float32)
            wide = rounded.float()
            parts = [functional.linear(wide, self._values[rows].float()) for rows in slabs]
            sums = torch.cat(parts, 1)
        return _add_bias(sums.mul_(scales).mul_(self._scale), self._bias, torch.float32)


def round_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round x [T, in] to int8 [T, in] and scales [T, 1] float32, symmetric, one scale per row."""
    wide = x.float()
    scales = row_scales(wide.abs().amax(1, keepdim=True))
    return (wide / scales).round_().to(torch.int8), scales


class Int4Linear:
    """4-bit weights in the layout of ATen's CPU kernel, bfloat16. Many rows use widened slabs.

    The layout, tile after tile of 64 outputs: [in, 32] bytes, output r in the low half of byte r,
    output r + 32 in the high half (`try_int4_kernel` tests that on this build).
    """

    def __init__(self, weight: IntWeight, bias: Tensor | None, dtype: torch.dtype) -> None:
        unsigned = (weight.values + 8).int()
        self._packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(unsigned, 1)
        zeros = torch.zeros_like(weight.scales) if weight.zeros is None else weight.zeros
        pairs = torch.stack((weight.scales, -zeros * weight.scales), -1)
        self._scales = pairs.transpose(0, 1).contiguous().to(dtype)  # [groups, out, 2]
        self._group_size, self._bias = weight.group_size, bias

    def __call__(self, x: Tensor) -> Tensor:
        """See Linear."""
        if x.shape[0] <= FEW_ROWS_INT4:
            kernel = torch.ops.aten._weight_int4pack_mm_for_cpu
            out = kernel(x.contiguous(), self._packed, self._group_size, self._scales)
        else:
            slabs = slab_rows((self._packed.shape[0], x.shape[1]), torch.float32, INT4_KERNEL_ROWS)
            out = torch.cat([functional.linear(x, self._widened(rows)) for rows in slabs], 1)
        return out if self._bias is None else out + self._bias

    def _widened(self, rows: slice) -> Tensor:
        """Return the widened weights of some outputs (whole tiles), [rows, in]."""
        tiles = self._packed[rows].view(-1, self._packed.shape[1] * 2, INT4_KERNEL_ROWS // 2)
        values = torch.cat((tiles & 15, tiles >> 4), -1).to(torch.int8) - 8  # [tiles, in, 64]
        values = values.transpose(1, 2).flatten(0, 1).to(self._scales.dtype)
        scales = self._scales[:, rows].permute(1, 0, 2)  # [rows, groups, 2]
        grouped = values.unflatten(1, (-1, self._group_size))
        return torch.addcmul(scales[..., 1:], grouped, scales[..., :1]).flatten(1)


class NibbleLinear:
    """4-bit weights, two to a byte, widened slab by slab: for any dtype and device."""

    def __init__(self, weight: IntWeight, bias: Tensor | None) -> None:
        values = weight.values + 8
        if values.shape[1] % 2:
            values = functional.pad(values, (0, 1))
        self._bytes = (values[:, ::2] | values[:, 1::2] << 4).view(torch.uint8)
        self._weight = IntWeight(4, self._bytes, weight.scales, weight.zeros)
        self._inputs, self._bias = weight.values.shape[1], bias

    def __call__(self, x: Tensor) -> Tensor:
        """See Linear."""
        slabs = slab_rows((self._bytes.shape[0], self._inputs), torch.float32)
        out = torch.cat([functional.linear(x, self._widened(rows, x.dtype)) for rows in slabs], 1)
        return out if self._bias is None else out + self._bias

    def _widened(self, rows: slice, dtype: torch.dtype) -> Tensor:
        part = self._bytes[rows]
        values = torch.stack((part & 15, part >> 4), -1).flatten(1).to(torch.int8) - 8
        slab = _slab_of(self._weight, rows)
        return IntWeight(4, values[:, : self._inputs], slab.scales, slab.zeros).dequantized(dtype)


def slab_rows(
    shape: torch.Size | tuple[int, int], dtype: torch.dtype, tile: int = 1
) -> list[slice]:
    """Return ranges of outputs whose widened weights take about SLAB_BYTES each. Each range is a
    multiple of `tile`, except for the last."""
    rows = max(1, SLAB_BYTES // (shape[1] * dtype.itemsize * tile)) * tile
    return [slice(at, min(at + rows, shape[0])) for at in range(0, shape[0], rows)]


def _slab_of(weight: IntWeight, rows: slice) -> IntWeight:
    zeros = None if weight.zeros is None else weight.zeros[rows]
    return IntWeight(weight.bits, weight.values[rows], weight.scales[rows], zeros)


def _add_bias(out: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    return (out if bias is None else out + bias).to(dtype)


def int_product(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply int8 x [T, in] by weight [out, in]; return exact sums int32 [T, out]."""
    rows = x.shape[0]
    if x.device.type == "cuda" and rows < CUDA_INT_ROWS:
        x = functional.pad(x, (0, 0, 0, CUDA_INT_ROWS - rows))
    return torch.ops.aten._int_mm(x, weight.t())[:rows]


def works(name: str, trial: Callable[[], bool]) -> bool:
    """Whether the kernel `name` exists on this machine and `trial` finds its results right."""
    try:
        works = trial()
    except (AttributeError, RuntimeError, NotImplementedError, ValueError) as error:
        logger.info("quantized layers: %s is not available here: %s", name, error)
        return False
    if not works:
        logger.warning("quantized layers: %s gives wrong sums here and is not used", name)
    return works


def _tried(compiled: IntegerKernels | None) -> IntegerKernels | None:
    """Return the compiled kernels if their results are right on this machine, else None."""
    if compiled is None or not works("compiled panels", lambda: try_panels(compiled)):
        return None
    logger.info("integer weights: panels, compiled kernels")
    return compiled


def try_panels(compiled: IntegerKernels) -> bool:
    """Whether the compiled kernels are right for each scheme, with few and with more rows."""
    for scheme in SCHEMES:
        weight, x = _example(scheme)
        if scheme == "w8a8":
            layer = W8A8Panels(compiled, weight, None)
            twin = W8A8Linear(weight, None, int_product=False)(x).float()
        else:
            layer = IntegerPanels(compiled, weight, None)
            twin = functional.linear(x.float(), weight.dequantized(torch.float32))
        if not all(
            torch.allclose(layer(x[:n]).float(), twin[:n], atol=0.1, rtol=0.02)
            for n in (3, x.shape[0])
        ):
            return False
    return True


def try_int_product(device: torch.device) -> bool:
    """Whether int_product is exact, also for extreme values: without VNNI, some kernels saturate at
    16 bits."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-127, 128, (37, 512), generator=generator).to(torch.int8)
    weight = torch.randint(-128, 128, (64, 512), generator=generator).to(torch.int8)
    x[0], weight[0], x[1], weight[1] = 127, 127, -127, -128
    expected = x.int() @ weight.int().t()
    counts = (1, 5, 37)
    results = [int_product(x[:n].to(device), weight.to(device)).cpu() for n in counts]
    return all(torch.equal(r, expected[:n]) for n, r in zip(counts, results, strict=True))


def try_int8_kernel() -> bool:
    weight, x = _example("int8")
    kernel = WidenedLinear(weight, None, few_rows_kernel=True)
    plain = WidenedLinear(weight, None, few_rows_kernel=False)
    return torch.allclose(kernel(x[:3]).float(), plain(x[:3]).float(), atol=0.25, rtol=0.02)


def try_int4_kernel() -> bool:
    """Whether the int4 kernel is right for few rows, and its layout is widened right for many."""
    weight, x = _example("int4")
    layer = Int4Linear(weight, None, torch.bfloat16)
    expected = functional.linear(x.float(), weight.dequantized(torch.float32))
    return all(
        torch.allclose(layer(x[:n]).float(), expected[:n], atol=0.25, rtol=0.02)
        for n in (3, FEW_ROWS_INT4 + 1)
    )


def _example(scheme: Scheme) -> tuple[IntWeight, Tensor]:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(2 * INT4_KERNEL_ROWS, 128, generator=generator)
    x = torch.randn(FEW_ROWS_INT4 + 1, 128, generator=generator).bfloat16()
    return quantize(weight, scheme), x
