"""The attention half of a decoder layer over latents (MLA; mla.py has the algebra).

    hidden -> [queries | latent | rotated part] in one product; a second product makes the queries
                        if they have a low rank
    key in the pool     the normalized latent and the rotated part: one head for all query heads
    query of a head     W_uk_h^T q_h and the rotated part of q_h
    output of a head    W_uv_h times the average of latents that the head attended to

The KV in the pool has the same layout and numbers as on the universal route. Source: transformers'
DeepseekV2Attention and DeepseekV3Attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import torch
from torch import Tensor

from baton.engine.kernels.cpu.latent import CompiledLatents, LatentSizes
from baton.engine.kernels.cpu.library import CpuKernels, product_kernels_for
from baton.engine.kernels.cpu.step import StepLatents
from baton.engine.kernels.cpu.step_linears import StepLinear, StepLinears
from baton.engine.kernels.rope import PairRotation, Rotation
from baton.engine.models.elementwise import CompiledElementwise, Elementwise
from baton.engine.models.layers.projection import Projection, Reduce
from baton.engine.models.lora import AdapterRows, of_kept
from baton.engine.models.mla import Absorbed
from baton.engine.state.batch import Batch

EPSILON: Final = 1e-6  # of the norms of latents and of queries; the config's is for other norms


class Latents(Protocol):
    """What stands between the products of latent attention and attention itself."""

    def queries(self, q: Tensor, latent: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """Turn q [T, heads * (nope + rope)] and `latent` [T, rank + rope], with the numbers of a
        row side by side, into queries [T, heads, rank + rope] and keys [T, 1, rank + rope]."""
        ...

    def values(self, attended: Tensor) -> Tensor:
        """Turn averages of latents [T, heads, rank] into the heads' outputs [T, heads * v_dim]."""
        ...


@dataclass(frozen=True, slots=True)
class TorchLatents:
    """Implements Latents by torch operations, for any dtype and device."""

    absorbed: Absorbed  # weights of this rank's heads
    norm: Tensor  # [rank]
    pairs: PairRotation
    between: Elementwise

    def queries(self, q: Tensor, latent: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """See Latents."""
        heads, nope, rank = self.absorbed.key.shape
        q = q.unflatten(1, (heads, -1))
        latent, key = latent[:, :rank], latent[:, rank:]
        rotated = self.pairs(torch.cat((q[..., nope:], key[:, None]), dim=1), rotation)
        latent = normalized(self.between, latent, self.norm)
        keys = torch.cat((latent[:, None], rotated[:, heads:]), dim=2)
        return torch.cat((self.absorbed.queries(q[..., :nope]), rotated[:, :heads]), dim=2), keys

    def values(self, attended: Tensor) -> Tensor:
        """See Latents."""
        return self.absorbed.values(attended).flatten(1)


def latent_kernels(sizes: LatentSizes, between: Elementwise) -> CpuKernels | None:
    """Return the kernels of CompiledLatents if they serve the operations `between` products, and
    products as well, and the sizes allow it; else None."""
    if not isinstance(between, CompiledElementwise) or not CompiledLatents.suits(sizes):
        return None
    return product_kernels_for(torch.bfloat16, torch.device("cpu"))


@dataclass(frozen=True, slots=True)
class LowRankQueries:
    """Norm and second product of queries of a low rank R."""

    norm: Tensor  # [R]
    up: Projection  # [R] -> [heads * (nope + rope)]


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Attention over latents: one per token, for all heads. H = hidden. Q = the rank of the
    queries, or heads * (nope + rope) if they have no low rank. `key_dim`: rank + rope."""

    layer: int
    key_dim: int
    inputs: Projection  # [H] -> [Q + key_dim]
    low: LowRankQueries | None
    latents: Latents
    output: Projection  # [heads * v_dim] -> [H]
    between: Elementwise

    @property
    def projections(self) -> list[Projection]:
        """The products that an adapter can change."""
        up = [] if self.low is None else [self.low.up]
        return [self.inputs, *up, self.output]

    def __call__(
        self,
        hidden: Tensor,
        rotation: Rotation,
        batch: Batch,
        groups: Sequence[AdapterRows],
        reduce: Reduce,
    ) -> Tensor:
        """Attend: hidden [T, H] -> those of [T, H] that `batch` keeps, which `reduce` sums over the
        ranks. Writes the latents of all rows."""
        x = self.inputs(hidden, groups)
        q, latent = x[:, : -self.key_dim], x[:, -self.key_dim :]
        if self.low is not None:
            q = self.low.up(normalized(self.between, q, self.low.norm), groups)
        queries, keys = self.latents.queries(q, latent, rotation)
        attended = batch.attend(self.layer, queries, keys, keys[..., :0])
        return self.output.summed(self.latents.values(attended), of_kept(groups, batch), reduce)

    def step_latents(self, up: Sequence[StepLinear]) -> StepLatents | None:
        """Return what stands between `inputs` and `output` in the form of the compiled step; `up`:
        the queries' second product, or nothing. None if the step does not support it."""
        if not isinstance(self.latents, CompiledLatents):
            return None
        norm = None if self.low is None else self.low.norm
        return StepLatents(self.latents, norm, StepLinears(up) if up else None)


def normalized(between: Elementwise, x: Tensor, weight: Tensor) -> Tensor:
    """Return the RMSNorm of x [T, N] by `weight` [N]."""
    return between.add_norm(x.contiguous(), None, weight, EPSILON)[1]
