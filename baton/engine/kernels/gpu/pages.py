"""What the attention kernels share: pages of the KV pool, an online softmax, and score rules.

`Pages`, `Rule` and the other NamedTuples are passed to Triton as they are: a kernel reads
`pages.rows`, `pages.token`. Positions count from a sequence's first token; the sequence's block
list begins at block `first`.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.engine.kernels.gpu.products import integers, product
from baton.engine.state.attention import AttentionLayer, KVViews
from baton.protocol.errors import InternalError

EXACT: Final = 0  # pages store numbers in the model's dtype
INT8: Final = 1  # pages store int8, with a float32 scale per token and head
FP8: Final = 2  # pages store bytes of float8_e4m3fn

_INT8: tl.constexpr = tl.constexpr(INT8)
_FP8: tl.constexpr = tl.constexpr(FP8)
_LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)


class Pages(NamedTuple):
    """K or V of one layer.

    `rows` is [num_blocks, block_size, kv_heads, dim] (fp8: as bytes). `scales` is [num_blocks,
    block_size, kv_heads] float32 for int8; else it is `rows` again and never read. The other fields
    are strides in elements.
    """

    rows: Any
    scales: Any
    block: Any
    token: Any
    head: Any
    scale_block: Any
    scale_token: Any


class Rule(NamedTuple):
    """An AttentionLayer for a kernel.

    `sinks` is float32 [query_heads], or any tensor if the layer has none. `softcap` and `window`
    are 0 for none.
    """

    sinks: Any
    scale: Any
    softcap: Any
    window: Any


class Heads(NamedTuple):
    """q and out [T, heads, dim], and their strides over rows and heads."""

    q: Any
    out: Any
    q_row: Any
    q_head: Any
    out_row: Any
    out_head: Any

    @staticmethod
    def of(q: Tensor, out: Tensor) -> Heads:
        """Take q and out with their strides."""
        return Heads(q, out, *q.stride()[:2], *out.stride()[:2])


class LayerPages(NamedTuple):
    """One layer of the pool, and how it attends."""

    keys: Pages
    values: Pages
    rule: Rule
    block_size: int
    kv_heads: int
    k_dim: int
    v_dim: int
    storage: int
    capped: bool
    has_sinks: bool


def layer_pages(pool: KVViews, layer: int, spec: AttentionLayer) -> LayerPages:
    """Return what the kernels read of a layer, by the dtype of its views.

    Raises InternalError for MLA, and for a pool in which the numbers of a head are not adjacent.
    """
    keys, values = pool.layer(layer)
    if spec.latent or not values.shape[3]:
        raise InternalError("the Triton attention kernels know no latent KV")
    storage = _storage(keys.dtype)
    scales: tuple[Tensor | None, Tensor | None] = (None, None)
    if storage == INT8:
        scales = pool.scales(layer)
    if storage == FP8:
        keys, values = keys.view(torch.uint8), values.view(torch.uint8)
    # The kernels read sinks as float32 with a stride of 1.
    sinks = keys if spec.sinks is None else spec.sinks.to(keys.device, torch.float32).contiguous()
    rule = Rule(sinks, float(spec.scale), float(spec.softcap or 0.0), spec.window)
    return LayerPages(
        _pages(keys, scales[0]), _pages(values, scales[1]), rule,
        keys.shape[1], keys.shape[2], keys.shape[3], values.shape[3],
        storage, bool(spec.softcap), spec.sinks is not None,
    )  # fmt: skip


def padded(size: int) -> int:
    """Return the size of a tile for `size` numbers: a power of two, at least 16, as products
    need.
    """
    return max(16, triton.next_power_of_2(size))


def _storage(dtype: torch.dtype) -> int:
    if dtype == torch.int8:
        return INT8
    return FP8 if dtype == torch.float8_e4m3fn else EXACT


def _pages(rows: Tensor, scales: Tensor | None) -> Pages:
    if rows.stride(3) != 1:
        raise InternalError("the numbers of a head lie apart in this pool")
    if scales is None:
        return Pages(rows, rows, *rows.stride()[:3], 0, 0)
    return Pages(rows, scales, *rows.stride()[:3], *scales.stride()[:2])


@triton.jit
def places(table, position, first, seen, BLOCK_SIZE: tl.constexpr):
    """Return blocks (int64) and offsets of the positions [N] of one sequence where `seen` is
    true.
    """
    block = tl.load(table + (position // BLOCK_SIZE - first), mask=seen, other=0)
    return block.to(tl.int64), position % BLOCK_SIZE


@triton.jit
def load_pages(pages, block, offset, head, seen, dim, DIM: tl.constexpr):
    """Load the rows of `head` at (block, offset) [N] as stored, [N, DIM].

    They are zero where `seen` is false, and beyond `dim`.
    """
    at = block * pages.block + offset * pages.token + head * pages.head
    column = tl.arange(0, DIM)
    mask = seen[:, None] & (column < dim)[None, :]
    return tl.load(pages.rows + at[:, None] + column[None, :], mask=mask, other=0)


@triton.jit
def load_scales(pages, block, offset, head, seen):
    """Load the scales of `head` at (block, offset) [N]: [N] float32, zero where `seen` is false."""
    at = block * pages.scale_block + offset * pages.scale_token + head
    return tl.load(pages.scales + at, mask=seen, other=0.0)


@triton.jit
def widen(rows, like: tl.constexpr, STORAGE: tl.constexpr):
    """Convert stored numbers to dtype `like`, without scales; exact in bfloat16 and wider
    dtypes.
    """
    if STORAGE == _INT8:
        return integers(rows, like)
    if STORAGE == _FP8:
        return rows.to(tl.float8e4nv, bitcast=True).to(tl.float32).to(like)
    return rows.to(like)


@triton.jit
def tanh(x):
    """Compute tanh within 1e-7 without libdevice, which the interpreter lacks."""
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0


@triton.jit
def online(q, state, seen, where, pages, shape: tl.constexpr):
    """Attend with q [M, DIM] to one tile of keys and values, and return the new state.

    state: (acc [M, V_DIM], greatest [M], total [M]), in base 2. seen: [M, N]. where: (block,
    offset, held, head); `held` [N] tells which keys exist. pages: (keys, values, rule, k_dim,
    v_dim). shape: (DIM, V_DIM, STORAGE, CAPPED).
    """
    acc, greatest, total = state
    block, offset, held, head = where
    keys, values, rule, k_dim, v_dim = pages
    k = load_pages(keys, block, offset, head, held, k_dim, shape[0])
    scores = product(q, tl.trans(widen(k, q.dtype, shape[2]))) * rule.scale
    if shape[2] == _INT8:
        scores *= load_scales(keys, block, offset, head, held)[None, :]
    if shape[3]:
        scores = rule.softcap * tanh(scores / rule.softcap)
    scores = tl.where(seen, scores * _LOG2E, float("-inf"))
    higher = tl.maximum(greatest, tl.max(scores, 1))
    # A row that has seen no key yet keeps -inf; base 0 makes its weights zeros, not NaN.
    base = tl.where(higher == float("-inf"), 0.0, higher)
    weights = tl.exp2(scores - base[:, None])
    kept = tl.exp2(greatest - base)
    total = total * kept + tl.sum(weights, 1)
    v = load_pages(values, block, offset, head, held, v_dim, shape[1])
    if shape[2] == _INT8:
        weights *= load_scales(values, block, offset, head, held)[None, :]
    added = product(weights.to(q.dtype), widen(v, q.dtype, shape[2]))
    return acc * kept[:, None] + added, higher, total


@triton.jit
def finished(state, sink, HAS_SINKS: tl.constexpr):
    """Return acc / total, where total includes the sinks [M]; zeros for rows that saw no key."""
    acc, greatest, total = state
    if HAS_SINKS:
        sink = sink * _LOG2E
        top = tl.maximum(greatest, sink)
        kept = tl.exp2(greatest - top)
        acc = acc * kept[:, None]
        total = total * kept + tl.exp2(sink - top)
    return acc / tl.where(total == 0.0, 1.0, total)[:, None]
