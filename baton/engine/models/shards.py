"""Shards: what a decoder asks for where its weights may be one rank's share of the model.

Three places of a forward pass know of tensor parallelism: the embedding's lookup, the sum behind
each row-parallel product, the vocabulary's logits. `Whole` is the model in one piece;
tensor_parallel/sharding.py is a rank of several. Source: Megatron-LM (arXiv 1909.08053, section 3).
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor
from torch.nn import functional


class Shards(Protocol):
    """T = tokens, N = rows, H = hidden size."""

    def embed(self, token_ids: Tensor, weight: Tensor) -> Tensor:
        """token_ids [T], weight [vocabulary here, H] -> [T, H]."""
        ...

    def reduce(self, partial: Tensor) -> Tensor:
        """What this rank's share of a product's inputs gave, [T, H] -> the sum over all ranks; may
        mutate `partial`."""
        ...

    def gather(self, logits: Tensor) -> Tensor:
        """logits [N, vocabulary here] -> [N, vocabulary] on the rank that samples."""
        ...


class Whole:
    """Shards of a model in one piece."""

    def embed(self, token_ids: Tensor, weight: Tensor) -> Tensor:
        """See Shards."""
        return functional.embedding(token_ids, weight)

    def reduce(self, partial: Tensor) -> Tensor:
        """See Shards."""
        return partial

    def gather(self, logits: Tensor) -> Tensor:
        """See Shards."""
        return logits
