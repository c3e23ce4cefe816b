"""Weights of integers: the numbers, what they stand for, and slabs of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, Literal

import torch
from torch import Tensor
from torch.nn import functional

from baton.engine.quantization.linear import RankSums

SLAB_BYTES: Final = 2 << 20  # widened weights that one product reads: they stay in the caches


@dataclass(frozen=True, slots=True)
class IntWeight:
    """w[o, i] = (values[o, i] - zeros[o, g]) * scales[o, g] for the i-th input of group g.

    values [out, in] int8 (4 bits: -8..7), scales [out, groups] float32, zeros [out, groups] float32
    or None = all 0. A group is a run of in / groups columns of values. `order` [in]: column j
    belongs to input order[j]; None = to input j. `int8_activations`: inputs are rounded to int8 per
    token. `exchange`: other ranks hold the other inputs, and rows are rounded before the product
    (Int8Share). `floats`: the weights are 4-bit floats (E2M1); values hold twice their numbers.
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

    @property
    def is_w8a8(self) -> bool:
        """Whether the format is w8a8: an output's sum of products is one integer."""
        simple = self.bits == 8 and self.num_groups == 1 and self.zeros is None
        return self.int8_activations and simple

    @property
    def is_w4a8(self) -> bool:
        """Whether the format is w4a8: a group's sum of products is an integer."""
        return self.int8_activations and self.bits == 4

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


def slab_rows(
    shape: torch.Size | tuple[int, int], dtype: torch.dtype, tile: int = 1
) -> list[slice]:
    """Return ranges of outputs whose widened weights take about SLAB_BYTES each. Each range is a
    multiple of `tile`, except for the last."""
    rows = max(1, SLAB_BYTES // (shape[1] * dtype.itemsize * tile)) * tile
    return [slice(at, min(at + rows, shape[0])) for at in range(0, shape[0], rows)]


def pack_nibbles(values: Tensor) -> Tensor:
    """Pack values [out, in] of -8..7 into uint8 [out, (in + 1) / 2], the first in the lower half of
    a byte."""
    raised = values + 8
    if raised.shape[1] % 2:
        raised = functional.pad(raised, (0, 1))
    return (raised[:, ::2] | raised[:, 1::2] << 4).view(torch.uint8)


def unpack_nibbles(packed: Tensor, inputs: int) -> Tensor:
    """Return the values [out, inputs] int8 that pack_nibbles has packed."""
    values = torch.stack((packed & 15, packed >> 4), -1).flatten(1).to(torch.int8) - 8
    return values[:, :inputs]
