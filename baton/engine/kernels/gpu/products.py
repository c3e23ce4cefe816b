"""The one place where kernels multiply tiles, and why `tl.dot` alone does not suffice.

Triton's interpreter keeps bfloat16 in integers, and multiplies and casts these integers. So under
the interpreter tiles are converted to float32 first. The result is that of tensor cores: exact
products, summed in float32.
"""

from __future__ import annotations

import triton
import triton.language as tl

_INTERPRETED: tl.constexpr = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def product(a, b):
    """Multiply a [M, K] by b [K, N] of one dtype into float32 [M, N]; float32 is not cut to
    TF32.
    """
    if _INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def integers(x, like: tl.constexpr):
    """Convert int8 numbers to the floating dtype `like`, exactly."""
    if _INTERPRETED:
        return x.to(tl.float32).to(like)
    return x.to(like)
