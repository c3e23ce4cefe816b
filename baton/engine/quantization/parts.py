"""Parts of narrow weights (integers, 8-bit floats): the numbers, scales and zeros of some outputs,
or of some inputs.

A tensor-parallel rank keeps such a part (parallel/sharding.py). A part holds numbers of the whole
weight and is never rounded anew, so the weights are the same for any number of ranks:

    some outputs    the rows of values, scales and zeros that belong to them
    some inputs     the columns that belong to them; a group that several ranks share is cut into
                    smaller groups with the same scale and zero
    some inputs,    columns of other ranks are replaced by weights of zero where groups would
    with `order`    otherwise differ in length
    w8a8 and w4a8,  the ranks exchange the greatest magnitudes of rows, so that rows are rounded as
    some inputs     for the whole weight. They add integers (w8a8), so that the sum is the whole
                    weight's, or what integers of groups make (w4a8). See linear.Int8Share
    8-bit floats,   each rank rounds its inputs by itself, as in vLLM: nothing is exchanged, and the
    some inputs     scales of inputs may differ from those of the whole row
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from baton.engine.kernels.cpu.quantized import QUAD
from baton.engine.quantization.float8 import LEAST_GROUP, Float8Weight
from baton.engine.quantization.int_weight import IntWeight

SMALLEST_GROUP: Final = 8  # inputs; with smaller groups, scales and zeros take too much memory


def of_outputs(weight: IntWeight, outputs: slice | Tensor) -> IntWeight:
    """Return a copy of some outputs of `weight`, given as a slice or by their indices."""
    zeros = None if weight.zeros is None else weight.zeros[outputs].clone()
    values, scales = weight.values[outputs].clone(), weight.scales[outputs].clone()
    return replace(weight, values=values, scales=scales, zeros=zeros)


def of_inputs(weight: IntWeight, inputs: slice) -> IntWeight:
    """Return a copy of some inputs of `weight`. `inputs`: one of several even parts of all inputs.

    Raises ValueError if groups would become too small.
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


def float8_outputs(weight: Float8Weight, outputs: slice | Tensor) -> Float8Weight:
    """See of_outputs."""
    values = weight.values.view(torch.uint8)[outputs].clone().view(weight.values.dtype)
    return replace(weight, values=values, scales=weight.scales[:, outputs].contiguous())


def float8_inputs(weight: Float8Weight, inputs: slice) -> Float8Weight:
    """See of_inputs."""
    values, scales, rounding = weight.values[:, inputs].contiguous(), weight.scales, weight.rounding
    if len(scales) == 1:
        size = values.shape[1]
    else:
        size = math.gcd(rounding.group, inputs.start, inputs.stop)
        if size < LEAST_GROUP:
            raise ValueError(f"its groups of {rounding.group} inputs would be cut into {size}")
        groups = torch.arange(inputs.start, inputs.stop, size) // rounding.group
        scales = scales[groups.to(scales.device)]
    return Float8Weight(values, scales, replace(rounding, group=size))


def _of_ordered_inputs(weight: IntWeight, order: Tensor, inputs: slice) -> IntWeight:
    """Return some inputs of a weight with an order. Each group keeps its columns of these inputs.
    A group with fewer such columns than another is filled up with columns of weight zero, which
    read the first input."""
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
    """Return `values` with the scales and zeros of some of the weight's groups."""
    zeros = None if weight.zeros is None else weight.zeros[:, groups]
    return replace(weight, values=values, scales=weight.scales[:, groups], zeros=zeros)
