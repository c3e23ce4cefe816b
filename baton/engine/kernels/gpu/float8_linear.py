"""x times weights of 8-bit floats (e4m3): inputs are rounded to 8-bit floats, and tensor cores
multiply those.

A step multiplies up to MAX_STEP inputs of one group; then its sums are scaled and added in float32.
So sums within tensor cores, which keep fewer bits, are short. Twin: quantization/float8.py; the
rounding of inputs is equal bit for bit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.engine.kernels.gpu.kv_write import fp8_bytes
from baton.engine.kernels.gpu.products import product

if TYPE_CHECKING:
    from baton.engine.quantization.float8 import Float8Weight, InputRounding

MAX_STEP: Final = 128  # inputs per step of a product
_ROUNDED_AT_ONCE: Final = 1024  # inputs
_MOST: tl.constexpr = tl.constexpr(448.0)


class _Scaled(NamedTuple):
    """8-bit floats [rows, inputs], and their scales [groups, rows]."""

    numbers: Any
    scales: Any


class TritonFloat8Linear:
    """A linear layer with weights of 8-bit floats, for inputs of any float dtype; see Linear."""

    def __init__(self, weight: Float8Weight, bias: Tensor | None) -> None:
        """Take a `weight` with one group of inputs, or with groups of 32, 64 or 128."""
        self.weight, self.bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        """See Linear."""
        weight, (rows, inputs), outputs = self.weight, x.shape, self.weight.shape[0]
        y = x.new_empty(rows, outputs)
        tile = min(128, max(16, triton.next_power_of_2(rows)))
        width = {16: 32, 128: 128}.get(tile, 64)
        _float8_kernel[(triton.cdiv(rows, tile), triton.cdiv(outputs, width))](
            _Scaled(*round_inputs(x, weight.rounding)), _Scaled(weight.values, weight.scales),
            y if self.bias is None else self.bias, y, rows, inputs, outputs, weight.rounding.group,
            ROWS=tile, STEP=step_of(weight.rounding), OUTPUTS=width,
            BIASED=self.bias is not None, num_warps=8 if tile == 128 else 4, num_stages=3,
        )  # fmt: skip
        return y


def step_of(rounding: InputRounding) -> int:
    """Return how many inputs a step takes: all of one group."""
    return min(MAX_STEP, triton.next_power_of_2(rounding.group))


def round_inputs(x: Tensor, rounding: InputRounding) -> tuple[Tensor, Tensor]:
    """See quantization.float8.round_inputs."""
    x = x.contiguous()
    rows, inputs = x.shape
    groups = triton.cdiv(inputs, rounding.group)
    values = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(groups, rows, dtype=torch.float32, device=x.device)
    step = min(_ROUNDED_AT_ONCE, triton.next_power_of_2(rounding.group))
    _round_kernel[(rows, groups)](
        x, values.view(torch.uint8), scales, rows, inputs, rounding.group,
        rounding.static or 0.0, rounding.ceiling or 0.0,
        STEP=step, STATIC=rounding.static is not None, CAPPED=rounding.ceiling is not None,
        num_warps=1 if step <= MAX_STEP else 4,
    )  # fmt: skip
    return values, scales


@triton.jit
def _round_kernel(
    x, values, scales, rows, inputs, group, static, ceiling,
    STEP: tl.constexpr, STATIC: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    row, index = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first, end = index * group, tl.minimum(index * group + group, inputs)
    scale = tl.zeros([1], tl.float32) + static
    if not STATIC:
        peak = tl.zeros([1], tl.float32)
        for at in range(first, end, STEP):
            column = at + tl.arange(0, STEP)
            part = tl.load(x + row * inputs + column, mask=column < end, other=0.0)
            peak = tl.maximum(peak, tl.max(tl.abs(part.to(tl.float32)), 0))
        if CAPPED:
            peak = tl.minimum(peak, ceiling)
        scale = tl.div_rn(tl.maximum(peak, 1e-12), tl.full([1], _MOST, tl.float32))
    for at in range(first, end, STEP):
        column = at + tl.arange(0, STEP)
        part = tl.load(x + row * inputs + column, mask=column < end, other=0.0)
        code = fp8_bytes(tl.div_rn(part.to(tl.float32), tl.broadcast_to(scale, [STEP])))
        tl.store(values + row * inputs + column, code, mask=column < end)
    tl.store(scales + index * rows + row + tl.arange(0, 1), scale)


@triton.jit
def _float8_kernel(
    x, weight, bias, y, rows, inputs, outputs, group,
    ROWS: tl.constexpr, STEP: tl.constexpr, OUTPUTS: tl.constexpr, BIASED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    output = tl.program_id(1).to(tl.int64) * OUTPUTS + tl.arange(0, OUTPUTS)
    mine, within = row < rows, output < outputs
    acc = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for start in range(0, inputs, STEP):
        column = start + tl.arange(0, STEP)
        inside = (column < inputs)[None, :]
        near = row[:, None] * inputs + column[None, :]
        part = tl.load(x.numbers + near, mask=mine[:, None] & inside, other=0.0)
        at = output[:, None] * inputs + column[None, :]
        values = tl.load(weight.numbers + at, mask=within[:, None] & inside, other=0.0)
        index = start // group
        by_row = tl.load(x.scales + index * rows + row, mask=mine, other=0.0)
        by_output = tl.load(weight.scales + index * outputs + output, mask=within, other=0.0)
        acc += product(part, tl.trans(values)) * by_row[:, None] * by_output[None, :]
    if BIASED:
        acc += tl.load(bias + output, mask=within, other=0.0).to(tl.float32)[None, :]
    at = row[:, None] * outputs + output[None, :]
    tl.store(y + at, acc.to(y.dtype.element_ty), mask=mine[:, None] & within[None, :])
