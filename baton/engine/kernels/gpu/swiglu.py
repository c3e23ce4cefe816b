"""Computes silu(gate) * up. Twin: TorchElementwise.swiglu."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

TILE = 1024  # numbers per program


def swiglu(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up [T, I] for gate_up [T, 2 * I]."""
    gate_up = gate_up.contiguous()
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, width)
    tile = min(TILE, triton.next_power_of_2(width))
    _swiglu_kernel[(rows, triton.cdiv(width, tile))](
        gate_up, out, width, TILE_WIDTH=tile, num_warps=4
    )
    return out


@triton.jit
def _swiglu_kernel(gate_up, out, width, TILE_WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE_WIDTH + tl.arange(0, TILE_WIDTH)
    inside = column < width
    at = gate_up + row * 2 * width + column
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + width, mask=inside, other=0.0).to(tl.float32)
    y = gate * tl.sigmoid(gate) * up
    tl.store(out + row * width + column, y.to(out.dtype.element_ty), mask=inside)
