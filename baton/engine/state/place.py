"""Where a process computes: on which device, and as which rank of how many; what its pool stores.

No torch.distributed here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch

from baton.protocol.errors import ConfigError
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


def choose_device(name: str) -> torch.device:
    """The device of "auto", "cpu" or "cuda". Raises ConfigError for CUDA without a usable GPU."""
    available = torch.cuda.is_available() if name != "cpu" else False
    if name == "cuda" and not available:
        raise ConfigError("device is cuda, but torch sees no GPU", field="device")
    return torch.device("cuda" if available else "cpu")
