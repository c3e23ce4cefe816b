"""Parts of integer weights: the integers, scales and zeros of some outputs, or of some inputs.

A tensor-parallel rank keeps such a part (parallel/sharding.py). A part holds the integers of the
whole weight, never integers that were rounded anew, so every number of ranks serves one model:

    some outputs    their rows of values, scales and zeros
    some inputs     their columns; a group that several ranks share is cut into smaller groups, all
                    with its scale and zero
    inputs after    columns of other ranks become zero weights, so that groups stay equally long
    `order`
    w8a8            of some inputs: rows are rounded, and sums are scaled, as those of the whole,
                    for which the ranks exchange them (linear.W8A8Share)
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from baton.engine.kernels.cpu.quantized import QUAD
from baton.engine.quantization.integer import IntWeight
from baton.engine.quantization.linear import PEAK_INPUTS, RankSums

SMALLEST_GROUP: Final = 8  # inputs: scales and zeros of smaller ones take more than plain weights


def of_outputs(weight: IntWeight, outputs: slice | Tensor) -> IntWeight:
    """Some outputs of `weight`, a slice or their ids, as copies."""
    zeros = None if weight.zeros is None else weight.zeros[outputs].clone()
    values, scales = weight.values[outputs].clone(), weight.scales[outputs].clone()
    return replace(weight, values=values, scales=scales, zeros=zeros)


def of_inputs(weight: IntWeight, inputs: slice) -> IntWeight:
    """Some inputs of `weight`, as copies. `inputs`: one of several even parts of all inputs.

    Raises ValueError if its groups would become too small.
    """
    if weight.order is not None:
        return _of_ordered_inputs(weight, weight.order, inputs)
    values = weight.values[:, inputs].contiguous()
    if weight.num_groups == 1:
        return replace(weight, values=values)
    size = math.gcd(weight.group_size, inputs.start, inputs.stop)
    if size < min(SMALLEST_GROUP, weight.group_size):
        raise ValueError(f"its groups of {weight.group_size} inputs would be cut into {size}")
    groups = torch.arange(inputs.start, inputs.stop, size) // weight.group_size
    return _with_groups(weight, values, groups.to(values.device))


def _of_ordered_inputs(weight: IntWeight, order: Tensor, inputs: slice) -> IntWeight:
    """A group keeps its columns of these inputs; where it has fewer of them than another group,
    others of its columns fill it up, with weights of zero, which read the first input."""
    size = weight.group_size
    mine = ((order >= inputs.start) & (order < inputs.stop)).view(-1, size)
    longest = int(mine.sum(1).max())
    width = min(size, -(-longest // QUAD) * QUAD)
    columns = (~mine).int().argsort(dim=1, stable=True)[:, :width]
    kept = mine.gather(1, columns).flatten()
    groups = torch.arange(len(mine), device=order.device)
    columns = (columns + groups[:, None] * size).flatten()
    nothing = 0 if weight.zeros is None else weight.zeros.repeat_interleave(width, 1)
    values = torch.where(kept, weight.values[:, columns], nothing).to(torch.int8)
    order = torch.where(kept, order[columns] - inputs.start, 0)
    return replace(_with_groups(weight, values, groups), order=order)


def _with_groups(weight: IntWeight, values: Tensor, groups: Tensor) -> IntWeight:
    """`values` with the scales and zeros of some of the weight's groups."""
    zeros = None if weight.zeros is None else weight.zeros[:, groups]
    return replace(weight, values=values, scales=weight.scales[:, groups], zeros=zeros)


def with_exchange(weight: IntWeight, exchange: RankSums) -> IntWeight:
    """A part of w8a8's inputs, for ranks that have one each."""
    values = functional.pad(weight.values, (0, PEAK_INPUTS))
    return replace(weight, values=values, exchange=exchange)
