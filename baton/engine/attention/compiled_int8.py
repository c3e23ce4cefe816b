"""Paged attention over int8 KV with the compiled CPU kernels: rounded into the pool, and read by
decode rows, without a copy in between.

Prefill spans, and layers that the kernels do not know (MLA, odd sizes), are torch_cpu.py's. A
decode row's result depends on its own keys alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from baton.engine.attention.compiled import dense, known_layer, plan_of
from baton.engine.attention.torch_cpu import TorchAttention
from baton.engine.kernels.cpu.int8_kv import Int8KVKernels, Int8Layer
from baton.engine.state.attention import AttentionLayer, KVViews
from baton.engine.state.batch import Batch


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
        if compiled is None or not (dense(k) and dense(v)):
            self._torch.write(layer, k, v, slots)
            return
        self._kernels.write(k, v, compiled, slots)

    def attend(self, layer: int, q: Tensor, batch: Batch) -> Tensor:
        """See Attention.attend."""
        compiled = self._layers[layer]
        plan = None if compiled is None else plan_of(batch, self.group_of[layer])
        if compiled is None or plan is None or plan.decode is None:
            return self._torch.attend(layer, q, batch)
        if not dense(q):
            q = q.contiguous()
        out = q.new_empty(q.shape[0], q.shape[1], compiled.plain.values.shape[3])
        self._kernels.decode_attention(q, out, compiled, plan.decode)
        if plan.prefill is not None:
            self._torch.prefill(layer, q, batch, out)
        return out


def _int8_layer(pool: KVViews, layer: int, spec: AttentionLayer) -> Int8Layer | None:
    """What the kernels read of a layer; None for what they do not know."""
    plain = known_layer(pool, layer, spec, torch.int8)
    return None if plain is None else Int8Layer(plain, *pool.scales(layer))
