"""The attention half of a decoder layer whose keys and values have heads (MHA, GQA, MQA)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from baton.engine.kernels.cpu.library import HeadNorms
from baton.engine.kernels.rope import Rotation
from baton.engine.models.elementwise import Elementwise
from baton.engine.models.lora import AdapterRows
from baton.engine.models.projection import Projection
from baton.engine.state.batch import Batch


@dataclass(frozen=True, slots=True)
class HeadAttention:
    """Weights of one layer. H = hidden, D = head_dim."""

    layer: int
    num_heads: int
    head_dim: int
    qkv: Projection  # [H] -> [(heads + 2 * kv_heads) * D]
    head_norms: HeadNorms | None
    output: Projection  # [heads * D] -> [H]
    between: Elementwise

    @property
    def projections(self) -> list[Projection]:
        """What an adapter can reach."""
        return [self.qkv, self.output]

    def __call__(
        self, hidden: Tensor, rotation: Rotation, batch: Batch, groups: Sequence[AdapterRows]
    ) -> Tensor:
        """hidden [T, H] -> [T, H]; writes the rows' keys and values."""
        qkv = self.qkv(hidden, groups).unflatten(1, (-1, self.head_dim))
        queries, keys, values = self.between.rotate(qkv, rotation, self.num_heads, self.head_norms)
        attended = batch.attend(self.layer, queries, keys, values)
        return self.output(attended.flatten(1), groups)
