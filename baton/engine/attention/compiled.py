"""Paged attention with the compiled CPU kernels, which read the pool directly, without gathers.

Pools are in bfloat16 or int8; queries are in bfloat16. Layers that the kernels do not support
(other dtypes, odd sizes) go to torch_cpu.py. A row's result depends on its own keys, and on whether
it is the only row of its sequence in the batch, which in the last layer is that of the rows that
are read (Batch.in_last_layer); on nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from baton.engine.attention.torch_cpu import TorchAttention
from baton.engine.kernels.cpu.library import CpuKernels, DecodeLayer, DecodeRows, PoolScales
from baton.engine.kernels.cpu.prefill import PrefillKernel, PrefillSpans
from baton.engine.kernels.cpu.step import StepPools
from baton.engine.state.attention import AttentionLayer, KVViews
from baton.engine.state.batch import Batch, GroupTables

MAX_DIM: Final = 576  # attention.h's kMaxDim


@dataclass(frozen=True, slots=True)
class CompiledPlan:
    """The spans of a step for the layers of one group, split into those of one row and the others.

    `decode` or `prefill` is None if there are no such spans.
    """

    decode: DecodeRows | None
    prefill: PrefillSpans | None


class CompiledAttention:
    """Attention over a pool on a CPU. See state/attention.py."""

    def __init__(
        self, pool: KVViews, layers: Sequence[AttentionLayer], kernels: CpuKernels
    ) -> None:
        self.group_of = pool.group_of
        self._torch = TorchAttention(pool, layers)
        self._kernels = kernels
        self._prefill = PrefillKernel(kernels)
        self._layers = [known_layer(pool, index, spec) for index, spec in enumerate(layers)]
        # For steps that compute all layers in one call; None if the kernels do not support some
        # layer that attends.
        attending = {i: self._layers[i] for i, spec in enumerate(layers) if spec.query_heads}
        known = {i: layer for i, layer in attending.items() if layer is not None}
        suits = StepPools.suit(list(attending.values()))
        self.step_pools = StepPools(known, self.group_of) if suits else None

    def write(self, layer: int, k: Tensor, v: Tensor, slots: Tensor) -> None:
        """See Attention.write."""
        compiled = self._layers[layer]
        if compiled is None or not (dense(k) and dense(v)):
            self._torch.write(layer, k, v, slots)
            return
        if compiled.scales is not None:
            self._kernels.store_int8(k, compiled.keys, compiled.scales.keys, slots)
            self._kernels.store_int8(v, compiled.values, compiled.scales.values, slots)
            return
        self._kernels.store(k, compiled.keys, slots)
        if v.shape[2]:  # with MLA a value is a part of its key, and v is empty
            self._kernels.store(v, compiled.values, slots)

    def attend(self, layer: int, q: Tensor, batch: Batch) -> Tensor:
        """See Attention.attend."""
        compiled = self._layers[layer]
        if compiled is None or batch.mutual:
            return self._torch.attend(layer, q, batch)
        plan = plan_of(batch, self.group_of[layer])
        if not dense(q):
            q = q.contiguous()
        out = q.new_empty(q.shape[0], q.shape[1], compiled.values.shape[3])
        if plan.decode is not None:
            self._kernels.decode_attention(q, out, compiled, plan.decode)
        if plan.prefill is not None:
            self._prefill(q, out, compiled, plan.prefill)
        return out


def known_layer(pool: KVViews, layer: int, spec: AttentionLayer) -> DecodeLayer | None:
    """Return what the kernels read of a layer; None if they do not support the layer."""
    keys, values = pool.layer(layer)
    rounded = keys.dtype == torch.int8
    if spec.chunked or not (rounded or keys.dtype == torch.bfloat16):
        return None
    if spec.latent:
        if rounded or values.shape[3]:
            return None
        values = keys[..., : spec.latent]
    k_dim, v_dim = keys.shape[3], values.shape[3]
    if k_dim % 32 or v_dim % 32 or max(k_dim, v_dim) > MAX_DIM or not v_dim:
        return None
    if not (dense(keys[0]) and (spec.latent or dense(values[0]))):
        return None
    sinks = None if spec.sinks is None else spec.sinks.float().contiguous()
    scales = PoolScales(*pool.scales(layer)) if rounded else None
    return DecodeLayer(keys, values, spec.scale, spec.window, spec.softcap or 0.0, sinks, scales)


def dense(x: Tensor) -> bool:
    """Whether the numbers of each row of x [rows, heads, dim] lie side by side."""
    return x.stride(2) == 1 and x.stride(1) == x.shape[2]


def plan_of(batch: Batch, layer_group: int) -> CompiledPlan:
    """Return the step's spans with the tables of a group; made once per step, at its first
    layer.
    """
    key = ("compiled", layer_group)
    plan = batch.plans.get(key)
    if plan is None:
        table = batch.tables[layer_group]
        single = [index for index, span in enumerate(batch.spans) if span.num_rows == 1]
        several = [index for index, span in enumerate(batch.spans) if span.num_rows > 1]
        plan = batch.plans[key] = CompiledPlan(
            _decode_rows(batch, table, single) if single else None,
            _prefill_spans(batch, table, several) if several else None,
        )
    return plan


def _decode_rows(batch: Batch, table: GroupTables, members: list[int]) -> DecodeRows:
    spans = [batch.spans[index] for index in members]
    return DecodeRows(
        rows=torch.tensor([span.first_row for span in spans]),
        spans=torch.tensor(members),
        tokens=torch.tensor([span.num_tokens for span in spans]),
        first=torch.tensor([table.first[index] for index in members]),
        tables=table.blocks,
    )


def _prefill_spans(batch: Batch, table: GroupTables, members: list[int]) -> PrefillSpans:
    spans = [batch.spans[index] for index in members]
    return PrefillSpans(
        spans=torch.tensor(members),
        rows=torch.tensor([span.first_row for span in spans]),
        sizes=torch.tensor([span.num_rows for span in spans]),
        starts=torch.tensor([span.start for span in spans]),
        first=torch.tensor([table.first[index] for index in members]),
        tables=table.blocks,
    )
