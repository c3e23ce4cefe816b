"""One layer's keys and values as the pool stores them: written rounded, gathered widened.

    as computed   in the model's dtype
    int8          a float32 scale per token and head, K's and V's apart, behind its page's slots
    fp8           float8_e4m3fn, clamped to +-448, no scale; its casts are slow on a CPU
                  (docs/quantization.md has the numbers)

Attention reads what is stored, also within the prefill that wrote it: a prompt computed here and
one whose KV was fetched give the same numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

import torch
from torch import Tensor

from baton.engine.state.attention import KVViews

FP8: Final = torch.float8_e4m3fn
FP8_MAX: Final = 448.0


class StoredRows(Protocol):
    """K (or V) of one layer: numbers per slot and head, stored in some precision."""

    @property
    def dim(self) -> int:
        """Numbers per head; 0 for the V of MLA."""
        ...

    def write(self, x: Tensor, block: Tensor, offset: Tensor) -> None:
        """Store x [T, kv_heads, dim] at slots (block [T], offset [T]); mutates the pool."""
        ...

    def gather(self, blocks: Tensor, dtype: torch.dtype) -> Tensor:
        """blocks [n] -> [n * block_size, kv_heads, dim] in `dtype`, owned by the caller."""
        ...


@dataclass(frozen=True, slots=True)
class ExactRows:
    """`rows` [num_blocks, block_size, kv_heads, dim] in the model's dtype."""

    rows: Tensor

    @property
    def dim(self) -> int:
        """See StoredRows.dim."""
        return self.rows.shape[3]

    def write(self, x: Tensor, block: Tensor, offset: Tensor) -> None:
        """See StoredRows.write."""
        self.rows.index_put_((block, offset), x)

    def gather(self, blocks: Tensor, dtype: torch.dtype) -> Tensor:
        """See StoredRows.gather."""
        return self.rows.index_select(0, blocks).flatten(0, 1).to(dtype)


@dataclass(frozen=True, slots=True)
class Int8Rows:
    """`rows` int8 [num_blocks, block_size, kv_heads, dim], `scales` float32 [..., kv_heads]."""

    rows: Tensor
    scales: Tensor

    @property
    def dim(self) -> int:
        """See StoredRows.dim."""
        return self.rows.shape[3]

    def write(self, x: Tensor, block: Tensor, offset: Tensor) -> None:
        """See StoredRows.write."""
        wide = x.float()
        scales = wide.abs().amax(-1).clamp_(min=1e-12) / 127
        self.rows.index_put_((block, offset), (wide / scales[..., None]).round_().to(torch.int8))
        self.scales.index_put_((block, offset), scales)

    def gather(self, blocks: Tensor, dtype: torch.dtype) -> Tensor:
        """See StoredRows.gather."""
        scales = self.scales.index_select(0, blocks)[..., None]
        return (self.rows.index_select(0, blocks) * scales).flatten(0, 1).to(dtype)


@dataclass(frozen=True, slots=True)
class Fp8Rows:
    """`rows` [num_blocks, block_size, kv_heads, dim]: bytes (uint8) of float8_e4m3fn numbers."""

    rows: Tensor

    @property
    def dim(self) -> int:
        """See StoredRows.dim."""
        return self.rows.shape[3]

    def write(self, x: Tensor, block: Tensor, offset: Tensor) -> None:
        """See StoredRows.write."""
        rounded = x.clamp(-FP8_MAX, FP8_MAX).to(FP8)  # the cast alone makes NaN of more
        self.rows.index_put_((block, offset), rounded.view(torch.uint8))

    def gather(self, blocks: Tensor, dtype: torch.dtype) -> Tensor:
        """See StoredRows.gather."""
        return self.rows.index_select(0, blocks).view(FP8).flatten(0, 1).to(dtype)


@dataclass(frozen=True, slots=True)
class KVStore:
    """One layer of the pool. MLA: one latent per token is K; there is no V."""

    block_size: int
    kv_heads: int
    keys: StoredRows
    values: StoredRows

    def write(self, k: Tensor, v: Tensor, slots: Tensor) -> None:
        """Store k [T, kv_heads, k_dim] and v [T, kv_heads, v_dim] at flat `slots` [T]."""
        block, offset = slots // self.block_size, slots % self.block_size
        self.keys.write(k, block, offset)
        if self.values.dim:
            self.values.write(v, block, offset)


def layer_store(pool: KVViews, layer: int) -> KVStore:
    """How `layer` of the pool is written and read, by the dtype of its views."""
    keys, values = pool.layer(layer)
    size, heads = keys.shape[1], keys.shape[2]
    if keys.dtype == torch.int8:
        k_scales, v_scales = pool.scales(layer)
        return KVStore(size, heads, Int8Rows(keys, k_scales), Int8Rows(values, v_scales))
    if keys.dtype == FP8:
        k_bytes, v_bytes = keys.view(torch.uint8), values.view(torch.uint8)
        return KVStore(size, heads, Fp8Rows(k_bytes), Fp8Rows(v_bytes))
    return KVStore(size, heads, ExactRows(keys), ExactRows(values))
