"""The attention half of a decoder layer over keys and values of heads (MHA, GQA, MQA)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.engine.kernels.cpu.library import HeadNorms
from baton.engine.kernels.rope import Rotation
from baton.engine.models.elementwise import Elementwise
from baton.engine.models.layers.projection import Projection, Reduce
from baton.engine.models.lora import AdapterRows, of_kept
from baton.engine.state.batch import Batch


@dataclass(frozen=True, slots=True)
class HeadAttention:
    """Attention over keys and values of heads (MHA, GQA, MQA). H = hidden, D = head_dim.

    `gated`: `qkv` makes a gate of D numbers behind each query; see DecoderConfig.
    """

    layer: int
    num_heads: int
    head_dim: int
    qkv: Projection  # [H] -> [(heads + 2 * kv_heads) * D], `gated` [(2 * heads + ...) * D]
    head_norms: HeadNorms | None
    output: Projection  # [heads * D] -> [H]
    between: Elementwise
    gated: bool = False

    @property
    def projections(self) -> list[Projection]:
        """The products that an adapter can change."""
        return [self.qkv, self.output]

    def __call__(
        self,
        hidden: Tensor,
        rotation: Rotation,
        batch: Batch,
        groups: Sequence[AdapterRows],
        reduce: Reduce,
    ) -> Tensor:
        """Attend: hidden [T, H] -> those of [T, H] that `batch` keeps, which `reduce` sums over the
        ranks. Writes the keys and values of all rows."""
        qkv = self.qkv(hidden, groups).unflatten(1, (-1, self.head_dim))
        gates: Tensor | None = None
        if self.gated:
            count = 2 * self.num_heads
            gates = qkv[:, 1:count:2]
            qkv = torch.cat((qkv[:, :count:2], qkv[:, count:]), dim=1)
        queries, keys, values = self.between.rotate(qkv, rotation, self.num_heads, self.head_norms)
        attended = batch.attend(self.layer, queries, keys, values)
        if gates is not None:
            attended = self.between.gate_heads(attended, batch.kept(gates))
        return self.output.summed(attended.flatten(1), of_kept(groups, batch), reduce)
