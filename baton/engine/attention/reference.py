"""The plain twin of every attention backend: one query and one head at a time, in float32.

Only tests use it; it is too slow for serving.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from baton.engine.state.attention import AttentionLayer, KVViews
from baton.engine.state.batch import Batch


class ReferenceAttention:
    """Paged causal attention, written like its definition."""

    def __init__(self, pool: KVViews, layers: Sequence[AttentionLayer]) -> None:
        self.group_of = pool.group_of
        self._pool = pool
        self._layers = tuple(layers)

    def write(self, layer: int, k: Tensor, v: Tensor, slots: Tensor) -> None:
        """See Attention.write."""
        keys, values = self._pool.layer(layer)
        block_size = keys.shape[1]
        for row, slot in enumerate(slots.tolist()):
            keys[slot // block_size, slot % block_size] = k[row]
            if v.shape[2]:  # with MLA it is empty
                values[slot // block_size, slot % block_size] = v[row]

    def attend(self, layer: int, q: Tensor, batch: Batch) -> Tensor:
        """See Attention.attend."""
        keys, values = self._pool.layer(layer)
        block_size, kv_heads = keys.shape[1], keys.shape[2]
        spec = self._layers[layer]
        if spec.latent:
            values = keys[..., : spec.latent]
        group = spec.query_heads // kv_heads
        out = q.new_empty(q.shape[0], q.shape[1], values.shape[3])
        tables = batch.tables[self.group_of[layer]]
        for index, span in enumerate(batch.spans):
            # A block that the sequence does not hold raises KeyError, so it cannot be read by
            # mistake.
            table = dict(enumerate(tables.blocks[index].tolist(), tables.first[index]))
            for offset in range(span.num_rows):
                position = span.start + offset
                ahead = [to for begin, to in span.mutual if begin <= position < to]
                seen = range(spec.reach.first(position), max([position + 1, *ahead]))
                k = torch.stack([keys[table[p // block_size], p % block_size] for p in seen])
                v = torch.stack([values[table[p // block_size], p % block_size] for p in seen])
                for head in range(spec.query_heads):
                    out[span.first_row + offset, head] = _one_head(
                        q[span.first_row + offset, head],
                        k[:, head // group],
                        v[:, head // group],
                        spec,
                        head,
                    ).to(out.dtype)
        return out


def _one_head(q: Tensor, k: Tensor, v: Tensor, spec: AttentionLayer, head: int) -> Tensor:
    """Return the attention [v_dim] of q [k_dim] to k [n, k_dim] and v [n, v_dim], in float32."""
    scores = (k.float() @ q.float()) * spec.scale
    if spec.softcap is not None:
        scores = torch.tanh(scores / spec.softcap) * spec.softcap
    if spec.sinks is not None:
        scores = torch.cat([scores, spec.sinks[head].float().view(1)])
    weights = scores.softmax(-1)[: k.shape[0]]
    return weights @ v.float()
