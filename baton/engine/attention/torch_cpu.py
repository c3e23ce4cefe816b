"""Paged attention in torch operations, for devices and layers that no kernel serves.

There are two kinds of spans. Decode rows (one new token each) are grouped by the size of their
context; each group gathers its K and V by block table and runs one fused attention. Prefill spans
run one by one, in tiles of query rows, so that a tile multiplies only keys that it may see.

The result of a decode row depends on its own context length alone, never on the other rows of the
step, because the padded width of its group is a function of that length.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from baton.engine.attention.kv_store import KVStore, layer_store
from baton.engine.state.attention import AttentionLayer, KVViews, Reach
from baton.engine.state.batch import Batch, GroupTables, Span

GATHER_BYTES: Final = (
    4 << 20
)  # K (or V) bytes gathered at once: stays in the caches, no fresh pages
TILE_ROWS: Final = 256  # query rows per prefill tile


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Decode rows of similar context, padded to `width` blocks each.

    `members` are the indices of their spans, `columns` [n, width] the block columns of each. `rows`
    [n] are rows of the flattened step, `blocks` [n * width] block ids. `bias` [n, 1, 1, width *
    block_size] is 0 or -inf. `unwritten` [m] are the gathered positions in last blocks that hold no
    token yet.
    """

    members: list[int]
    columns: Tensor
    rows: Tensor
    blocks: Tensor
    bias: Tensor
    unwritten: Tensor


@dataclass(frozen=True, slots=True)
class Tile:
    """Query rows [first_row, last_row) of a prefill span, and the gathered keys [low, high) they
    see.
    """

    first_row: int
    last_row: int
    low: int
    high: int
    bias: Tensor  # [rows, high - low], 0 or -inf


@dataclass(frozen=True, slots=True)
class PrefillSpan:
    """One prefill span: the blocks [first, last) that it gathers, and its tiles.

    Keys of the tiles are counted from the first gathered key.
    """

    span: int
    first: int
    last: int
    blocks: Tensor
    tiles: tuple[Tile, ...]


@dataclass(frozen=True, slots=True)
class TorchPlan:
    """The part of a step's layout that depends on group and window, but not on the layer."""

    decode: tuple[DecodeGroup, ...]
    prefill: tuple[PrefillSpan, ...]


class TorchAttention:
    """Paged causal attention (full, windowed, soft-capped, with sinks, latent) over the pool's
    views.
    """

    def __init__(self, pool: KVViews, layers: Sequence[AttentionLayer]) -> None:
        self.group_of = pool.group_of
        self._layers = tuple(layers)
        self._stores = [layer_store(pool, index) for index in range(len(self._layers))]

    def write(self, layer: int, k: Tensor, v: Tensor, slots: Tensor) -> None:
        """See Attention.write."""
        self._stores[layer].write(k, v, slots)

    def attend(self, layer: int, q: Tensor, batch: Batch) -> Tensor:
        """See Attention.attend."""
        spec = self._layers[layer]
        store = self._stores[layer]
        plan = _plan_of(batch, self.group_of[layer], spec.reach, store, q.dtype)
        out = q.new_empty(q.shape[0], q.shape[1], spec.latent or store.values.dim)
        for group in plan.decode:
            out[group.rows] = _decode(q[group.rows], store, group, spec)
        for span in plan.prefill:
            prefill_span(q, store, span, spec, out)
        return out


