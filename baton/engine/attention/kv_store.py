"""One layer's keys and values as the pool stores them.

Writing rounds them to the pool's dtype; gathering widens them again.

    as computed   in the model's dtype
    int8          a float32 scale per token and head, for K and V apart, behind the page's slots
    fp8           float8_e4m3fn, clamped to +-448, no scale; its casts are slow on a CPU
                  (docs/quantization.md has the numbers)

Attention reads what is stored, even in the prefill that wrote it. So a prompt that was computed
here and a prompt whose KV was fetched give the same numbers.
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
    """K (or V) of one layer: a vector per slot and head, stored in some precision."""

    @property
    def dim(self) -> int:
        """Return the numbers per head; 0 for the V of MLA without index keys."""
        ...

    def write(self, x: Tensor, block: Tensor, offset: Tensor) -> None:
        """Store x [T, kv_heads, dim] in the pool at slots (block [T], offset [T])."""
        ...

    def gather(self, blocks: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a copy [n * block_size, kv_heads, dim] in `dtype` of the blocks [n]."""
        ...

    def take(self, block: Tensor, offset: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a copy [n, kv_heads, dim] in `dtype` of the slots (block [n], offset [n])."""
        ...


@dataclass(frozen=True, slots=True)
class ExactRows:
    """Rows stored as computed: [num_blocks, block_size, kv_heads, dim] in the model's dtype."""

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

    def take(self, block: Tensor, offset: Tensor, dtype: torch.dtype) -> Tensor:
        """See StoredRows.take."""
        return self.rows[block, offset].to(dtype)


@dataclass(frozen=True, slots=True)
class Int8Rows:
    """Rows stored as int8.

    `rows` is int8 [num_blocks, block_size, kv_heads, dim], `scales` is float32 [..., kv_heads].
    """

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

    def take(self, block: Tensor, offset: Tensor, dtype: torch.dtype) -> Tensor:
        """See StoredRows.take."""
        return (self.rows[block, offset] * self.scales[block, offset][..., None]).to(dtype)


@dataclass(frozen=True, slots=True)
class Fp8Rows:
    """Rows stored as fp8: bytes (uint8) of float8_e4m3fn, [num_blocks, block_size, kv_heads,
    dim].
    """

    rows: Tensor

    @property
    def dim(self) -> int:
        """See StoredRows.dim."""
        return self.rows.shape[3]

    def write(self, x: Tensor, block: Tensor, offset: Tensor) -> None:
        """See StoredRows.write."""
        rounded = x.clamp(-FP8_MAX, FP8_MAX).to(FP8)  # without clamp, larger numbers become NaN
        self.rows.index_put_((block, offset), rounded.view(torch.uint8))

    def gather(self, blocks: Tensor, dtype: torch.dtype) -> Tensor:
        """See StoredRows.gather."""
        return self.rows.index_select(0, blocks).view(FP8).flatten(0, 1).to(dtype)

    def take(self, block: Tensor, offset: Tensor, dtype: torch.dtype) -> Tensor:
        """See StoredRows.take."""
        return self.rows[block, offset].view(FP8).to(dtype)


@dataclass(frozen=True, slots=True)
class KVStore:
    """One layer of the pool. With MLA K holds one latent per token; V holds index keys, or there is
    none."""

    block_size: int
    kv_heads: int
    keys: StoredRows
    values: StoredRows

    def write(self, k: Tensor, v: Tensor, slots: Tensor) -> None:
        """Store k [T, kv_heads, k_dim] and v [T, kv_heads, v_dim or 0] at flat `slots` [T]."""
        block, offset = slots // self.block_size, slots % self.block_size
        self.keys.write(k, block, offset)
        if v.shape[2]:
            self.values.write(v, block, offset)


def layer_store(pool: KVViews, layer: int) -> KVStore:
    """Return a store for `layer` of the pool that fits the dtype of its views."""
    keys, values = pool.layer(layer)
    size, heads = keys.shape[1], keys.shape[2]
    if keys.dtype == torch.int8:
        k_scales, v_scales = pool.scales(layer)
        return KVStore(size, heads, Int8Rows(keys, k_scales), Int8Rows(values, v_scales))
    if keys.dtype == FP8:
        k_bytes, v_bytes = keys.view(torch.uint8), values.view(torch.uint8)
        return KVStore(size, heads, Fp8Rows(k_bytes), Fp8Rows(v_bytes))
    return KVStore(size, heads, ExactRows(keys), ExactRows(values))
