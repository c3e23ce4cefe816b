"""Paged attention of which some layers choose their keys: a query attends to few keys, not to all.

An indexer scores every key that a query sees, with small index keys of its own, and keeps the best.
The pool holds the index keys of such a layer as its V; its K are latents (MLA), which need no V.

    decode row     the chosen latents are read one by one: no other byte of K
    prefill span   all latents are read once; a mask per row hides those not chosen
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from baton.engine.attention.kv_store import KVStore, layer_store
from baton.engine.attention.torch_cpu import (
    TILE_ROWS,
    PrefillSpan,
    Tile,
    prefill_span,
    softmax_attention,
)
from baton.engine.state.attention import Attention, AttentionLayer, KVViews
from baton.engine.state.batch import Batch, GroupTables, Span
from baton.protocol.errors import InternalError

# The chosen keys of each span: positions [rows, n]. Those behind a row's own position mean nothing.
Chosen: TypeAlias = Sequence[Tensor]


class IndexedAttention:
    """Attention of a model with index keys. `inner` serves what chooses no keys."""

    def __init__(self, pool: KVViews, layers: Sequence[AttentionLayer], inner: Attention) -> None:
        self.group_of = pool.group_of
        self._inner = inner
        self._layers = tuple(layers)
        self._stores = [layer_store(pool, index) for index in range(len(self._layers))]

    def write(self, layer: int, k: Tensor, v: Tensor, slots: Tensor) -> None:
        """See Attention.write."""
        self._inner.write(layer, k, v, slots)

    def attend(self, layer: int, q: Tensor, batch: Batch) -> Tensor:
        """See Attention.attend: to all keys."""
        return self._inner.attend(layer, q, batch)

    def keep_index(self, layer: int, keys: Tensor, index: int, batch: Batch) -> Tensor:
        """Store the index keys [rows, dim] of span `index` in the pool.

        Return those of all tokens of its sequence, [tokens, dim], as the pool holds them.
        """
        store, span = self._stores[layer], batch.spans[index]
        table, size = batch.tables[self.group_of[layer]], self._stores[layer].block_size
        slots = table.slots[span.first_row : span.first_row + span.num_rows]
        store.values.write(keys[:, None], slots // size, slots % size)
        blocks = table.blocks[index, : -(-span.num_tokens // size)]
        return store.values.gather(blocks, keys.dtype)[: span.num_tokens, 0]

    def attend_chosen(self, layer: int, q: Tensor, chosen: Chosen, batch: Batch) -> Tensor:
        """Attend with q [T, query_heads, k_dim] to the chosen keys; return [T, query_heads,
        latent]."""
        if all(each.shape[1] >= s.num_tokens for each, s in zip(chosen, batch.spans, strict=True)):
            return self.attend(layer, q, batch)  # no sequence has more keys than are chosen
        spec, store = self._layers[layer], self._stores[layer]
        table = batch.tables[self.group_of[layer]]
        out = q.new_empty(q.shape[0], q.shape[1], spec.latent)
        for index, (span, keys) in enumerate(zip(batch.spans, chosen, strict=True)):
            if span.num_rows == 1:
                row = slice(span.first_row, span.first_row + 1)
                out[row] = _one_row(q[row], store, table.blocks[index], keys[0].long(), spec)
            else:
                prefill_span(q, store, _masked(index, span, keys, table, store, q), spec, out)
        return out


def index_of(batch: Batch) -> IndexedAttention:
    """Return the attention of `batch`, which a model with index keys runs on. Raises InternalError
    if it is another."""
    if not isinstance(batch.attention, IndexedAttention):
        raise InternalError("a model with index keys got attention without them")
    return batch.attention


def with_index(pool: KVViews, layers: Sequence[AttentionLayer], inner: Attention) -> Attention:
    """Return `inner`, or what serves index keys as well if some layers have them."""
    if any(spec.latent and pool.layer(i)[1].shape[3] for i, spec in enumerate(layers)):
        return IndexedAttention(pool, layers, inner)
    return inner


def _one_row(
    q: Tensor, store: KVStore, blocks: Tensor, chosen: Tensor, spec: AttentionLayer
) -> Tensor:
    """Return the attention [1, heads, latent] of q [1, heads, k_dim] to the keys at positions
    `chosen` [n]."""
    size = store.block_size
    k = store.keys.take(blocks[chosen // size], chosen % size, q.dtype).transpose(0, 1)[None]
    bias = q.new_zeros(1, 1, q.shape[1], len(chosen))
    sinks = None if spec.sinks is None else spec.sinks.view(1, 1, -1, 1)
    return softmax_attention(q[:, None], k, k[..., : spec.latent], bias, spec, sinks)[:, 0]


def _masked(
    index: int, span: Span, chosen: Tensor, table: GroupTables, store: KVStore, q: Tensor
) -> PrefillSpan:
    """Return how span `index` prefills, with keys hidden that a row did not choose."""
    tiles: list[Tile] = []
    for offset in range(0, span.num_rows, TILE_ROWS):
        last = min(offset + TILE_ROWS, span.num_rows)
        high = span.start + last
        query = torch.arange(span.start + offset, high, device=q.device)[:, None]
        key = torch.arange(high, device=q.device)
        kept = torch.zeros(last - offset, span.num_tokens, dtype=torch.bool, device=q.device)
        kept.scatter_(1, chosen[offset:last].long(), True)
        hidden = ~kept[:, :high] | (key > query)
        bias = q.new_zeros(hidden.shape).masked_fill_(hidden, -torch.inf)
        tiles.append(Tile(span.first_row + offset, span.first_row + last, 0, high, bias))
    count = -(-span.num_tokens // store.block_size)
    return PrefillSpan(index, 0, count, table.blocks[index, :count], tuple(tiles))
