"""Integer weights: rounding floating-point weights to them, and linear layers that use them.

    scheme   weights                             activations      product
    int8     int8, a scale per output channel    as they are      widened slabs; few rows: ATen's
    w8a8     int8, a scale per output channel    int8 per token   int8 x int8 -> int32, exact
    int4     4 bits, scale and zero per group    as they are      few rows: ATen's; else widened
    w4a8     4 bits, scale and zero per group    int8 per token   a group's sum is exact

For bfloat16 on a CPU, Baton's own kernels are used if they were compiled; they widen integers in
registers (kernels/cpu/quantized.py). `QuantizedFormat` tests a kernel on a small product before a
model's first weights that need it, against `IntWeight.dequantized` and `functional.linear`.
quantized_checkpoint.py reads integers that a checkpoint stores.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final, Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional

from baton.engine.kernels.cpu.quantized import (
    FLOATS4,
    MAX_INPUTS,
    QUAD,
    W4A8,
    IntegerKernels,
    integer_kernels_for,
)
from baton.engine.kernels.gpu.support import triton_serves
from baton.engine.quantization.int8_rows import (
    W4A8Linear,
    W8A8Linear,
    add_bias,
    short_groups,
    try_int_product,
)
from baton.engine.quantization.int_weight import (
    IntWeight,
    pack_nibbles,
    slab_rows,
    unpack_nibbles,
)
from baton.engine.quantization.linear import Int8Share, Linear

logger = logging.getLogger(__name__)

Scheme = Literal["int8", "w8a8", "int4", "w4a8"]
SCHEMES: Final = get_args(Scheme)
GROUP_SIZES: Final = (64, 32)  # of 4 bits on load: the first that divides the inputs
SLAB_NUMBERS: Final = 1 << 19  # rounded at once: in float32 they stay in a core's caches
FEW_ROWS: Final = 8  # up to here ATen's int8 kernel beat widening (measured on AVX-512)
FEW_ROWS_INT4: Final = 16  # the same for the int4 kernel
INT4_KERNEL_GROUPS: Final = (32, 64, 128, 256)
INT4_KERNEL_ROWS: Final = 64  # outputs per tile of the packed layout
HALF_DIGITS: Final = 11  # binary digits of a float16


def quantize(weight: Tensor, scheme: Scheme) -> IntWeight:
    """Round weight [out, in] to nearest, a slab of outputs at a time.

    int8 and w8a8: symmetric, a scale per output. int4 and w4a8: from minimum to maximum of each
    group, with scales of 11 bits. Raises ValueError if no group size divides the inputs (4 bits).
    """
    outputs = max(1, SLAB_NUMBERS // weight.shape[1])
    slabs = [_quantize(slab.float(), scheme) for slab in weight.split(outputs)]
    whole = stack_weights(slabs)
    assert whole is not None, "slabs of one weight have one format"
    return whole


def _quantize(weight: Tensor, scheme: Scheme) -> IntWeight:
    """Round one slab, a float32 weight; see quantize."""
    if scheme in ("int8", "w8a8"):
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
    values = (groups / scales[:, :, None]).round_().add_(zeros[:, :, None])
    values = values.clamp_(-8, 7).to(torch.int8).flatten(1)
    scales = _in_half_bits(scales)
    return IntWeight(4, values, scales, zeros, int8_activations=scheme == "w4a8")


def _in_half_bits(scales: Tensor) -> Tensor:
    """Round positive scales to the 11 bits of float16's numbers, but with float32's exponents. So
    the kernels hold them exactly (kernels/cpu/quantized.py's peaks_and_shares), and a part of a
    weight has the scales of the whole."""
    fractions, exponents = torch.frexp(scales)
    return torch.ldexp((fractions * 2**HALF_DIGITS).round_() / 2**HALF_DIGITS, exponents)


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
    """Makes linear layers of integer weights for one dtype and device.

    Tests each kernel once, those of torch only where Baton's own do not serve.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype, self._device = dtype, device
        self._triton = triton_serves(device)
        self._compiled = _tried(integer_kernels_for(dtype, device))
        self._half_cpu = device.type == "cpu" and dtype == torch.bfloat16

    @cached_property
    def _int_product(self) -> bool:
        return works("torch._int_mm", lambda: try_int_product(self._device))

    @cached_property
    def _int8_kernel(self) -> bool:
        return self._half_cpu and works("_weight_int8pack_mm", try_int8_kernel)

    @cached_property
    def _int4_kernel(self) -> bool:
        return self._half_cpu and works("_weight_int4pack_mm_for_cpu", try_int4_kernel)

    def __call__(self, weight: IntWeight, bias: Tensor | None) -> Linear:
        """Return the fastest layer that this machine has for `weight`; bias [out] or None."""
        exchange, scale = weight.exchange, None
        if exchange is None:
            return self._ordered(weight, bias)
        if weight.is_w8a8:
            scale = weight.scales.flatten()
            weight = replace(weight, scales=torch.ones_like(weight.scales))
        return Int8Share(self._ordered(weight, None), scale, bias, exchange)

    def _ordered(self, weight: IntWeight, bias: Tensor | None) -> Linear:
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
        if weight.is_w4a8:
            return W4A8Linear(weight, bias)
        if weight.is_w8a8:
            fits = outputs % 8 == 0 and inputs % 8 == 0
            return W8A8Linear(weight, bias, int_product=fits and self._int_product)
        if self._triton:
            from baton.engine.kernels.gpu.int_linear import TritonIntLinear  # imports triton

            if TritonIntLinear.suits(weight):
                return TritonIntLinear(weight, bias)
        if weight.bits == 8:
            kernel = weight.num_groups == 1 and weight.zeros is None and self._int8_kernel
            return WidenedLinear(weight, bias, few_rows_kernel=kernel)
        fits = weight.group_size in INT4_KERNEL_GROUPS and outputs % INT4_KERNEL_ROWS == 0
        if fits and self._int4_kernel:
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
    """Weights of 4 or 8 bits in panels for the compiled kernel (kernels/cpu/quantized.h). Those of
    w4a8 give W4A8Linear's results, bit for bit."""

    def __init__(self, kernels: IntegerKernels, weight: IntWeight, bias: Tensor | None) -> None:
        self._kernels = kernels
        bits = FLOATS4 if weight.floats else weight.bits
        if weight.is_w4a8:
            weight, bits = short_groups(weight), W4A8
        self.packed = kernels.pack(weight.values, weight.scales, weight.zeros, bits)
        self.bias, self._integers = bias, weight.exchange is not None

    @staticmethod
    def takes(weight: IntWeight) -> bool:
        """Whether the kernel supports `weight`."""
        fits = short_groups(weight).group_size % QUAD == 0
        return fits and (weight.is_w4a8 or not weight.int8_activations)

    def __call__(self, x: Tensor) -> Tensor:
        """See Linear."""
        return self._product(x, torch.bfloat16)

    def wide(self, x: Tensor) -> Tensor:
        """See WideLinear."""
        return self._product(x, torch.float32)

    def _product(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        return self._kernels.linear(x, self.packed, self.bias, dtype, self._integers)


class W8A8Panels:
    """W8A8Linear with the compiled kernel (kernels/cpu/w8a8.h); results are equal bit for bit."""

    def __init__(self, kernels: IntegerKernels, weight: IntWeight, bias: Tensor | None) -> None:
        self._kernels = kernels
        self.packed = kernels.pack_w8a8(weight.values, weight.scales.flatten())
        self.bias, self._integers = bias, weight.exchange is not None

    @staticmethod
    def takes(weight: IntWeight) -> bool:
        """Whether the kernel supports `weight`."""
        return weight.is_w8a8 and weight.shape[1] <= MAX_INPUTS

    def __call__(self, x: Tensor) -> Tensor:
        """See Linear."""
        return self._product(x, torch.bfloat16)

    def wide(self, x: Tensor) -> Tensor:
        """See WideLinear."""
        return self._product(x, torch.float32)

    def _product(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        return self._kernels.w8a8_linear(x, self.packed, self.bias, dtype, self._integers)


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
        return add_bias(torch.cat([self._slab(x, rows) for rows in slabs], 1), self._bias, x.dtype)

    def _slab(self, x: Tensor, rows: slice) -> Tensor:
        if self._scale is not None and self._weight.zeros is None:
            product = functional.linear(x, self._weight.values[rows].to(x.dtype))
            return product * self._scale[rows]
        return functional.linear(x, _slab_of(self._weight, rows).dequantized(x.dtype))


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
        self._bytes = pack_nibbles(weight.values)
        self._weight = IntWeight(4, self._bytes, weight.scales, weight.zeros)
        self._inputs, self._bias = weight.values.shape[1], bias

    def __call__(self, x: Tensor) -> Tensor:
        """See Linear."""
        slabs = slab_rows((self._bytes.shape[0], self._inputs), torch.float32)
        out = torch.cat([functional.linear(x, self._widened(rows, x.dtype)) for rows in slabs], 1)
        return out if self._bias is None else out + self._bias

    def _widened(self, rows: slice, dtype: torch.dtype) -> Tensor:
        values = unpack_nibbles(self._bytes[rows], self._inputs)
        slab = _slab_of(self._weight, rows)
        return IntWeight(4, values, slab.scales, slab.zeros).dequantized(dtype)


def _slab_of(weight: IntWeight, rows: slice) -> IntWeight:
    zeros = None if weight.zeros is None else weight.zeros[rows]
    return IntWeight(weight.bits, weight.values[rows], weight.scales[rows], zeros)


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
        elif scheme == "w4a8":
            layer = IntegerPanels(compiled, weight, None)
            twin = W4A8Linear(weight, None)(x).float()
        else:
            layer = IntegerPanels(compiled, weight, None)
            twin = functional.linear(x.float(), weight.dequantized(torch.float32))
        if not all(
            torch.allclose(layer(x[:n]).float(), twin[:n], atol=0.1, rtol=0.02)
            for n in (3, x.shape[0])
        ):
            return False
    return True


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
