"""Products whose inputs are rounded to int8 per token, in plain torch: w8a8 and w4a8.

The sums of w8a8 (of whole rows) and w4a8 (of groups) are exact integers, whatever kernel computes
them; so a row's result depends on no other row. The compiled kernels (kernels/cpu/w8a8.h, w4a8.h)
equal these layers bit for bit.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from baton.engine.kernels.cpu.quantized import peaks_and_shares
from baton.engine.quantization.int_weight import (
    IntWeight,
    pack_nibbles,
    slab_rows,
    unpack_nibbles,
)
from baton.engine.quantization.linear import row_scales

CUDA_INT_ROWS: Final = 32  # cuBLAS wants more than 16 rows
LONGEST_GROUP: Final = 4096  # of w4a8: 4096 * 16 * 127 is below 2^24, so float32 holds its sums


class W8A8Linear:
    """int8 weights, and inputs rounded to int8 per token. The sums are exact integers, so a row's
    result depends on no other row, whatever the kernel.
    """

    def __init__(self, weight: IntWeight, bias: Tensor | None, *, int_product: bool) -> None:
        self._values = weight.values.contiguous()
        self._scale, self._bias = weight.scales.flatten(), bias
        self._int_product = int_product
        self._integers = weight.exchange is not None

    def __call__(self, x: Tensor) -> Tensor:
        """See Linear."""
        return self.wide(x).to(x.dtype)

    def wide(self, x: Tensor) -> Tensor:
        """See WideLinear."""
        rounded, scales = round_rows(x, self._integers)
        if self._int_product:
            sums = int_product(rounded, self._values).float()
        else:
            slabs = slab_rows(self._values.shape, torch.float32)
            wide = rounded.float()
            parts = [functional.linear(wide, self._values[rows].float()) for rows in slabs]
            sums = torch.cat(parts, 1)
        return add_bias(sums.mul_(scales).mul_(self._scale), self._bias, torch.float32)


class W4A8Linear:
    """4-bit weights in groups, and inputs rounded to int8 per token.

    The sum of a group is an exact integer. It meets the group's scale, and the groups are added in
    their order; then the row's scale, what all scales of the output have in common
    (peaks_and_shares), and the bias. Each of these is rounded to float32 by itself. Groups of more
    than LONGEST_GROUP inputs are cut.
    """

    def __init__(self, weight: IntWeight, bias: Tensor | None) -> None:
        weight = short_groups(weight)
        self._bytes, self._bias = pack_nibbles(weight.values), bias
        self._inputs, self._zeros = weight.shape[1], weight.zeros
        self._integers = weight.exchange is not None
        self._peaks, shares = peaks_and_shares(weight.scales)
        self._shares = shares.t().float().contiguous()  # [groups, out]

    def __call__(self, x: Tensor) -> Tensor:
        """See Linear."""
        return self.wide(x).to(x.dtype)

    def wide(self, x: Tensor) -> Tensor:
        """See WideLinear."""
        rounded, scales = round_rows(x, self._integers)
        groups = rounded.float().unflatten(1, (len(self._shares), -1)).transpose(0, 1)
        slabs = slab_rows((self._bytes.shape[0], self._inputs), torch.float32)
        sums = torch.cat([self._slab(groups, outputs) for outputs in slabs], 1)
        return add_bias(sums.mul_(scales).mul_(self._peaks), self._bias, torch.float32)

    def _slab(self, x: Tensor, outputs: slice) -> Tensor:
        """Multiply x [groups, T, inputs of a group] by some outputs' weights -> [T, outputs]."""
        values = unpack_nibbles(self._bytes[outputs], self._inputs).float()
        weight = values.unflatten(1, (len(x), -1))
        if self._zeros is not None:
            weight -= self._zeros[outputs, :, None]
        sums = torch.bmm(x, weight.permute(1, 2, 0))
        total = torch.zeros_like(sums[0])
        for group, shares in zip(sums, self._shares[:, outputs], strict=True):
            total += group.mul_(shares)
        return total


def short_groups(weight: IntWeight) -> IntWeight:
    """Return `weight` with groups of at most LONGEST_GROUP inputs: longer ones are cut evenly, into
    parts of a multiple of 4 inputs if possible. The parts have the group's scale and zero."""
    size = weight.group_size
    if size <= LONGEST_GROUP:
        return weight
    counts = [parts for parts in range(2, size + 1) if size % parts == 0]
    fitting = [parts for parts in counts if size // parts <= LONGEST_GROUP]
    parts = next((each for each in fitting if size // each % 4 == 0), fitting[0])
    zeros = None if weight.zeros is None else weight.zeros.repeat_interleave(parts, 1)
    return replace(weight, scales=weight.scales.repeat_interleave(parts, 1), zeros=zeros)


def round_rows(x: Tensor, integers: bool = False) -> tuple[Tensor, Tensor]:
    """Round x [T, in] to int8 [T, in] and scales [T, 1] float32, symmetric, one scale per row.
    `integers`: x holds integers of int8 already, and the scales are 1."""
    if integers:
        return x.to(torch.int8), torch.ones(len(x), 1, device=x.device)
    wide = x.float()
    scales = row_scales(wide.abs().amax(1, keepdim=True))
    return (wide / scales).round_().to(torch.int8), scales


def int_product(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply int8 x [T, in] by weight [out, in]; return exact sums int32 [T, out]."""
    rows = x.shape[0]
    if x.device.type == "cuda" and rows < CUDA_INT_ROWS:
        x = functional.pad(x, (0, 0, 0, CUDA_INT_ROWS - rows))
    return torch.ops.aten._int_mm(x, weight.t())[:rows]


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


def add_bias(out: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    return (out if bias is None else out + bias).to(dtype)
