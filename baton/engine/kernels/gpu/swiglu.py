"""Computes silu(gate) * up, or gelu(gate) * up by tanh. Twin: TorchElementwise.gated."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

TILE = 1024  # numbers per program


def gated(gate_up: Tensor, gelu: bool = False) -> Tensor:
    """Return silu(gate) * up [T, I] for gate_up [T, 2 * I]; with `gelu`, gelu(gate) by tanh."""
    gate_up = gate_up.contiguous()
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, width)
    tile = min(TILE, triton.next_power_of_2(width))
    _gated_kernel[(rows, triton.cdiv(width, tile))](
        gate_up, out, width, TILE_WIDTH=tile, GELU=gelu, num_warps=4
    )
    return out


@triton.jit
def _gated_kernel(gate_up, out, width, TILE_WIDTH: tl.constexpr, GELU: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE_WIDTH + tl.arange(0, TILE_WIDTH)
    inside = column < width
    at = gate_up + row * 2 * width + column
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + width, mask=inside, other=0.0).to(tl.float32)
    slope = gate
    if GELU:  # (1 + tanh(z)) / 2 is the sigmoid of 2 z
        slope = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    y = gate * tl.sigmoid(slope) * up
    tl.store(out + row * width + column, y.to(out.dtype.element_ty), mask=inside)
