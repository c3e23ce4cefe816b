"""Keys and values into the pool, rounded as it stores them.

Rows whose slot is negative are padding and go nowhere: a recorded decode step may have some. Twin:
attention/kv_store.py, to the bit.
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
# Added and taken away again, it leaves the nearest integer, ties to even: |x| < 2^22.
_TO_INTEGER: tl.constexpr = tl.constexpr(1.5 * 2**23)


def store(k: Tensor, v: Tensor, layer: LayerPages, slots: Tensor) -> None:
    """Store k [T, kv_heads, k_dim] and v [T, kv_heads, v_dim] at flat `slots` [T] int64; mutates
    the pool. A head's numbers lie side by side."""
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
    """The nearest integer, ties to even, as float32; |x| < 2^22."""
    return (x + _TO_INTEGER) - _TO_INTEGER


@triton.jit
def fp8_bytes(x):
    """float32 -> bytes of float8_e4m3fn, to nearest (ties to even), clamped to its range.

    In integers, because the interpreter's casts to narrow floats do not round so: exponent and
    three bits of mantissa of a float32, the bias of 127 made 7; below 2^-6, steps of 2^-9.
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
    """int8: what one step is worth, from the greatest magnitude of a head."""
    return tl.div_rn(tl.maximum(greatest, 1e-12), tl.full(greatest.shape, 127.0, tl.float32))


@triton.jit
def put(pages, at, x, scale, mask, STORAGE: tl.constexpr):
    """Store float32 x at elements `at` of pages.rows; `scale` as x (int8 alone looks at it)."""
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
