"""RMSNorm and rotation of query and key heads; if fused, also the write of K and V to the pool.

    heads of a row   0 .. heads | .. + kv_heads | .. + 2 * kv_heads
                     query      | key           | value
                     norm, rotate, in place     | stored unchanged (only if fused)

It rounds once where torch rounds after each operation. Twins: models/elementwise.py's
TorchElementwise; for the fused kernel, TorchElementwise followed by kv_store.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from baton.engine.kernels.cpu.library import HeadNorms
from baton.engine.kernels.gpu.kv_write import put, scale_of
from baton.engine.kernels.gpu.pages import INT8, LayerPages, Pages
from baton.engine.kernels.rope import Rotation

HEAD_TILE = 8  # heads of a row per program
_INT8: tl.constexpr = tl.constexpr(INT8)


class _Angles(NamedTuple):
    cos: Any
    sin: Any


class _Norms(NamedTuple):
    query: Any
    key: Any
    epsilon: Any


def rotate(qkv: Tensor, rotation: Rotation, num_heads: int, norms: HeadNorms | None) -> None:
    """Normalize (if norms are given) and rotate the query and key heads of qkv in place.

    qkv is [T, heads + 2 * kv_heads, D] and contiguous.
    """
    heads = (qkv.shape[1] + num_heads) // 2
    nowhere = Pages(qkv, qkv, 0, 0, 0, 0, 0)
    _launch(qkv, (rotation, norms), (num_heads, heads), (nowhere, nowhere, qkv), (1, 0, False))


def rotate_and_store(
    qkv: Tensor,
    rotation: Rotation,
    num_heads: int,
    norms: HeadNorms | None,
    layer: LayerPages,
    slots: Tensor,
) -> None:
    """Do `rotate`, then store K and V of row t in the pool at flat slots[t], unless it is
    negative.
    """
    where = (layer.keys, layer.values, slots)
    kind = (layer.block_size, layer.storage, True)
    _launch(qkv, (rotation, norms), (num_heads, qkv.shape[1]), where, kind)


def _launch(
    qkv: Tensor,
    how: tuple[Rotation, HeadNorms | None],
    heads: tuple[int, int],
    where: tuple[Pages, Pages, Tensor],
    kind: tuple[int, int, bool],
) -> None:
    """Launch the kernel.

    heads: (query heads, heads to process). kind: (block size, storage, whether to store).
    """
    rotation, norms = how
    rows, total, dim = qkv.shape
    assert qkv.is_contiguous()
    given = _Norms(qkv, qkv, 0.0) if norms is None else _Norms(*_parts(norms))
    _rotate_kernel[(rows, -(-heads[1] // HEAD_TILE))](
        qkv, _Angles(rotation.cos.contiguous(), rotation.sin.contiguous()), given,
        where[0], where[1], where[2], total, heads[0], heads[1], dim // 2,
        HALF=triton.next_power_of_2(dim // 2), HEADS=HEAD_TILE, NORMED=norms is not None,
        BLOCK_SIZE=kind[0], STORAGE=kind[1], STORES=kind[2], num_warps=2,
    )  # fmt: skip


def _parts(norms: HeadNorms) -> tuple[Tensor, Tensor, float]:
    return norms.query, norms.key, norms.epsilon


@triton.jit
def _rotate_kernel(
    qkv, angles, norms, keys, values, slots, total, num_heads, looked_at, half,
    HALF: tl.constexpr, HEADS: tl.constexpr, NORMED: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    STORAGE: tl.constexpr, STORES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    column = tl.arange(0, HALF)
    turned = (num_heads + total) // 2  # query and key heads
    inside = (column < half)[None, :]
    mask = (head < looked_at)[:, None] & inside
    low = (row * total + head)[:, None] * (2 * half) + column[None, :]
    first = tl.load(qkv + low, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(qkv + low + half, mask=mask, other=0.0).to(tl.float32)
    rotates = (head < turned)[:, None]
    if NORMED:
        mean = tl.sum(first * first + second * second, 1) / (2 * half)
        factor = tl.where(rotates, tl.rsqrt(mean + norms.epsilon)[:, None], 1.0)
        of_query = (head < num_heads)[:, None] & inside
        of_key = (head >= num_heads)[:, None] & rotates & inside
        weight = tl.load(norms.query + column[None, :], mask=of_query, other=0.0).to(tl.float32)
        weight += tl.load(norms.key + column[None, :], mask=of_key, other=0.0).to(tl.float32)
        first *= factor * tl.where(rotates, weight, 1.0)
        at = half + column[None, :]
        weight = tl.load(norms.query + at, mask=of_query, other=0.0).to(tl.float32)
        weight += tl.load(norms.key + at, mask=of_key, other=0.0).to(tl.float32)
        second *= factor * tl.where(rotates, weight, 1.0)
    cos = tl.load(angles.cos + row * half + column, mask=column < half, other=0.0)
    sin = tl.load(angles.sin + row * half + column, mask=column < half, other=0.0)
    cos, sin = cos.to(tl.float32)[None, :], sin.to(tl.float32)[None, :]
    left = tl.where(rotates, first * cos - second * sin, first)
    right = tl.where(rotates, second * cos + first * sin, second)
    # The pool gets what attention would read from qkv: numbers rounded to the model's dtype.
    kind = qkv.dtype.element_ty
    left, right = left.to(kind), right.to(kind)
    tl.store(qkv + low, left, mask=mask & rotates)
    tl.store(qkv + low + half, right, mask=mask & rotates)
    if STORES:
        slot = tl.load(slots + row)
        if slot >= 0:
            halves = (left.to(tl.float32), right.to(tl.float32), column[None, :], half)
            is_key = (head >= num_heads) & (head < turned)
            _put(keys, slot, head - num_heads, is_key, halves, BLOCK_SIZE, STORAGE)
            is_value = (head >= turned) & (head < looked_at)
            _put(values, slot, head - turned, is_value, halves, BLOCK_SIZE, STORAGE)


@triton.jit
def _put(pages, slot, head, mine, halves, BLOCK_SIZE: tl.constexpr, STORAGE: tl.constexpr):
    """Store both halves [HEADS, HALF] of the heads where `mine` is true in the pool at `slot`."""
    left, right, column, half = halves
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    at = (block * pages.block + offset * pages.token + head * pages.head)[:, None] + column
    mask = mine[:, None] & (column < half)
    scale = left
    if STORAGE == _INT8:
        each = scale_of(tl.maximum(tl.max(tl.abs(left), 1), tl.max(tl.abs(right), 1)))
        behind = block * pages.scale_block + offset * pages.scale_token + head
        tl.store(pages.scales + behind, each, mask=mine)
        scale = tl.broadcast_to(each[:, None], left.shape)
    put(pages, at, left, scale, mask, STORAGE)
    put(pages, at + half, right, scale, mask, STORAGE)
