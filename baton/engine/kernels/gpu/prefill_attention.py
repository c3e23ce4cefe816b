"""Paged prefill attention: spans of several new tokens over all tokens of their sequence.

    program (tile, query head)    rows of one span against keys [low, last row's position]

All keys and values come from the pool, even those of the step itself. So the prefix of a chunked
prompt, a prefix hit and fetched KV look alike. Keys that every row of a tile sees need no mask;
keys on the diagonal and at the edge of a window need one. Twin: attention/reference.py, and
torch_cpu.py. Source: FlashAttention-2 (arXiv 2307.08691).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.engine.kernels.gpu.pages import Heads, LayerPages, finished, online, padded, places
from baton.engine.state.batch import GroupTables, Span


@dataclass(frozen=True, slots=True)
class TileSizes:
    """Rows and keys of a tile: powers of two, at least 16."""

    rows: int
    keys: int


class PrefillTiles(NamedTuple):
    """The tiles of a step.

    `numbers` [5, n] int64 has per tile: its first row of q, its number of rows, the position of its
    first row, its sequence's row of `tables` [S, W], and the sequence's first held block.
    """

    numbers: Tensor
    tables: Tensor
    sizes: TileSizes


class _Tiles(NamedTuple):
    numbers: Any
    tables: Any
    count: Any
    width: Any


def tile_sizes(dtype: torch.dtype, dim: int) -> TileSizes:
    """Return the tile that fits an H100's registers and shared memory.

    float32 does not use tensor cores here and keeps its operands in registers, so its tile is
    small.
    """
    if dtype == torch.float32:
        return TileSizes(16, 16)
    return TileSizes(128, 64) if padded(dim) <= 128 else TileSizes(64, 32)


def lay_tiles(spans: Sequence[Span], table: GroupTables, sizes: TileSizes) -> PrefillTiles | None:
    """Return the tiles of all spans of several rows; None if there is no such span."""
    numbers: list[tuple[int, ...]] = []
    for index, span in enumerate(spans):
        if span.num_rows == 1:
            continue
        for offset in range(0, span.num_rows, sizes.rows):
            count = min(sizes.rows, span.num_rows - offset)
            at = (span.first_row + offset, count, span.start + offset)
            numbers.append((*at, index, table.first[index]))
    if not numbers:
        return None
    # The last tiles of a span see the most keys. They start first, and short ones fill the end.
    numbers.reverse()
    columns = torch.from_numpy(np.array(numbers, dtype=np.int64).T.copy())
    return PrefillTiles(columns.to(table.blocks.device), table.blocks, sizes)


def prefill_attention(q: Tensor, out: Tensor, layer: LayerPages, tiles: PrefillTiles) -> None:
    """Fill the rows of the tiles in out [T, query_heads, v_dim] from q [T, query_heads, k_dim]."""
    count, query_heads = tiles.numbers.shape[1], q.shape[1]
    _prefill_kernel[(count, query_heads)](
        Heads.of(q, out),
        _Tiles(tiles.numbers, tiles.tables, count, tiles.tables.stride(0)),
        layer.keys, layer.values, layer.rule, layer.k_dim, layer.v_dim,
        GROUP=query_heads // layer.kv_heads, ROWS=tiles.sizes.rows, KEYS=tiles.sizes.keys,
        DIM=padded(layer.k_dim), V_DIM=padded(layer.v_dim), BLOCK_SIZE=layer.block_size,
        STORAGE=layer.storage, CAPPED=layer.capped, HAS_SINKS=layer.has_sinks,
        num_warps=8 if tiles.sizes.rows >= 128 else 4, num_stages=2,
    )  # fmt: skip


@triton.jit
def _prefill_kernel(
    heads, tiles, keys, values, rule, k_dim, v_dim,
    GROUP: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr,
    V_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, STORAGE: tl.constexpr, CAPPED: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):  # fmt: skip
    index, query_head = tl.program_id(0), tl.program_id(1)
    kv_head = query_head // GROUP
    row = tl.load(tiles.numbers + index)
    count = tl.load(tiles.numbers + tiles.count + index)
    position = tl.load(tiles.numbers + 2 * tiles.count + index)
    table = tiles.tables + tl.load(tiles.numbers + 3 * tiles.count + index) * tiles.width
    first = tl.load(tiles.numbers + 4 * tiles.count + index)
    lane = tl.arange(0, ROWS)
    mine = lane < count
    column = tl.arange(0, DIM)
    at = (row + lane)[:, None] * heads.q_row + query_head * heads.q_head + column[None, :]
    q = tl.load(heads.q + at, mask=mine[:, None] & (column < k_dim)[None, :], other=0.0)

    low = tl.where(rule.window > 0, tl.maximum(position - rule.window + 1, 0), 0)
    high = position + count
    # Every row sees the keys below `plain`. With a window `plain` is `low`: almost every tile has
    # hidden keys.
    plain = low + tl.where(rule.window > 0, 0, (position + 1 - low) // KEYS * KEYS)
    acc = tl.zeros([ROWS, V_DIM], tl.float32)
    greatest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for start in range(low, plain, KEYS):
        key = start + tl.arange(0, KEYS)
        held = key < high
        block, offset = places(table, key, first, held, BLOCK_SIZE)
        acc, greatest, total = online(
            q, (acc, greatest, total), held[None, :], (block, offset, held, kv_head),
            (keys, values, rule, k_dim, v_dim), (DIM, V_DIM, STORAGE, CAPPED),
        )  # fmt: skip
    here = (position + lane)[:, None]
    for start in range(plain, high, KEYS):
        key = start + tl.arange(0, KEYS)
        held = key < high
        block, offset = places(table, key, first, held, BLOCK_SIZE)
        seen = (key[None, :] <= here) & ((rule.window == 0) | (key[None, :] > here - rule.window))
        acc, greatest, total = online(
            q, (acc, greatest, total), seen & held[None, :], (block, offset, held, kv_head),
            (keys, values, rule, k_dim, v_dim), (DIM, V_DIM, STORAGE, CAPPED),
        )  # fmt: skip

    sink = greatest
    if HAS_SINKS:
        sink = tl.zeros([ROWS], tl.float32) + tl.load(rule.sinks + query_head)
    result = finished((acc, greatest, total), sink, HAS_SINKS)
    value_column = tl.arange(0, V_DIM)
    at = (row + lane)[:, None] * heads.out_row + query_head * heads.out_head
    mask = mine[:, None] & (value_column < v_dim)[None, :]
    tl.store(
        heads.out + at + value_column[None, :], result.to(heads.out.dtype.element_ty), mask=mask
    )
