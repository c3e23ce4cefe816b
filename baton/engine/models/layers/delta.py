"""The attention half of a layer with linear attention: Gated DeltaNet (Qwen3-Next, Qwen3.5).

    hidden -> [queries | keys | values | gates | rates | decays] in one product
           -> convolution, delta rule, gated norm over the sequences' states (kernels/delta_rule.py)
           -> hidden, in a second product

The states lie in the slots of the StateArena, in the layout of the universal route. They are
advanced in place. Such a layer has no KV.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.engine.kernels.cpu.delta_rule import CompiledDeltaRule
from baton.engine.kernels.delta_rule import (
    DeltaRule,
    DeltaSizes,
    DeltaWeights,
    TorchDeltaRule,
)
from baton.engine.kernels.gpu.support import triton_serves
from baton.engine.kernels.rope import Rotation
from baton.engine.models.elementwise import CompiledElementwise, Elementwise
from baton.engine.models.layers.projection import Projection, Reduce
from baton.engine.models.lora import AdapterRows, of_kept
from baton.engine.state.batch import Batch
from baton.protocol.errors import InternalError


@dataclass(frozen=True, slots=True)
class DeltaAttention:
    """Linear attention by the gated delta rule. H = hidden.

    `by_head`: the first product has the numbers of each key head side by side, as Qwen3-Next's
    checkpoints store them.
    """

    layer: int
    sizes: DeltaSizes
    inputs: Projection  # [H] -> [sizes.inputs]
    rule: DeltaRule
    output: Projection  # [sizes.values] -> [H]
    by_head: bool = False

    @property
    def projections(self) -> list[Projection]:
        """The products that an adapter can change."""
        return [self.inputs, self.output]

    def __call__(
        self,
        hidden: Tensor,
        rotation: Rotation,
        batch: Batch,
        groups: Sequence[AdapterRows],
        reduce: Reduce,
    ) -> Tensor:
        """Mix the rows of each sequence: hidden [T, H] -> those of [T, H] that `batch` keeps, which
        `reduce` sums over the ranks. Advances the sequences' states. `rotation` is not used."""
        if batch.states is None:
            raise InternalError("a model with recurrent state got a step without states")
        conv, matrices = batch.states.views(self.layer)
        assert conv is not None, "the layer has both states"
        assert matrices is not None, "as above"
        x = self.inputs(hidden, groups)
        x = _by_kind(x, self.sizes) if self.by_head else x
        mixed = self.rule(x, conv, matrices, batch.spans)
        if batch.on_layer is not None:
            batch.on_layer(self.layer)
        return self.output.summed(batch.kept(mixed), of_kept(groups, batch), reduce)


def choose_rule(sizes: DeltaSizes, weights: DeltaWeights, between: Elementwise) -> DeltaRule:
    """Return the rule of one layer: Triton's on a GPU that has Triton, compiled where the
    operations `between` products are, if the sizes allow it; else by torch operations."""
    if triton_serves(weights.conv.device):
        from baton.engine.kernels.gpu.delta_rule import TritonDeltaRule  # imports triton

        if TritonDeltaRule.suits(sizes):
            return TritonDeltaRule(sizes, weights)
    if isinstance(between, CompiledElementwise) and CompiledDeltaRule.suits(sizes):
        return CompiledDeltaRule(between.kernels, sizes, weights)
    return TorchDeltaRule(sizes, weights)


def _by_kind(x: Tensor, sizes: DeltaSizes) -> Tensor:
    """Return rows [T, inputs] with all queries first, then all keys, and so on, for rows that have
    [query, key, values, gates] of each key head, then [rates, decays] of each key head."""
    shared = sizes.value_heads // sizes.key_heads
    wide = sizes.channels + sizes.values
    heads = x[:, :wide].unflatten(1, (sizes.key_heads, -1))
    own = (sizes.key_dim, sizes.key_dim, shared * sizes.value_dim, shared * sizes.value_dim)
    of_values = x[:, wide:].unflatten(1, (sizes.key_heads, -1)).split(shared, dim=2)
    parts = (*heads.split(own, dim=2), *of_values)
    return torch.cat([part.flatten(1) for part in parts], dim=1)
