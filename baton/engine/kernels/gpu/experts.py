"""A mixture's experts in two grouped products: rows sorted by expert, one expert per tile.

    choices sorted by expert    e0 e0 e0 | e2 e2 | e3 ...       tiles of one expert each
    gate and up, gated          [T * per_token, I]              the rows gathered from `hidden`
    down                        [T * per_token, H]              scattered back to (token, choice)

The layout is made on the device, without reading anything back, and has room for the most tiles
that are possible. So the layer can be recorded in a CUDA graph. Twin: models/experts.py's Experts.
Source: MegaBlocks (arXiv 2211.15841), vLLM's fused_moe.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.engine.kernels.gpu.float8_linear import round_inputs, step_of
from baton.engine.kernels.gpu.products import product

if TYPE_CHECKING:
    from baton.engine.quantization.float8 import InputRounding

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


class ExpertWeights(NamedTuple):
    """One product of all experts: weight [E, outputs, inputs], bias [E, outputs].

    A weight of 8-bit floats has `scales` [E, groups, outputs], and the `rounding` of its inputs.
    """

    weight: Tensor
    bias: Tensor | None = None
    scales: Tensor | None = None
    rounding: InputRounding | None = None


class _ExpertScales(NamedTuple):
    """Of 8-bit floats: those of x [groups, rows], and of the weight."""

    of_rows: Any
    of_weight: Any
    rows: Any
    groups: Any
    group: Any


def grouped_experts(
    hidden: Tensor,
    chosen: Tensor,
    gate_up: ExpertWeights,
    down: ExpertWeights,
    clamped: tuple[float, float] | None = None,
    some: bool = False,
) -> Tensor:
    """Return the result of each choice of each token, [T, per_token, H].

    hidden is [T, H], chosen [T, per_token] int64, gate_up [E, 2 * I, H], down [E, H, I]. `clamped`
    has limit and alpha of the gating where it is not SwiGLU. With `some`, a choice may be E, which
    stands for an expert elsewhere: its result is zeros and is not computed.
    """
    num_experts, width, size = down.weight.shape
    layout = lay_out(chosen, num_experts)
    middle = hidden.new_empty(chosen.numel(), size)
    make = hidden.new_zeros if some else hidden.new_empty
    out = make(chosen.numel(), width)
    hidden = hidden.contiguous()
    _launch(hidden, gate_up, middle, layout, (chosen.shape[1], clamped))
    _launch(middle, down, out, layout, (0, None))
    return out.view(*chosen.shape, width)


def lay_out(chosen: Tensor, num_experts: int) -> ExpertLayout:
    """Return the layout of chosen [T, per_token], in tiles of about an expert's share of rows.

    A choice of `num_experts` stands for an expert elsewhere and is in no tile.
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


def _launch(
    x: Tensor,
    by: ExpertWeights,
    y: Tensor,
    layout: ExpertLayout,
    gating: tuple[int, tuple[float, float] | None],
) -> None:
    """Compute y = x weight^T + bias by expert.

    `gating` has the number of choices of a token, and limit and alpha of a clamped gate. With a
    number above 0 x is gathered by token and the product is gated. With 0 y is scattered by choice.
    """
    (per_token, clamped), (weight, bias, scales, rounding) = gating, by
    outputs, (rows, inputs) = y.shape[1], x.shape
    step, scaled = INPUT_TILE, _ExpertScales(weight, weight, 0, 0, 1)
    if scales is not None and rounding is not None:
        x, of_rows = round_inputs(x, rounding)
        scaled = _ExpertScales(of_rows, scales, rows, scales.shape[1], rounding.group)
        step = step_of(rounding)
    assert weight.is_contiguous()
    assert bias is None or bias.is_contiguous()
    limit, alpha = clamped or (0.0, 0.0)
    grid = (layout.expert.shape[0], triton.cdiv(outputs, OUTPUT_TILE))
    tiles = _ExpertTiles(
        layout.order, layout.expert, layout.first, layout.end, weight.shape[0], max(1, per_token)
    )
    _grouped_kernel[grid](
        x, weight, weight if bias is None else bias, y, tiles, scaled, inputs, outputs, limit,
        alpha, ROWS=layout.rows, INPUTS=step, OUTPUTS=OUTPUT_TILE, GATED=per_token > 0,
        BIASED=bias is not None, CLAMPED=clamped is not None, SCALED=scales is not None,
        num_warps=8 if layout.rows == 128 else 4, num_stages=3,
    )  # fmt: skip


@triton.jit
def _grouped_kernel(
    x, weight, bias, y, tiles, scaled, inputs, outputs, limit, alpha,
    ROWS: tl.constexpr, INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, GATED: tl.constexpr,
    BIASED: tl.constexpr, CLAMPED: tl.constexpr, SCALED: tl.constexpr,
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
            sums = product(part, tl.trans(w))
            index = start // scaled.group
            by_row = tl.full([ROWS], 1.0, tl.float32)
            behind = (expert * scaled.groups + index) * height + output
            if SCALED:
                near = scaled.of_rows + index * scaled.rows + source
                by_row = tl.load(near, mask=mine, other=0.0)
                by_output = tl.load(scaled.of_weight + behind, mask=within, other=0.0)
                sums *= by_row[:, None] * by_output[None, :]
            acc += sums
            if GATED:
                w = tl.load(base + outputs * inputs + column[None, :], mask=mask, other=0.0)
                sums = product(part, tl.trans(w))
                if SCALED:
                    at = scaled.of_weight + behind + outputs
                    by_output = tl.load(at, mask=within, other=0.0)
                    sums *= by_row[:, None] * by_output[None, :]
                other += sums
        if BIASED:
            of = bias + expert * height + output
            acc += tl.load(of, mask=within, other=0.0).to(tl.float32)[None, :]
            if GATED:
                other += tl.load(of + outputs, mask=within, other=0.0).to(tl.float32)[None, :]
        if CLAMPED:
            acc = tl.minimum(acc, limit)
            acc *= tl.sigmoid(acc * alpha)
            acc *= tl.minimum(tl.maximum(other, -limit), limit) + 1.0
        elif GATED:
            acc = acc * tl.sigmoid(acc) * other
        at = target[:, None] * outputs + output[None, :]
        tl.store(y + at, acc.to(y.dtype.element_ty), mask=mine[:, None] & within[None, :])