def _plan_of(
    batch: Batch, layer_group: int, reach: Reach, store: KVStore, dtype: torch.dtype
) -> TorchPlan:
    """Return the step's plan for these tables and this reach; made once, at their first layer."""
    block_size, token_bytes = store.block_size, store.kv_heads * store.keys.dim * dtype.itemsize
    key = (layer_group, reach, token_bytes, dtype)
    if key not in batch.plans:
        table = batch.tables[layer_group]
        for other in range(layer_group):
            sibling = batch.plans.get((other, *key[1:]))
            if sibling is not None:  # groups that see equally far differ only in blocks
                batch.plans[key] = _moved(sibling, table)
                return batch.plans[key]
        max_blocks = max(1, GATHER_BYTES // (token_bytes * block_size))
        view = _View(batch.spans, table, reach, block_size, dtype)
        decode = _plan_decode(view, max_blocks)
        prefill = tuple(
            _plan_prefill(view, index)
            for index, span in enumerate(batch.spans)
            if span.num_rows > 1
        )
        batch.plans[key] = TorchPlan(tuple(decode), prefill)
    return batch.plans[key]


def _moved(plan: TorchPlan, table: GroupTables) -> TorchPlan:
    """Return a copy of the plan with the blocks of another layer group."""
    decode = (replace(g, blocks=_decode_blocks(table, g.members, g.columns)) for g in plan.decode)
    prefill = (
        replace(s, blocks=_span_blocks(table, s.span, s.first, s.last)) for s in plan.prefill
    )
    return TorchPlan(tuple(decode), tuple(prefill))


def _decode_blocks(table: GroupTables, members: list[int], columns: Tensor) -> Tensor:
    """Return the ids [n * width] of the block columns [n, width] of the spans `members`."""
    device = table.blocks.device
    if any(table.first):
        columns = columns - torch.tensor([table.first[index] for index in members])[:, None]
    rows = torch.tensor(members, device=device)[:, None]
    return table.blocks[rows, columns.to(device)].flatten()


def _span_blocks(table: GroupTables, span: int, first: int, last: int) -> Tensor:
    """Return the ids of a span's blocks [first, last)."""
    held = table.first[span]
    return table.blocks[span, first - held : last - held]


@dataclass(frozen=True, slots=True)
class _View:
    """A step as the layers of one group and one reach see it."""

    spans: tuple[Span, ...]
    table: GroupTables
    reach: Reach
    block_size: int
    dtype: torch.dtype

    def first_block(self, position: int) -> int:
        """Return the first block that a query at `position` can see."""
        return self.reach.first(position) // self.block_size


def _plan_decode(view: _View, max_blocks: int) -> list[DecodeGroup]:
    groups: defaultdict[int, list[int]] = defaultdict(list)
    for index, span in enumerate(view.spans):
        if span.num_rows == 1:
            first = view.first_block(span.start)
            groups[_bucket(-(-span.num_tokens // view.block_size) - first)].append(index)
    plans: list[DecodeGroup] = []
    for width, members in sorted(groups.items()):
        per_slab = max(1, max_blocks // width)
        plans.extend(
            _decode_group(view, members[at : at + per_slab], width)
            for at in range(0, len(members), per_slab)
        )
    return plans


def _decode_group(view: _View, members: list[int], width: int) -> DecodeGroup:
    table, block_size = view.table, view.block_size
    device = table.blocks.device
    spans = [view.spans[index] for index in members]
    first = torch.tensor([view.first_block(span.start) for span in spans])[:, None]
    total = torch.tensor([s.num_tokens for s in spans])[:, None]
    last_block = (total - 1) // block_size
    columns = first + torch.arange(width)
    # Padding repeats the row's first block, which has no unwritten slots; the last block may have
    # some.
    columns = torch.where(columns > last_block, first, columns)
    position = first * block_size + torch.arange(width * block_size)
    beyond = position >= total
    unwritten = beyond & (position < (last_block + 1) * block_size)
    hidden = view.reach.hidden(position, total - 1)
    bias = torch.zeros(hidden.shape, dtype=view.dtype).masked_fill_(hidden, -torch.inf)
    return DecodeGroup(
        members,
        columns,
        torch.tensor([s.first_row for s in spans]).to(device),
        _decode_blocks(table, members, columns),
        bias[:, None, None].to(device),
        unwritten.flatten().nonzero().squeeze(1).to(device),
    )


def _plan_prefill(view: _View, index: int) -> PrefillSpan:
    block_size, span = view.block_size, view.spans[index]
    device = view.table.blocks.device
    first = view.first_block(span.start)
    base = first * block_size
    tiles: list[Tile] = []
    for offset in range(0, span.num_rows, TILE_ROWS):
        rows = min(TILE_ROWS, span.num_rows - offset)
        start = span.start + offset
        ahead = [to for begin, to in span.mutual if begin < start + rows < to]
        low, high = view.first_block(start) * block_size, max([start + rows, *ahead])
        query = torch.arange(start, start + rows, device=device)[:, None]
        key = torch.arange(low, high, device=device)[None]
        hidden = view.reach.hidden(key, query)
        for begin, to in span.mutual:
            hidden &= ~((query >= begin) & (query < to) & (key > query) & (key < to))
        bias = torch.zeros(hidden.shape, dtype=view.dtype, device=device)
        bias.masked_fill_(hidden, -torch.inf)
        row = span.first_row + offset
        tiles.append(Tile(row, row + rows, low - base, high - base, bias))
    last = -(-span.num_tokens // block_size)
    blocks = _span_blocks(view.table, index, first, last)
    return PrefillSpan(index, first, last, blocks, tuple(tiles))


def _decode(q: Tensor, store: KVStore, group: DecodeGroup, spec: AttentionLayer) -> Tensor:
    """Attend for a group's decode rows: q [n, query_heads, k_dim] -> [n, query_heads, v_dim]."""
    n, kv_heads = q.shape[0], store.kv_heads
    k = store.keys.gather(group.blocks, q.dtype)
    # Hidden keys are multiplied, too, so slots that hold no token yet must not contain NaN.
    k.index_fill_(0, group.unwritten, 0.0)
    if spec.latent:
        v = k[..., : spec.latent]
    else:
        v = store.values.gather(group.blocks, q.dtype)
        v.index_fill_(0, group.unwritten, 0.0)
    k, v = (x.view(n, -1, kv_heads, x.shape[2]).transpose(1, 2) for x in (k, v))
    # The query heads of one KV head become query rows of that head: GQA without copies of K and V.
    grouped = q.view(n, kv_heads, -1, q.shape[2])
    bias = group.bias.expand(-1, 1, grouped.shape[2], -1)
    sinks = None if spec.sinks is None else spec.sinks.view(1, kv_heads, -1, 1)
    return softmax_attention(grouped, k, v, bias, spec, sinks).reshape(n, q.shape[1], -1)


def prefill_span(
    q: Tensor, store: KVStore, span: PrefillSpan, spec: AttentionLayer, out: Tensor
) -> None:
    """Attend for one prefill span and fill its rows of `out` [T, query_heads, v_dim]."""
    kv_heads = store.kv_heads
    group = q.shape[1] // kv_heads
    k = store.keys.gather(span.blocks, q.dtype).transpose(0, 1)[None]
    if spec.latent:
        v = k[..., : spec.latent]
    else:
        v = store.values.gather(span.blocks, q.dtype).transpose(0, 1)[None]
    for tile in span.tiles:
        n = tile.last_row - tile.first_row
        rows = q[tile.first_row : tile.last_row].view(n, kv_heads, group, -1)
        grouped = rows.permute(1, 2, 0, 3).reshape(1, kv_heads, group * n, -1)
        bias = tile.bias.repeat(group, 1)[None, None]
        sinks = None
        if spec.sinks is not None:
            sinks = spec.sinks.view(1, kv_heads, group, 1).repeat_interleave(n, dim=2)
        seen = slice(tile.low, tile.high)
        result = softmax_attention(grouped, k[:, :, seen], v[:, :, seen], bias, spec, sinks)
        result = result.view(kv_heads, group, n, -1).permute(2, 0, 1, 3)
        out[tile.first_row : tile.last_row] = result.reshape(n, q.shape[1], -1)


def softmax_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, spec: AttentionLayer, sinks: Tensor | None
) -> Tensor:
    """Return the attention [n, h, r, v_dim] of q [n, h, r, k_dim] to k and v [n, h, L, dims].

    `bias` [n, 1, r, L] is added to the scores.
    """
    if spec.softcap is None and sinks is None:
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=spec.scale)
    scores = (q.float() * spec.scale) @ k.float().transpose(-1, -2)
    if spec.softcap is not None:
        scores = torch.tanh(scores / spec.softcap) * spec.softcap
    scores = scores + bias
    if sinks is not None:
        sink = sinks.float().expand(*scores.shape[:-1], 1)
        weights = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return (weights @ v.float()).to(q.dtype)


def _bucket(num_blocks: int) -> int:
    """Round up to 1, 2, 3, 4, 6, 8, 12, 16, 24, ...: few shapes, and at most a third is padding."""
    power = 1 << (num_blocks - 1).bit_length()
    middle = power * 3 // 4
    return middle if power > 2 and num_blocks <= middle else power
