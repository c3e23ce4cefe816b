"""Products of a decoder that LoRA adapters can change, and the dense MLP, made of two of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from baton.engine.models.elementwise import Elementwise
from baton.engine.models.lora import Adapter, AdapterRows, LowRank, apply_deltas, merge_parts
from baton.engine.quantization.linear import Int8Share, Linear
from baton.protocol.errors import ModelRefused

Reduce = Callable[[Tensor], Tensor]  # a rank's part of a sum -> the sum over all ranks


@dataclass(frozen=True, slots=True)
class Projection:
    """One product: one or several projections of the checkpoint, stacked along their outputs.

    `parts`: the outputs of each projection, by its module path. `deltas`: those of LoRA adapters,
    by adapter id.
    """

    linear: Linear
    parts: dict[str, slice]
    num_inputs: int
    deltas: dict[str, LowRank] = field(default_factory=dict)

    def __call__(self, x: Tensor, groups: Sequence[AdapterRows]) -> Tensor:
        """Compute x [T, in] -> [T, out], with the deltas of the adapters of `groups`."""
        return apply_deltas(x, self.linear(x), self.deltas, groups)

    def summed(self, x: Tensor, groups: Sequence[AdapterRows], reduce: Reduce) -> Tensor:
        """Compute x [T, inputs of this rank] -> [T, out], summed over the ranks; `reduce`: see
        Shards. A Int8Share sums by itself, so `reduce` then sums the deltas alone."""
        if not isinstance(self.linear, Int8Share):
            return reduce(self(x, groups))
        y = self.linear(x)
        if any(group.id in self.deltas for group in groups):
            y += reduce(apply_deltas(x, torch.zeros_like(y), self.deltas, groups))
        return y

    def partial(self, x: Tensor, groups: Sequence[AdapterRows]) -> Tensor:
        """Compute x [T, inputs of this rank] -> [T, out], this rank's part of the sum over the
        ranks, whatever the format (see Int8Share.partial). The product must have no bias."""
        linear = self.linear
        if not isinstance(linear, Int8Share):
            return self(x, groups)
        return apply_deltas(x, linear.partial(*linear.rounded(x)), self.deltas, groups)

    def adapt(self, adapter: Adapter) -> set[str]:
        """Take over the adapter's deltas for `parts`. Return the module paths of those deltas.
        Raises ModelRefused for deltas of other sizes."""
        held = {module: adapter.deltas[module] for module in self.parts if module in adapter.deltas}
        for module, delta in held.items():
            outputs = self.parts[module].stop - self.parts[module].start
            if (delta.up.shape[0], delta.down.shape[1]) != (outputs, self.num_inputs):
                raise ModelRefused(
                    f"adapter {adapter.name} was made for another model: {module} has other sizes",
                    field="lora_modules",
                )
        if held:
            total = max(part.stop for part in self.parts.values())
            parts = ((self.parts[module], delta) for module, delta in held.items())
            self.deltas[adapter.id] = merge_parts(parts, total)
        return set(held)


@dataclass(frozen=True, slots=True)
class Mlp:
    """A dense MLP. H = hidden, I = intermediate size."""

    gate_up: Projection  # [H] -> [2 * I]
    down: Projection  # [I] -> [H]
    between: Elementwise

    def summed(self, hidden: Tensor, groups: Sequence[AdapterRows], reduce: Reduce) -> Tensor:
        """Compute hidden [T, H] -> [T, H], summed over the ranks; `reduce`: see Shards."""
        inner = self.between.gated(self.gate_up(hidden, groups))
        return self.down.summed(inner, groups, reduce)

    def partial(self, hidden: Tensor, groups: Sequence[AdapterRows]) -> Tensor:
        """Compute hidden [T, H] -> [T, H], this rank's part of a sum over the ranks. The caller
        adds other answers to it and sums once."""
        return self.down.partial(self.between.gated(self.gate_up(hidden, groups)), groups)

    @property
    def projections(self) -> list[Projection]:
        """The products that an adapter can change."""
        return [self.gate_up, self.down]
