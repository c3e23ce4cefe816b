"""Where a process computes: on which device, as which rank of how many, with which KV in its pool.

This file does not use torch.distributed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch

from baton.protocol.errors import ConfigError
from baton.protocol.kv_spec import LayerSpec, heads_of_rank

LEADER: Final = 0  # the rank that schedules and samples


@dataclass(frozen=True, slots=True)
class RankPlace:
    """The number of this rank, and how many ranks there are."""

    rank: int
    size: int

    @property
    def leads(self) -> bool:
        """Whether this rank schedules and samples."""
        return self.rank == LEADER

    def share(self, count: int) -> range:
        """Return this rank's part of `count` items, of which all ranks get equally many. Up to
        size - 1 last items are no rank's if the ranks do not divide `count`."""
        share = count // self.size
        return range(self.rank * share, (self.rank + 1) * share)

    def heads(self, count: int) -> range:
        """Return this rank's of `count` heads (kv_spec.py)."""
        return heads_of_rank(count, self.rank, self.size)


def rank_layers(layers: Sequence[LayerSpec], size: int) -> tuple[LayerSpec, ...]:
    """Return what the pool of one of `size` ranks stores of each layer of the whole model. Raises
    InternalError for recurrent states that these ranks cannot split."""
    return tuple(
        replace(
            spec,
            kv_heads=len(heads_of_rank(spec.kv_heads, LEADER, size)),
            state=None if spec.state is None else spec.state.share(size),
        )
        for spec in layers
    )


def choose_device(name: str) -> torch.device:
    """Return the device for "auto", "cpu" or "cuda". Raises ConfigError for CUDA without a GPU."""
    available = torch.cuda.is_available() if name != "cpu" else False
    if name == "cuda" and not available:
        raise ConfigError("device is cuda, but torch sees no GPU", field="device")
    return torch.device("cuda" if available else "cpu")
