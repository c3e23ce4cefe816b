"""Writes keys and values into the pool, rounded to the pool's dtype.

Rows whose slot is negative are padding and are not written; recorded decode steps have such rows.
Twin: attention/kv_store.py, equal bit for bit.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from baton.engine.kernels.gpu.pages import FP8, INT8, LayerPages

_INT8: tl.constexpr = tl.constexpr(INT8)
_FP8: tl.constexpr = tl.constexpr(FP8)
_FP8_MAX: tl.constexpr = tl.constexpr(448.0)
_FP8_LEAST_NORMAL: tl.constexpr = tl.constexpr(2.0**-6)
# For |x| < 2^22: x plus this number, minus it, is the nearest integer to x, ties to even.
_TO_INTEGER: tl.constexpr = tl.constexpr(1.5 * 2**23)


def store(k: Tensor, v: Tensor, layer: LayerPages, slots: Tensor) -> None:
    """Store k [T, kv_heads, k_dim] and v [T, kv_heads, v_dim] in the pool at flat `slots` [T]
    int64.
    """
    if k.stride(2) != 1 or v.stride(2) != 1:
        k, v = k.contiguous(), v.contiguous()
    _store_kernel[(slots.shape[0], layer.kv_heads)](
        k, v, slots, layer.keys, layer.values, *k.stride()[:2], *v.stride()[:2],
        layer.k_dim, layer.v_dim,
        DIM=triton.next_power_of_2(layer.k_dim), V_DIM=triton.next_power_of_2(layer.v_dim),
        BLOCK_SIZE=layer.block_size, STORAGE=layer.storage, num_warps=1,
    )  # fmt: skip


@triton.jit
def to_integer(x):
    """Return the nearest integer to x, ties to even, as float32; |x| < 2^22."""
    return (x + _TO_INTEGER) - _TO_INTEGER


@triton.jit
def fp8_bytes(x):
    """Turn float32 into bytes of float8_e4m3fn, rounded to nearest (ties to even) and clamped.

    It computes with integers, because the interpreter's casts to narrow floats round otherwise. It
    takes the exponent and three bits of mantissa of a float32, and changes the exponent's bias from
    127 to 7. Below 2^-6 the steps are 2^-9.
    """
    x = tl.minimum(tl.maximum(x, -_FP8_MAX), _FP8_MAX)
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    small = to_integer(tl.abs(x) * 512.0).to(tl.int32)
    code = tl.where(tl.abs(x) < _FP8_LEAST_NORMAL, small, normal)
    return (code | tl.where(bits < 0, 128, 0)).to(tl.uint8)


@triton.jit
def scale_of(greatest):
    """Return the int8 scale of a head: its greatest magnitude, divided by 127."""
    return tl.div_rn(tl.maximum(greatest, 1e-12), tl.full(greatest.shape, 127.0, tl.float32))


@triton.jit
def put(pages, at, x, scale, mask, STORAGE: tl.constexpr):
    """Store float32 x at elements `at` of pages.rows. Only int8 uses `scale`, of the shape of x."""
    if STORAGE == _INT8:
        tl.store(pages.rows + at, to_integer(tl.div_rn(x, scale)).to(tl.int8), mask=mask)
    elif STORAGE == _FP8:
        tl.store(pages.rows + at, fp8_bytes(x), mask=mask)
    else:
        tl.store(pages.rows + at, x.to(pages.rows.dtype.element_ty), mask=mask)


@triton.jit
def _store_one(x, pages, slot, head, dim, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
               STORAGE: tl.constexpr):  # fmt: skip
    column = tl.arange(0, DIM)
    inside = column < dim
    wide = tl.load(x + column, mask=inside, other=0.0).to(tl.float32)
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    at = block * pages.block + offset * pages.token + head * pages.head + column
    scale = wide
    if STORAGE == _INT8:
        one = scale_of(tl.zeros([1], tl.float32) + tl.max(tl.abs(wide), 0))
        scale = tl.broadcast_to(one, [DIM])
        behind = block * pages.scale_block + offset * pages.scale_token + head
        tl.store(pages.scales + behind + tl.arange(0, 1), one)
    put(pages, at, wide, scale, inside, STORAGE)


@triton.jit
def _store_kernel(
    k, v, slots, keys, values, k_row, k_head, v_row, v_head, k_dim, v_dim,
    DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, STORAGE: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + row)
    if slot >= 0:
        _store_one(k + row * k_row + head * k_head, keys, slot, head, k_dim,
                   DIM, BLOCK_SIZE, STORAGE)  # fmt: skip
        _store_one(v + row * v_row + head * v_head, values, slot, head, v_dim,
                   V_DIM, BLOCK_SIZE, STORAGE)  # fmt: skip
