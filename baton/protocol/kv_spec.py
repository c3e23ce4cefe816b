"""What attention layers store per token, and the layout fingerprint.

Two nodes exchange KV only if their fingerprints are equal.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Final, Literal, TypeAlias

from baton.protocol.errors import InternalError

PROTOCOL_VERSION: Final = 1
DTYPE_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "fp8": 1}
SCALE_BYTES: Final = 4  # int8 KV: a float32 per token and head, for K and for V


@dataclass(frozen=True, slots=True)
class StateSpec:
    """Recurrent state of one layer: what it keeps of a whole sequence, whatever its length.

    `conv` is [channels, taps], the last inputs of a convolution; `recurrent` is the shape of the
    matrices that a scan carries on. () = the layer has none. The dtypes are names of torch's.

    `segments`: how many channels each part of `conv` has that tensor-parallel ranks split by itself
    (queries, keys, values); () = every rank keeps the whole state. It says nothing of what a whole
    state is, so it is neither compared nor in the fingerprint.
    """

    conv: tuple[int, ...] = ()
    recurrent: tuple[int, ...] = ()
    conv_dtype: str = "float32"
    recurrent_dtype: str = "float32"
    segments: tuple[int, ...] = field(default=(), compare=False)

    @property
    def conv_bytes(self) -> int:
        """The bytes of the convolution's inputs of one sequence."""
        return math.prod(self.conv) * DTYPE_BYTES[self.conv_dtype] if self.conv else 0

    @property
    def recurrent_bytes(self) -> int:
        """The bytes of the matrices of one sequence."""
        return (
            math.prod(self.recurrent) * DTYPE_BYTES[self.recurrent_dtype] if self.recurrent else 0
        )

    @property
    def num_bytes(self) -> int:
        """The bytes of both, as a transfer sends them."""
        return self.conv_bytes + self.recurrent_bytes

    def share(self, size: int) -> StateSpec:
        """Return what one of `size` ranks keeps: its heads' matrices, and their channels of each
        segment; of a state without segments all. Raises InternalError if the ranks cannot split
        the segments evenly."""
        if size == 1 or not self.segments:
            return self
        channels, *taps = self.conv or (0,)
        heads, *matrix = self.recurrent or (0,)
        if sum(self.segments) != channels:
            raise InternalError(f"segments {self.segments} are not {channels} channels of a state")
        if heads % size or any(segment % size for segment in self.segments):
            raise InternalError(f"{size} ranks cannot split a state of {self}")
        return replace(
            self,
            conv=(channels // size, *taps),
            recurrent=(heads // size, *matrix) if heads else (),
            segments=tuple(segment // size for segment in self.segments),
        )


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What one layer of the whole model stores, before tensor parallelism.

    `window` 0 = unlimited. Kind `mla`: K holds one latent per token; V holds the index keys of a
    layer that chooses what it attends to, or nothing. Kind `state`: no KV, but a recurrent `state`
    per sequence, or nothing (a layer without attention). A layer of another kind may keep a state
    beside its KV.
    """

    kv_heads: int
    k_dim: int
    v_dim: int
    window: int = 0
    kind: Literal["full", "sliding", "mla", "state"] = "full"
    state: StateSpec | None = None

    @property
    def state_bytes(self) -> int:
        """The bytes of one sequence's recurrent state, as a transfer sends them; 0 without one."""
        return 0 if self.state is None else self.state.num_bytes

    def token_bytes(self, dtype: str) -> int:
        """Return the bytes of one token's K and V, without scales."""
        return self.kv_heads * (self.k_dim + self.v_dim) * DTYPE_BYTES[dtype]

    def scale_bytes(self, dtype: str) -> int:
        """Return the bytes of one token's scales: 0 unless the KV is int8."""
        parts = 2 if self.v_dim else 1
        return parts * self.kv_heads * SCALE_BYTES if dtype == "int8" else 0


@dataclass(frozen=True, slots=True)
class PoolFormat:
    """How one node stores KV. Sent in the handshake; it is not part of the fingerprint."""

    block_size: int
    dtype: str
    tp_size: int = 1
    tp_rank: int = 0
    codecs: tuple[str, ...] = ("raw",)


@dataclass(frozen=True, slots=True)
class HeldBlocks:
    """A sequence's blocks in one layer group: its block `first + i` lies in pool block ids[i].

    The blocks before `first` are not held: a sliding window has passed them, or will never see
    them. `state_slot`: where the sequence's recurrent state lies; only the list of the first group
    has it, and only where the state is handed over with the blocks.
    """

    ids: Sequence[int]
    first: int = 0
    state_slot: int | None = None

    @property
    def end(self) -> int:
        """Return the number of the sequence's blocks up to the last held one.

        Those before `first` are counted, too.
        """
        return self.first + len(self.ids)


BlockLists: TypeAlias = tuple[HeldBlocks, ...]  # one per layer group of the pool


def heads_of_rank(count: int, rank: int, size: int) -> range:
    """Return which of `count` heads of the whole model this one of `size` ranks has. Of fewer heads
    than ranks, each belongs to several ranks; a layer without KV has none."""
    first = rank * count // size
    return range(first, max(first + min(1, count), (rank + 1) * count // size))


def first_visible(window: int, num_tokens: int) -> int:
    """Return the first of `num_tokens` known tokens whose KV a layer with `window` needs.

    `window` 0 means unlimited. The result includes one token more than strictly needed, because the
    last known token may be computed again.
    """
    return max(0, num_tokens - window) if window else 0


def layout_fingerprint(model_digest: str, rope: str, layers: tuple[LayerSpec, ...]) -> str:
    """Return the hex SHA-256 over checkpoint digest, RoPE rule and all layer specs.

    Block size, TP and dtype are not part of it.
    """
    specs = [asdict(layer) for layer in layers]
    for spec in specs:
        if spec["state"] is None:
            del spec["state"]
        else:
            del spec["state"]["segments"]
    body = json.dumps([PROTOCOL_VERSION, model_digest, rope, specs], sort_keys=True)
    return hashlib.sha256(body.encode()).hexdigest()
