"""What a data-parallel rank builds its model from: weights that all ranks have, then its experts.

    DenseWeights    attention, embedding, head, norms, routers, shared experts: read first, and kept
                    until the model is built; the ranks of a host can map them from one file
    RankWeights     the same again, and this rank's routed experts, which are read now

So the first rank of a host holds up the others only while it reads what all of them need; then
each reads its experts, all at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor

from baton.engine.checkpoint.shared_weights import WeightSource
from baton.engine.models.config import DecoderConfig
from baton.engine.models.decoder import Decoder, Whole
from baton.engine.quantization.linear import Linear


class DenseWeights:
    """Implements WeightSource: reads from `source`, and returns the same objects when they are
    asked for again."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source
        self._tensors: dict[tuple[str, ...], Tensor] = {}
        self._linears: dict[tuple[str, ...], Linear] = {}
        self._head: Linear | None = None

    @staticmethod
    def of(config: DecoderConfig, source: WeightSource) -> DenseWeights:
        """Read all weights of the model but for its routed experts. Raises ModelRefused."""
        kept = DenseWeights(source)
        experts = config.experts
        assert experts is not None, "the route has refused a model without experts"
        without = replace(config, experts=replace(experts, held=range(0)))
        # Built to read what a decoder reads. With shards it compiles no step.
        Decoder(without, kept.tensor, kept, shards=Whole())
        return kept

    @property
    def num_bytes(self) -> int:
        """See WeightSource."""
        return self._source.num_bytes

    @property
    def rounded_head_bytes(self) -> int:
        """See WeightSource."""
        return self._source.rounded_head_bytes

    def has(self, modules: Sequence[str]) -> bool:
        """Whether the product of `modules` has been read."""
        return tuple(modules) in self._linears

    def tensor(self, *names: str) -> Tensor:
        """See WeightSource."""
        if names not in self._tensors:
            self._tensors[names] = self._source.tensor(*names)
        return self._tensors[names]

    def read(self, modules: Sequence[str], has_bias: bool) -> Linear:
        """See Linears.read."""
        if not self.has(modules):
            self._linears[tuple(modules)] = self._source.read(modules, has_bias)
        return self._linears[tuple(modules)]

    def derived(self, name: str, make: Callable[[Tensor], Tensor]) -> Tensor:
        """See Linears.derived."""
        key = (name, make.__name__)
        if key not in self._tensors:
            self._tensors[key] = self._source.derived(name, make)
        return self._tensors[key]

    def head(self, tied: bool) -> Linear:
        """See Linears.head."""
        if self._head is None:
            self._head = self._source.head(tied)
        return self._head


class RankWeights:
    """Implements WeightSource: products that `dense` does not have come from `routed`."""

    def __init__(self, dense: DenseWeights, routed: WeightSource) -> None:
        self._dense = dense
        self._routed = routed
        self._dense_bytes = dense.num_bytes

    @property
    def num_bytes(self) -> int:
        """See WeightSource."""
        return self._dense_bytes + self._routed.num_bytes

    @property
    def rounded_head_bytes(self) -> int:
        """See WeightSource."""
        return self._dense.rounded_head_bytes

    def tensor(self, *names: str) -> Tensor:
        """See WeightSource. All tensors that are no products are dense."""
        return self._dense.tensor(*names)

    def read(self, modules: Sequence[str], has_bias: bool) -> Linear:
        """See Linears.read."""
        source = self._dense if self._dense.has(modules) else self._routed
        return source.read(modules, has_bias)

    def derived(self, name: str, make: Callable[[Tensor], Tensor]) -> Tensor:
        """See Linears.derived. What is made of a tensor that is no product is dense."""
        return self._dense.derived(name, make)

    def head(self, tied: bool) -> Linear:
        """See Linears.head."""
        return self._dense.head(tied)
