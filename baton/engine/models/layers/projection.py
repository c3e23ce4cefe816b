"""The products of a decoder that LoRA adapters reach, and the dense MLP made of two of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from baton.engine.models.elementwise import Elementwise
from baton.engine.models.lora import Adapter, AdapterRows, LowRank, apply_deltas, merge_parts
from baton.engine.quantization.linear import Linear, W8A8Share
from baton.protocol.errors import ModelRefused

Reduce = Callable[[Tensor], Tensor]  # what a rank has of a sum -> the sum over all ranks


@dataclass(frozen=True, slots=True)
class Projection:
    """One product: one or several projections of the checkpoint, stacked along their outputs.

    `parts`: which outputs belong to which module path. `deltas`: LoRA, by adapter id.
    """

    linear: Linear
    parts: dict[str, slice]
    num_inputs: int
    deltas: dict[str, LowRank] = field(default_factory=dict)

    def __call__(self, x: Tensor, groups: Sequence[AdapterRows]) -> Tensor:
        """x [T, in] -> [T, out]."""
        return apply_deltas(x, self.linear(x), self.deltas, groups)

    def summed(self, x: Tensor, groups: Sequence[AdapterRows], reduce: Reduce) -> Tensor:
        """x [T, in of this rank] -> [T, out], summed over the ranks; `reduce`: see Shards."""
        if not isinstance(self.linear, W8A8Share):
            return reduce(self(x, groups))
        y = self.linear(x)
        if any(group.id in self.deltas for group in groups):
            y += reduce(apply_deltas(x, torch.zeros_like(y), self.deltas, groups))
        return y

    def partial(self, x: Tensor, groups: Sequence[AdapterRows]) -> Tensor:
        """x [T, in of this rank] -> [T, out], what is to be summed over the ranks, in all formats:
        see W8A8Share.partial. Without a bias."""
        linear = self.linear
        if not isinstance(linear, W8A8Share):
            return self(x, groups)
        return apply_deltas(x, linear.partial(*linear.rounded(x)), self.deltas, groups)

    def adapt(self, adapter: Adapter) -> set[str]:
        """Take the adapter's deltas for these parts; their module paths. Raises ModelRefused."""
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
    """A dense layer. H = hidden, I = intermediate size."""

    gate_up: Projection  # [H] -> [2 * I]
    down: Projection  # [I] -> [H]
    between: Elementwise

    def summed(self, hidden: Tensor, groups: Sequence[AdapterRows], reduce: Reduce) -> Tensor:
        """hidden [T, H] -> [T, H], summed over the ranks; `reduce`: see Shards."""
        inner = self.between.swiglu(self.gate_up(hidden, groups))
        return self.down.summed(inner, groups, reduce)

    def partial(self, hidden: Tensor, groups: Sequence[AdapterRows]) -> Tensor:
        """hidden [T, H] -> [T, H], what is to be summed over the ranks with more than this."""
        return self.down.partial(self.between.swiglu(self.gate_up(hidden, groups)), groups)

    @property
    def projections(self) -> list[Projection]:
        """What an adapter can reach."""
        return [self.gate_up, self.down]
