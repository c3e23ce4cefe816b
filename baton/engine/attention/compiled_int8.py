"""Paged attention over int8 KV with the compiled CPU kernels: rounded into the pool, and read by
decode rows, without a copy in between.

Prefill spans, and layers that the kernels do not know (MLA, odd sizes), are torch_cpu.py's. A
decode row's result depends on its own keys alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from baton.engine.attention.base import AttentionLayer, KVViews
from baton.engine.attention.compiled import MAX_DIM
from baton.engine.attention.torch_cpu import TorchAttention
from baton.engine.batch import Batch
from baton.engine.kernels.cpu.int8_kv import Int8KVKernels, Int8Layer, Int8Rows
from baton.engine.kernels.cpu.library import DecodeRows


class CompiledInt8Attention:
    """See base.Attention. CPU, bfloat16 queries, a pool of int8."""

    def __init__(
        self, pool: KVViews, layers: Sequence[AttentionLayer], kernels: Int8KVKernels
    ) -> None:
        self.group_of = pool.group_of
        self._torch = TorchAttention(pool, layers)
        self._kernels = kernels
        self._layers = [_int8_layer(pool, index, spec) for index, spec in enumerate(layers)]

    def write(self, layer: int, k: Tensor, v: Tensor, slots: Tensor) -> None:
        """See Attention.write."""
        compiled = self._layers[layer]
        if compiled is None or not (_dense(k) and _dense(v)):
            self._torch.write(layer, k, v, slots)
            return
        self._kernels.store(k, compiled.keys, slots)
        self._kernels.store(v, compiled.values, slots)

    def attend(self, layer: int, q: Tensor, batch: Batch) -> Tensor:
        """See Attention.attend."""
        compiled = self._layers[layer]
        rows = None if compiled is None else _decode_rows(batch, self.group_of[layer])
        if compiled is None or rows is None:
            return self._torch.attend(layer, q, batch)
        if not _dense(q):
            q = q.contiguous()
        out = q.new_empty(q.shape[0], q.shape[1], compiled.values.numbers.shape[3])
        self._kernels.decode_attention(q, out, compiled, rows)
        if rows.rows.shape[0] < len(batch.spans):
            self._torch.prefill(layer, q, batch, out)
        return out


def _int8_layer(pool: KVViews, layer: int, spec: AttentionLayer) -> Int8Layer | None:
    """What the kernel reads of a layer; None for what it does not know."""
    keys, values = pool.layer(layer)
    k_dim, v_dim = keys.shape[3], values.shape[3]
    if spec.latent or not v_dim or k_dim % 32 or v_dim % 16 or max(k_dim, v_dim) > MAX_DIM:
        return None
    if not (_dense(keys[0]) and _dense(values[0])):
        return None
    key_scales, value_scales = pool.scales(layer)
    sinks = None if spec.sinks is None else spec.sinks.float().contiguous()
    return Int8Layer(
        Int8Rows(keys, key_scales), Int8Rows(values, value_scales), spec.scale, spec.window,
        spec.softcap or 0.0, sinks,
    )  # fmt: skip


def _dense(x: Tensor) -> bool:
    """x [rows, heads, dim]: are the numbers of a row side by side?"""
    return x.stride(2) == 1 and x.stride(1) == x.shape[2]


def _decode_rows(batch: Batch, layer_group: int) -> DecodeRows | None:
    """The step's decode rows by this group's tables, laid out at the first layer that asks; None
    without any."""
    key = ("compiled int8", layer_group)
    if key not in batch.plans:
        table = batch.tables[layer_group]
        members = [index for index, span in enumerate(batch.spans) if span.num_rows == 1]
        spans = [batch.spans[index] for index in members]
        batch.plans[key] = None if not members else DecodeRows(
            rows=torch.tensor([span.first_row for span in spans]),
            spans=torch.tensor(members),
            tokens=torch.tensor([span.num_tokens for span in spans]),
            first=torch.tensor([table.first[index] for index in members]),
            tables=table.blocks,
        )  # fmt: skip
    return batch.plans[key]
