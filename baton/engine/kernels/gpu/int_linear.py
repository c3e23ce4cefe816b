"""x times integer weights, widened tile by tile on their way to the product, never in memory.

int8 has a scale per output, or scale and zero per group. int4 has two numbers to a byte: the first
half of each group in the low bits and its second half in the high bits, so that each half is
multiplied with adjacent inputs. Twin: `IntWeight.dequantized` and `functional.linear`
(quantization/integer.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.engine.kernels.gpu.products import integers, product

if TYPE_CHECKING:
    from baton.engine.quantization.int_weight import IntWeight

MAX_STEP: Final = 128  # inputs per step of a product
MIN_STEP: Final = 32  # half a step of int4 must not be shorter than a product's shortest side


class _Weight(NamedTuple):
    """stored [outputs, bytes]; scales and zeros float32 [outputs, groups]."""

    stored: Any
    scales: Any
    zeros: Any
    groups: Any
    per_group: Any


class TritonIntLinear:
    """A linear layer with integer weights, for inputs of any float dtype; see linear.Linear."""

    def __init__(self, weight: IntWeight, bias: Tensor | None) -> None:
        """Take a `weight` that `suits`, and bias [out] or None."""
        self._step = _step(weight)
        self._bits, self._groups, self._bias = weight.bits, weight.num_groups, bias
        self._group_size = weight.group_size
        self._outputs = weight.values.shape[0]
        self._values = weight.values.contiguous()
        if weight.bits == 4:
            self._values = pack_halves(weight.values, self._step)
        self._scales = weight.scales.contiguous()
        self._zeros = None if weight.zeros is None else weight.zeros.contiguous()

    @staticmethod
    def suits(weight: IntWeight) -> bool:
        """Whether the columns of `weight` are in order, and its groups can be cut into steps."""
        return weight.order is None and _step(weight) >= MIN_STEP

    def __call__(self, x: Tensor) -> Tensor:
        """See Linear."""
        x = x.contiguous()
        rows, inputs = x.shape
        y = x.new_empty(rows, self._outputs)
        tile = min(64, max(16, triton.next_power_of_2(rows)))
        outputs = 32 if tile == 16 else 64
        if x.dtype == torch.float32:  # no tensor cores: operands stay in registers
            tile, outputs = 16, 16
        zeros = self._scales if self._zeros is None else self._zeros
        _int_kernel[(triton.cdiv(rows, tile), triton.cdiv(self._outputs, outputs))](
            x, _Weight(self._values, self._scales, zeros, self._groups, self._group_size),
            x if self._bias is None else self._bias, y, rows, inputs, self._outputs,
            ROWS=tile, STEP=self._step, OUTPUTS=outputs, BITS=self._bits,
            GROUPED=self._groups > 1, ZEROED=self._zeros is not None,
            BIASED=self._bias is not None, num_warps=4, num_stages=4,
        )  # fmt: skip
        return y


def pack_halves(values: Tensor, step: int) -> Tensor:
    """Pack values [out, in] int8 of -8..7 into bytes [out, in / 2].

    Of each run of `step` inputs, byte j holds input j (low bits) and input j + step / 2 (high
    bits), each increased by 8.
    """
    halves = (values + 8).view(torch.uint8).unflatten(1, (-1, 2, step // 2))
    return (halves[:, :, 0] | halves[:, :, 1] << 4).flatten(1).contiguous()


def _step(weight: IntWeight) -> int:
    """Return how many inputs a step takes.

    It is the greatest power of two up to MAX_STEP that divides a group. For int8 with one group any
    number would do.
    """
    size = weight.group_size
    if weight.bits == 8 and weight.num_groups == 1:
        return MAX_STEP // 2
    return min(MAX_STEP, size & -size)


@triton.jit
def _int_kernel(
    x, weight, bias, y, rows, inputs, outputs,
    ROWS: tl.constexpr, STEP: tl.constexpr, OUTPUTS: tl.constexpr, BITS: tl.constexpr,
    GROUPED: tl.constexpr, ZEROED: tl.constexpr, BIASED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    output = tl.program_id(1).to(tl.int64) * OUTPUTS + tl.arange(0, OUTPUTS)
    mine, within = (row < rows)[:, None], (output < outputs)[:, None]
    acc = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for start in range(0, inputs, STEP):
        scale = tl.full([OUTPUTS, 1], 1.0, tl.float32)
        zero = tl.zeros([OUTPUTS, 1], tl.float32)
        group = output[:, None] * weight.groups + start // weight.per_group
        if GROUPED:
            scale = tl.load(weight.scales + group, mask=within, other=0.0)
        if ZEROED:
            zero = tl.load(weight.zeros + group, mask=within, other=0.0)
        if BITS == 4:
            half = tl.arange(0, STEP // 2)
            at = output[:, None] * (inputs // 2) + start // 2 + half[None, :]
            both = tl.load(weight.stored + at, mask=within, other=0)
            low = ((both & 15).to(tl.float32) - 8.0 - zero) * scale
            high = ((both >> 4).to(tl.float32) - 8.0 - zero) * scale
            near = row[:, None] * inputs + start + half[None, :]
            first = tl.load(x + near, mask=mine, other=0.0)
            second = tl.load(x + near + STEP // 2, mask=mine, other=0.0)
            acc += product(first, tl.trans(low.to(first.dtype)))
            acc += product(second, tl.trans(high.to(first.dtype)))
        else:
            column = start + tl.arange(0, STEP)
            inside = (column < inputs)[None, :]
            at = output[:, None] * inputs + column[None, :]
            values = tl.load(weight.stored + at, mask=within & inside, other=0)
            near = row[:, None] * inputs + column[None, :]
            part = tl.load(x + near, mask=mine & inside, other=0.0)
            wide = integers(values, part.dtype)
            if GROUPED or ZEROED:
                wide = ((values.to(tl.float32) - zero) * scale).to(part.dtype)
            acc += product(part, tl.trans(wide))
    inside = (output < outputs)[None, :]
    if not GROUPED:
        acc *= tl.load(weight.scales + output, mask=output < outputs, other=0.0)[None, :]
    if BIASED:
        shift = tl.load(bias + output, mask=output < outputs, other=0.0)
        acc += shift.to(tl.float32)[None, :]
    at = row[:, None] * outputs + output[None, :]
    tl.store(y + at, acc.to(y.dtype.element_ty), mask=mine & inside)
