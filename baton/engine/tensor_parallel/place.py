"""Which rank of how many a process is, and what its pool stores. No torch.distributed here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from baton.protocol.kv_spec import LayerSpec

LEADER: Final = 0  # the rank that schedules and samples


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Which rank of how many."""

    rank: int
    size: int

    @property
    def leads(self) -> bool:
        """Whether this rank schedules and samples."""
        return self.rank == LEADER


def rank_layers(layers: Sequence[LayerSpec], size: int) -> tuple[LayerSpec, ...]:
    """What a rank's pool stores of each layer of the whole model."""
    return tuple(replace(spec, kv_heads=max(1, spec.kv_heads // size)) for spec in layers)
