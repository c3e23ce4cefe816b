"""How many bytes a slot of recurrent state takes, and how many slots memory pays for. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from baton.protocol.kv_spec import LayerSpec

ALIGNMENT: Final = 64  # bytes: a cache line
STATE_SHARE: Final = 0.5  # of the memory for KV, at most


def slot_bytes(layers: Sequence[LayerSpec]) -> int:
    """Return the bytes of a slot of these layers; 0 for a model without recurrent state."""
    states = [spec.state for spec in layers if spec.state is not None]
    return sum(aligned(state.conv_bytes) + aligned(state.recurrent_bytes) for state in states)


def slots_within(num_bytes: int, layers: Sequence[LayerSpec], max_num_seqs: int) -> int:
    """Return how many slots a model of these layers gets of `num_bytes` for KV and states: one per
    running sequence, but at most STATE_SHARE of the bytes.
    """
    size = slot_bytes(layers)
    return max(1, min(max_num_seqs, int(STATE_SHARE * num_bytes) // size)) if size else 0


def aligned(size: int) -> int:
    """Return `size` bytes, up to the next boundary of a part."""
    return -(-size // ALIGNMENT) * ALIGNMENT
