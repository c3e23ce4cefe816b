"""RMSNorm over rows, with the residual added first. Twin: TorchElementwise.add_norm."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_WIDTH = 1 << 15  # numbers of a row that one program holds


def add_norm(residual: Tensor, delta: Tensor | None, weight: Tensor, epsilon: float) -> Tensor:
    """Add `delta` to `residual` in place, and return the RMSNorm of the sum.

    All are [T, H] and contiguous, weight is [H]; H <= MAX_WIDTH.
    """
    rows, width = residual.shape
    assert width <= MAX_WIDTH
    assert residual.is_contiguous()
    out = torch.empty_like(residual)
    tile = triton.next_power_of_2(width)
    _norm_kernel[(rows,)](
        residual, residual if delta is None else delta.contiguous(), weight, out, width, epsilon,
        WIDTH=tile, ADDS=delta is not None, num_warps=min(16, max(1, tile // 512)),
    )  # fmt: skip
    return out


@triton.jit
def _norm_kernel(residual, delta, weight, out, width, epsilon, WIDTH: tl.constexpr,
                 ADDS: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    inside = column < width
    x = tl.load(residual + row * width + column, mask=inside, other=0.0)
    if ADDS:
        added = tl.load(delta + row * width + column, mask=inside, other=0.0)
        # Rounded before the norm, so that the norm is that of the stored residual.
        x = (x.to(tl.float32) + added.to(tl.float32)).to(residual.dtype.element_ty)
        tl.store(residual + row * width + column, x, mask=inside)
    wide = x.to(tl.float32)
    factor = tl.rsqrt(tl.sum(wide * wide, 0) / width + epsilon)
    scaled = wide * factor * tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + column, scaled.to(out.dtype.element_ty), mask=inside)
