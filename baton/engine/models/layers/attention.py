"""The attention half of a decoder layer: over keys and values of heads, or over latents (MLA).

Attention over latents works so (mla.py has the algebra):

    hidden -> [queries | latent | rotated part] in one product; a second product makes the queries
                        if they have a low rank
    key in the pool     the normalized latent and the rotated part: one head for all query heads
    query of a head     W_uk_h^T q_h and the rotated part of q_h
    output of a head    W_uv_h times the average of latents that the head attended to

The KV in the pool has the same layout and numbers as on the universal route. Source of latent
attention: transformers' DeepseekV2Attention and DeepseekV3Attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from baton.engine.kernels.cpu.library import HeadNorms
from baton.engine.kernels.rope import PairRotation, Rotation
from baton.engine.models.elementwise import Elementwise
from baton.engine.models.layers.projection import Projection, Reduce
from baton.engine.models.lora import AdapterRows
from baton.engine.models.mla import Absorbed
from baton.engine.state.batch import Batch

EPSILON: Final = 1e-6  # of the norms of latents and of queries; the config's is for other norms


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
        """Attend: hidden [T, H] -> [T, H], which `reduce` sums over the ranks. Writes the rows'
        keys and values."""
        qkv = self.qkv(hidden, groups).unflatten(1, (-1, self.head_dim))
        gates: Tensor | None = None
        if self.gated:
            count = 2 * self.num_heads
            gates = qkv[:, 1:count:2]
            qkv = torch.cat((qkv[:, :count:2], qkv[:, count:]), dim=1)
        queries, keys, values = self.between.rotate(qkv, rotation, self.num_heads, self.head_norms)
        attended = batch.attend(self.layer, queries, keys, values)
        if gates is not None:
            attended = self.between.gate_heads(attended, gates)
        return self.output.summed(attended.flatten(1), groups, reduce)


@dataclass(frozen=True, slots=True)
class LowRankQueries:
    """Norm and second product of queries of a low rank R."""

    norm: Tensor  # [R]
    up: Projection  # [R] -> [heads * (nope + rope)]


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Attention over latents: one per token, for all heads. H = hidden. Q = the rank of the
    queries, or heads * (nope + rope) if they have no low rank."""

    layer: int
    rope_dim: int
    inputs: Projection  # [H] -> [Q + rank + rope]
    queries: LowRankQueries | None
    latent_norm: Tensor  # [rank]
    absorbed: Absorbed  # weights of this rank's heads
    output: Projection  # [heads * v_dim] -> [H]
    pairs: PairRotation
    between: Elementwise

    @property
    def projections(self) -> list[Projection]:
        """The products that an adapter can change."""
        up = [] if self.queries is None else [self.queries.up]
        return [self.inputs, *up, self.output]

    def __call__(
        self,
        hidden: Tensor,
        rotation: Rotation,
        batch: Batch,
        groups: Sequence[AdapterRows],
        reduce: Reduce,
    ) -> Tensor:
        """Attend: hidden [T, H] -> [T, H], which `reduce` sums over the ranks. Writes the rows'
        latents."""
        heads, nope, rank = self.absorbed.key.shape
        x = self.inputs(hidden, groups)
        q, latent, key = x.split((x.shape[1] - rank - self.rope_dim, rank, self.rope_dim), dim=1)
        if self.queries is not None:
            q = self.queries.up(self._normalized(q, self.queries.norm), groups)
        q = q.unflatten(1, (heads, -1))
        rotated = self.pairs(torch.cat((q[..., nope:], key[:, None]), dim=1), rotation)
        latent = self._normalized(latent, self.latent_norm)
        keys = torch.cat((latent[:, None], rotated[:, heads:]), dim=2)
        queries = torch.cat((self.absorbed.queries(q[..., :nope]), rotated[:, :heads]), dim=2)
        attended = batch.attend(self.layer, queries, keys, keys[..., :0])
        return self.output.summed(self.absorbed.values(attended).flatten(1), groups, reduce)

    def _normalized(self, x: Tensor, weight: Tensor) -> Tensor:
        return self.between.add_norm(x.contiguous(), None, weight, EPSILON)[1]
