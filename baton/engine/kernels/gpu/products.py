"""The one place where kernels multiply tiles, and why it is not `tl.dot` alone.

Triton's interpreter multiplies bfloat16 as the integers it keeps them in, and casts integers to
bfloat16 likewise; there, tiles are widened to float32 first. That is what tensor cores do inside:
exact products, sums in float32.
"""

from __future__ import annotations

import triton
import triton.language as tl

_INTERPRETED: tl.constexpr = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def product(a, b):
    """a [M, K] times b [K, N] of one dtype -> float32 [M, N]; float32 is not cut to TF32."""
    if _INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def integers(x, like: tl.constexpr):
    """int8 numbers in the floating dtype `like`; exact."""
    if _INTERPRETED:
        return x.to(tl.float32).to(like)
    return x.to(like)
