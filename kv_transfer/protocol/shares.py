"""Which rank sends which heads to which rank: pure arithmetic over formats, the same at both ends.

A tensor-parallel rank holds a contiguous range of a layer's KV heads. With fewer heads than ranks
each head lies on several ranks (GQA replication; MLA is the case of one head), and every fetching
rank takes it from one of them. So an exporting rank may have nothing to send to some fetching rank,
which then does not contact it at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from baton.protocol.kv_spec import LayerSpec, PoolFormat, first_visible, heads_of_rank
from kv_transfer.protocol.frames import MAX_PAYLOAD


def heads_of(kv_heads: int, pool: PoolFormat) -> range:
    """Return the KV heads that rank `tp_rank` of `tp_size` holds, as indices of the whole model."""
    return heads_of_rank(kv_heads, pool.tp_rank, pool.tp_size)


def share(spec: LayerSpec, exporter: PoolFormat, fetcher: PoolFormat) -> range:
    """Return the heads of a layer that this exporting rank sends to this fetching rank; may be
    empty.
    """
    wanted = heads_of(spec.kv_heads, fetcher)
    held = heads_of(spec.kv_heads, exporter)
    both = range(max(wanted.start, held.start), min(wanted.stop, held.stop))
    if len(both) == 0 or exporter.tp_size <= spec.kv_heads:
        return both
    # One head on several exporting ranks: the fetching ranks spread over them.
    holders = [
        rank
        for rank in range(exporter.tp_size)
        if both.start in heads_of(spec.kv_heads, replace(exporter, tp_rank=rank))
    ]
    chosen = holders[fetcher.tp_rank % len(holders)]
    return both if chosen == exporter.tp_rank else range(both.start, both.start)


def meets(layers: Sequence[LayerSpec], exporter: PoolFormat, fetcher: PoolFormat) -> bool:
    """Whether the exporting rank has any heads or recurrent states for the fetching one."""
    return any(spec.state or len(share(spec, exporter, fetcher)) for spec in layers)


def fetching_ranks(
    layers: Sequence[LayerSpec], exporter: PoolFormat, fetcher: PoolFormat
) -> frozenset[int]:
    """Return the ranks of the fetcher's group to which this exporting rank sends."""
    ranks = range(fetcher.tp_size)
    return frozenset(r for r in ranks if meets(layers, exporter, replace(fetcher, tp_rank=r)))


def first_sent(spec: LayerSpec, start_token: int, num_tokens: int, windowed: bool) -> int:
    """Return the first token of a layer that is sent when [start_token, num_tokens) are wanted."""
    return max(start_token, first_visible(spec.window, num_tokens) if windowed else 0)


def rows_bytes(spec: LayerSpec, num_heads: int, dtype: str) -> int:
    """Return the bytes that one token's K, V and scales of `num_heads` heads have on the wire."""
    return (spec.token_bytes(dtype) + spec.scale_bytes(dtype)) // max(1, spec.kv_heads) * num_heads


def tokens_per_frame(spec: LayerSpec, num_heads: int, dtype: str) -> int:
    """Return how many tokens of `num_heads` heads fit into one frame; 0 if not even one does."""
    return MAX_PAYLOAD // max(1, rows_bytes(spec, num_heads, dtype))
