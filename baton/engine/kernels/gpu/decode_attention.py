"""Paged decode attention: one new token per sequence; several programs share its keys.

    program (row, kv head, split)    the group's query heads against keys of one split
    combine (row, query head)        the splits' sums, rescaled to one maximum; sinks

GQA: the query heads of one KV head are the rows of one product, so K and V are read once. With one
split there is nothing to combine. The number of splits depends only on the number of rows, so that
a launch can be recorded in a CUDA graph. A row of 0 tokens is padding and yields zeros.
Twin: attention/reference.py, and torch_cpu.py. Source: the split of FlashDecoding
(crfm.stanford.edu/2023/10/12/flashdecoding.html).
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.engine.kernels.gpu.pages import Heads, LayerPages, finished, online, padded, places

MAX_SPLITS: Final = 32
PROGRAMS: Final = 512  # about as many as fill a GPU: 4 on each of an H100's 132 multiprocessors
TILE_BYTES: Final = 16_384  # bytes of keys that a program reads at once
KEY_TILES: Final = (16, 64)  # least and most keys that a program reads at once


class GpuDecodeRows(NamedTuple):
    """Rows of one new token each.

    `numbers` [4, n] int64 has four numbers per row: its row of q and out, its row of `tables`, its
    number of tokens (the new one included; 0 = padding), and the index of its first held block.
    `tables` [S, W] int64 lists the blocks.
    """

    numbers: Tensor
    tables: Tensor


class _Rows(NamedTuple):
    numbers: Any
    tables: Any
    count: Any
    width: Any


class _Partial(NamedTuple):
    """Results of the splits: acc float32 [n, query_heads, splits, v_dim] and stats float32.

    stats is [2, n, query_heads, splits]: the maxima and the sums of the softmax.
    """

    acc: Any
    stats: Any


def decode_attention(
    q: Tensor, out: Tensor, layer: LayerPages, rows: GpuDecodeRows, splits: int | None = None
) -> None:
    """Fill the rows of out [T, query_heads, v_dim] from q [T, query_heads, k_dim].

    `splits` is a power of two up to MAX_SPLITS; None chooses it by the number of rows.
    """
    count, query_heads = rows.numbers.shape[1], q.shape[1]
    group = query_heads // layer.kv_heads
    if splits is None:
        splits = splits_for(count, layer.kv_heads)
    heads = Heads.of(q, out)
    partial = _Partial(q, q)  # never used with one split
    if splits > 1:
        shape = (count, query_heads, splits)
        partial = _Partial(
            torch.empty(*shape, layer.v_dim, dtype=torch.float32, device=q.device),
            torch.empty(2, *shape, dtype=torch.float32, device=q.device),
        )
    _decode_kernel[(count, layer.kv_heads, splits)](
        heads, partial, _Rows(*rows, count, rows.tables.stride(0)),
        layer.keys, layer.values, layer.rule, layer.k_dim, layer.v_dim, layer.kv_heads,
        GROUP=group, HEADS=padded(group), DIM=padded(layer.k_dim), V_DIM=padded(layer.v_dim),
        BLOCK_SIZE=layer.block_size, KEYS=key_tile(q.dtype, layer.k_dim), SPLITS=splits,
        STORAGE=layer.storage, CAPPED=layer.capped, HAS_SINKS=layer.has_sinks,
        num_warps=4, num_stages=3,
    )  # fmt: skip
    if splits > 1:
        _combine_kernel[(count, query_heads)](
            heads, partial, rows.numbers, layer.rule.sinks, layer.v_dim, query_heads,
            V_DIM=padded(layer.v_dim), SPLITS=splits, HAS_SINKS=layer.has_sinks, num_warps=4,
        )  # fmt: skip


def splits_for(count: int, kv_heads: int) -> int:
    """Return the splits for `count` rows: a power of two that gives enough programs to fill a
    GPU.
    """
    wanted = -(-PROGRAMS // max(1, count * kv_heads))
    return min(MAX_SPLITS, triton.next_power_of_2(wanted))


def key_tile(dtype: torch.dtype, dim: int) -> int:
    """Return how many keys a program reads at once.

    Wide heads read fewer. float32 reads the least, because its products keep operands in registers.
    """
    fits = TILE_BYTES // (padded(dim) * dtype.itemsize)
    return KEY_TILES[0] if dtype == torch.float32 else max(KEY_TILES[0], min(KEY_TILES[1], fits))


@triton.jit
def _decode_kernel(
    heads, partial, rows, keys, values, rule, k_dim, v_dim, kv_heads,
    GROUP: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, V_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, KEYS: tl.constexpr, SPLITS: tl.constexpr, STORAGE: tl.constexpr,
    CAPPED: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    index, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = tl.load(rows.numbers + index)
    table = rows.tables + tl.load(rows.numbers + rows.count + index) * rows.width
    tokens = tl.load(rows.numbers + 2 * rows.count + index)
    first = tl.load(rows.numbers + 3 * rows.count + index)
    lane = tl.arange(0, HEADS)
    mine = lane < GROUP
    query_head = kv_head * GROUP + lane
    column = tl.arange(0, DIM)
    at = row * heads.q_row + query_head[:, None] * heads.q_head + column[None, :]
    q = tl.load(heads.q + at, mask=mine[:, None] & (column < k_dim)[None, :], other=0.0)

    low = tl.where(rule.window > 0, tl.maximum(tokens - rule.window, 0), 0)
    share = tl.cdiv(tl.cdiv(tokens - low, SPLITS), KEYS) * KEYS
    begin = low + split * share
    end = tl.minimum(begin + share, tokens)
    acc = tl.zeros([HEADS, V_DIM], tl.float32)
    greatest = tl.full([HEADS], float("-inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    for start in range(begin, end, KEYS):
        position = start + tl.arange(0, KEYS)
        held = position < end
        block, offset = places(table, position, first, held, BLOCK_SIZE)
        acc, greatest, total = online(
            q, (acc, greatest, total), held[None, :], (block, offset, held, kv_head),
            (keys, values, rule, k_dim, v_dim), (DIM, V_DIM, STORAGE, CAPPED),
        )  # fmt: skip

    value_column = tl.arange(0, V_DIM)
    mask = mine[:, None] & (value_column < v_dim)[None, :]
    if SPLITS == 1:
        sink = greatest
        if HAS_SINKS:
            sink = tl.load(rule.sinks + query_head, mask=mine, other=0.0)
        result = finished((acc, greatest, total), sink, HAS_SINKS)
        at = row * heads.out_row + query_head[:, None] * heads.out_head + value_column[None, :]
        tl.store(heads.out + at, result.to(heads.out.dtype.element_ty), mask=mask)
    else:
        place = (index * kv_heads * GROUP + query_head) * SPLITS + split
        tl.store(partial.acc + place[:, None] * v_dim + value_column[None, :], acc, mask=mask)
        tl.store(partial.stats + place, greatest, mask=mine)
        behind = rows.count * kv_heads * GROUP * SPLITS
        tl.store(partial.stats + behind + place, total, mask=mine)


@triton.jit
def _combine_kernel(
    heads, partial, numbers, sinks, v_dim, query_heads,
    V_DIM: tl.constexpr, SPLITS: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    index, query_head = tl.program_id(0), tl.program_id(1)
    count = tl.num_programs(0)
    row = tl.load(numbers + index)
    split = tl.arange(0, SPLITS)
    place = (index * query_heads + query_head) * SPLITS + split
    greatest = tl.load(partial.stats + place)
    total = tl.load(partial.stats + count * query_heads * SPLITS + place)
    column = tl.arange(0, V_DIM)
    inside = column < v_dim
    at = place[:, None] * v_dim + column[None, :]
    acc = tl.load(partial.acc + at, mask=inside[None, :], other=0.0)
    top = tl.max(greatest, 0)
    base = tl.where(top == float("-inf"), 0.0, top)
    kept = tl.exp2(greatest - base)
    # One row, in the shape that `finished` takes.
    whole = tl.sum(acc * kept[:, None], 0)[None, :]
    one = tl.zeros([1], tl.float32)
    sink = one
    if HAS_SINKS:
        sink = one + tl.load(sinks + query_head)
    result = finished((whole, one + top, one + tl.sum(total * kept, 0)), sink, HAS_SINKS)
    at = row * heads.out_row + query_head * heads.out_head + column[None, :]
    tl.store(heads.out + at, result.to(heads.out.dtype.element_ty), mask=inside[None, :])
