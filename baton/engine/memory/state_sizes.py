"""How many bytes a slot of recurrent state takes, and how many slots and checkpoints memory pays
for. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from baton.protocol.kv_spec import LayerSpec

ALIGNMENT: Final = 64  # bytes: a cache line, and the widest vector load
STATE_SHARE: Final = 0.5  # of the memory for KV, at most
CHECKPOINT_SHARE: Final = 0.25  # of the same memory, at most
CHECKPOINT_TOKENS: Final = 4096  # tokens of KV for each checkpoint, if memory has room for both


def slot_bytes(layers: Sequence[LayerSpec]) -> int:
    """Return the bytes of a slot of these layers; 0 for a model without recurrent state."""
    states = [spec.state for spec in layers if spec.state is not None]
    return sum(aligned(state.conv_bytes) + aligned(state.recurrent_bytes) for state in states)


def slots_within(num_bytes: int, layers: Sequence[LayerSpec], wanted: int) -> int:
    """Return how many of `wanted` slots a model of these layers gets of `num_bytes` for KV and
    states: at most STATE_SHARE of the bytes.
    """
    size = slot_bytes(layers)
    return max(1, min(wanted, int(STATE_SHARE * num_bytes) // size)) if size else 0


def slots_per_sequence(*, speculates: bool) -> int:
    """Return how many slots each running sequence needs: one for its state, and one for the state
    before its drafts.
    """
    return 2 if speculates else 1


def sequences_within(num_slots: int, *, speculates: bool) -> int:
    """Return how many sequences may run at once over `num_slots` slots; a single slot is enough for
    one that never drafts.
    """
    return max(1, num_slots // slots_per_sequence(speculates=speculates))


def checkpoints_within(
    num_bytes: int, layers: Sequence[LayerSpec], kv_dtype: str, num_tokens: int | None = None
) -> int:
    """Return how many checkpoints a model of these layers gets of `num_bytes` for KV and states.

    One for each CHECKPOINT_TOKENS of KV, but at most CHECKPOINT_SHARE of the bytes. `num_tokens`:
    the most that the pool holds; None = what its memory pays for.
    """
    size = slot_bytes(layers)
    if not size:
        return 0
    token = sum(layer.token_bytes(kv_dtype) + layer.scale_bytes(kv_dtype) for layer in layers)
    count = num_bytes // (size + CHECKPOINT_TOKENS * token)
    if num_tokens is not None:
        count = min(count, num_tokens // CHECKPOINT_TOKENS)
    return min(max(1, count), int(CHECKPOINT_SHARE * num_bytes) // size)


def aligned(size: int) -> int:
    """Return `size` bytes, up to the next boundary of a part of a slot or of a page."""
    return -(-size // ALIGNMENT) * ALIGNMENT
