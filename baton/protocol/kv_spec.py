"""What a model's attention layers store per token,
and the fingerprint two nodes must share to exchange it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Final, Literal, TypeAlias

PROTOCOL_VERSION: Final = 1
DTYPE_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "fp8": 1}
SCALE_BYTES: Final = 4  # int8 KV: float32, per token and head, K's and V's apart


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """KV of one attention layer of the whole model, before tensor parallelism.

    `window` 0 = unlimited.
    """

    kv_heads: int
    k_dim: int
    v_dim: int
    window: int = 0
    kind: Literal["full", "sliding", "mla"] = "full"

    def token_bytes(self, dtype: str) -> int:
        """Bytes of one token's K and V, without scales."""
        return self.kv_heads * (self.k_dim + self.v_dim) * DTYPE_BYTES[dtype]

    def scale_bytes(self, dtype: str) -> int:
        """Bytes of one token's scales: int8 KV alone has any."""
        parts = 2 if self.v_dim else 1
        return parts * self.kv_heads * SCALE_BYTES if dtype == "int8" else 0


@dataclass(frozen=True, slots=True)
class PoolFormat:
    """How one node stores KV; exchanged at the handshake, outside the fingerprint."""

    block_size: int
    dtype: str
    tp_size: int = 1
    tp_rank: int = 0
    codecs: tuple[str, ...] = ("raw",)


@dataclass(frozen=True, slots=True)
class HeldBlocks:
    """A sequence's blocks in one layer group: its block `first + i` lies in pool block ids[i].

    Those before `first` are a hole: a sliding window has passed them, or will never see them.
    """

    ids: Sequence[int]
    first: int = 0

    @property
    def end(self) -> int:
        """Blocks of the sequence covered, the hole included."""
        return self.first + len(self.ids)


BlockLists: TypeAlias = tuple[HeldBlocks, ...]  # one per layer group of the pool


def first_visible(window: int, num_tokens: int) -> int:
    """The first of `num_tokens` known tokens whose KV a layer with `window` (0 = unlimited) still
    needs; conservative by one: the last known token may be computed again."""
    return max(0, num_tokens - window) if window else 0


def layout_fingerprint(model_digest: str, rope: str, layers: tuple[LayerSpec, ...]) -> str:
    """Hex SHA-256 over checkpoint digest, RoPE rule and all layer specs.

    Block size, TP and dtype stay outside.
    """
    body = json.dumps(
        [PROTOCOL_VERSION, model_digest, rope, [asdict(layer) for layer in layers]], sort_keys=True
    )
    return hashlib.sha256(body.encode()).hexdigest()
