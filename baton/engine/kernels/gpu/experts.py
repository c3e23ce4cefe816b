"""A mixture's experts in two grouped products: rows sorted by expert, one expert per tile.

    choices sorted by expert    e0 e0 e0 | e2 e2 | e3 ...       tiles of one expert each
    gate and up, gated          [T * per_token, I]              the rows gathered from `hidden`
    down                        [T * per_token, H]              scattered back to (token, choice)

The layout is made on the device, without reading anything back, and has room for the most tiles
that are possible. So the layer can be recorded in a CUDA graph. Twin: models/experts.py's Experts.
Source: MegaBlocks (arXiv 2211.15841), vLLM's fused_moe.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.engine.kernels.gpu.products import product

INPUT_TILE = 64
OUTPUT_TILE = 64


class ExpertLayout(NamedTuple):
    """Which tile computes which choices.

    `order` [T * per_token]: the choices sorted by expert. Per tile: `expert` is its expert
    (num_experts for an empty tile), `first` its first row of `order`, `end` the row after the
    expert's last one. `rows` is the number of rows of a tile.
    """

    order: Tensor
    expert: Tensor
    first: Tensor
    end: Tensor
    rows: int


class _ExpertTiles(NamedTuple):
    order: Any
    expert: Any
    first: Any
    end: Any
    experts: Any
    per_token: Any


def grouped_experts(
    hidden: Tensor, chosen: Tensor, gate_up: Tensor, down: Tensor, some: bool = False
) -> Tensor:
    """Return the result of each choice of each token, [T, per_token, H].

    hidden is [T, H], chosen [T, per_token] int64, gate_up [E, 2 * I, H], down [E, H, I]. `some`: E
    may be chosen, an expert that is not here: zeros, which are not computed.
    """
    num_experts, width, size = down.shape
    layout = lay_out(chosen, num_experts)
    middle = hidden.new_empty(chosen.numel(), size)
    make = hidden.new_zeros if some else hidden.new_empty
    out = make(chosen.numel(), width)
    hidden = hidden.contiguous()
    _launch(hidden, gate_up, middle, layout, chosen.shape[1])
    _launch(middle, down, out, layout, 0)
    return out.view(*chosen.shape, width)


def lay_out(chosen: Tensor, num_experts: int) -> ExpertLayout:
    """Return the layout of chosen [T, per_token], in tiles of about an expert's share of rows.

    Choices of `num_experts`, which lie elsewhere, are in no tile.
    """
    flat = chosen.flatten()
    rows = min(128, max(16, triton.next_power_of_2(flat.numel() // num_experts)))
    order = flat.argsort(stable=True)
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=flat.device)
    counts = counts.scatter_add_(0, flat, torch.ones_like(flat))[:num_experts]
    ends = counts.cumsum(0)
    tile_ends = ((counts + rows - 1) // rows).cumsum(0)
    most = min(flat.numel(), flat.numel() // rows + num_experts)
    tile = torch.arange(most, device=flat.device)
    expert = torch.searchsorted(tile_ends, tile, right=True)
    known = expert.clamp(max=num_experts - 1)
    before = (tile_ends - (counts + rows - 1) // rows)[known]
    first = (ends - counts)[known] + (tile - before) * rows
    return ExpertLayout(order, expert, first, ends[known], rows)


def _launch(x: Tensor, weight: Tensor, y: Tensor, layout: ExpertLayout, per_token: int) -> None:
    """Compute y = x weight^T by expert.

    With `per_token` > 0 x is gathered by token and the product is gated. With 0 y is scattered by
    choice.
    """
    outputs, inputs = y.shape[1], x.shape[1]
    assert weight.is_contiguous()
    grid = (layout.expert.shape[0], triton.cdiv(outputs, OUTPUT_TILE))
    tiles = _ExpertTiles(
        layout.order, layout.expert, layout.first, layout.end, weight.shape[0], max(1, per_token)
    )
    _grouped_kernel[grid](
        x, weight, y, tiles, inputs, outputs,
        ROWS=layout.rows, INPUTS=INPUT_TILE, OUTPUTS=OUTPUT_TILE, GATED=per_token > 0,
        num_warps=8 if layout.rows == 128 else 4, num_stages=3,
    )  # fmt: skip


@triton.jit
def _grouped_kernel(
    x, weight, y, tiles, inputs, outputs,
    ROWS: tl.constexpr, INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0)
    expert = tl.load(tiles.expert + index)
    if expert < tiles.experts:
        row = tl.load(tiles.first + index) + tl.arange(0, ROWS)
        mine = row < tl.load(tiles.end + index)
        choice = tl.load(tiles.order + row, mask=mine, other=0)
        source, target = row, choice
        if GATED:
            source, target = choice // tiles.per_token, row
        output = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
        within = output < outputs
        # The rows of up follow those of gate, `outputs` rows later.
        height = outputs * 2 if GATED else outputs
        base = weight + expert * height * inputs + output[:, None] * inputs
        acc = tl.zeros([ROWS, OUTPUTS], tl.float32)
        other = tl.zeros([ROWS, OUTPUTS], tl.float32)
        for start in range(0, inputs, INPUTS):
            column = start + tl.arange(0, INPUTS)
            inside = (column < inputs)[None, :]
            at = source[:, None] * inputs + column[None, :]
            part = tl.load(x + at, mask=mine[:, None] & inside, other=0.0)
            mask = within[:, None] & inside
            w = tl.load(base + column[None, :], mask=mask, other=0.0)
            acc += product(part, tl.trans(w))
            if GATED:
                w = tl.load(base + outputs * inputs + column[None, :], mask=mask, other=0.0)
                other += product(part, tl.trans(w))
        if GATED:
            acc = acc * tl.sigmoid(acc) * other
        at = target[:, None] * outputs + output[None, :]
        tl.store(y + at, acc.to(y.dtype.element_ty), mask=mine[:, None] & within[None, :])
