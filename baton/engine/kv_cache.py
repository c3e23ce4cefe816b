"""KVArena: the memory of all KV blocks, one allocation.

Layout of one layer, the same as on the wire (token-major), as long as k_dim == v_dim:
    [num_blocks, 2, block_size, kv_heads, head_dim]
in general a block is its K part [block_size, kv_heads, k_dim] followed by its V part
[block_size, kv_heads, v_dim]; MLA has no V part. Layers follow each other, each on a 64-byte
boundary. int8 KV has a scale per token and head, float32, behind all layers:
    [num_blocks, 2, block_size, kv_heads]        (MLA: 1 instead of 2)
Not here: who owns which block (block_pool.py), reading and writing for transfers
(kv_transfer/layout.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import torch

from baton.errors import ConfigError, InternalError
from baton.kv_spec import SCALE_BYTES, LayerSpec

ALIGNMENT: Final = 64  # bytes: a cache line, and the widest vector load

_TORCH_DTYPES: Final = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
}


# Bytes -> zeroed uint8 [bytes] on the pool's device, such as shared memory.
MakeMemory: TypeAlias = Callable[[int], torch.Tensor]


@dataclass(frozen=True, slots=True)
class HostBlocks:
    """Copies of some blocks in host memory: per layer (and per layer's scales) [blocks, words],
    of whatever integer type the bytes divide into."""

    layers: tuple[torch.Tensor, ...]

    @property
    def num_bytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers)


class KVArena:
    """KV of `num_blocks` blocks of `block_size` tokens for every layer, zeroed, on one device.

    Zeroed because a masked score still multiplies the value behind it: 0 * NaN would poison a row.
    """

    def __init__(
        self,
        layers: tuple[LayerSpec, ...],
        num_blocks: int,
        block_size: int,
        dtype: str,
        device: str | torch.device = "cpu",
        memory: MakeMemory | None = None,
    ) -> None:
        """`memory`: where the pool shall lie, if not in memory of its own."""
        if dtype not in _TORCH_DTYPES:
            raise ConfigError(f"KV cannot be stored as {dtype!r}", field="dtype")
        self.layers = layers
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.dtype = dtype
        self.device = torch.device(device)
        self._offsets: list[int] = []  # bytes, start of each layer
        total = 0
        for layer in range(len(layers)):
            self._offsets.append(total)
            size = num_blocks * self.block_bytes(layer)
            total += -(-size // ALIGNMENT) * ALIGNMENT
        scale_offsets: list[int] = []
        for layer in range(len(layers) if dtype == "int8" else 0):
            scale_offsets.append(total)
            size = math.prod(self._scale_shape(layer)) * SCALE_BYTES
            total += -(-size // ALIGNMENT) * ALIGNMENT
        self.num_bytes = total
        self._memory = (
            torch.zeros(total, dtype=torch.uint8, device=self.device)
            if memory is None
            else memory(total)
        )
        self._scales = [
            self._memory[start : start + math.prod(self._scale_shape(layer)) * SCALE_BYTES]
            .view(torch.float32)
            .view(self._scale_shape(layer))
            for layer, start in enumerate(scale_offsets)
        ]

    def block_bytes(self, layer: int) -> int:
        """Bytes of one block of one layer, K and V."""
        return self.block_size * self.layers[layer].token_bytes(self.dtype)

    def layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views k, v, each [num_blocks, block_size, kv_heads, k_dim or v_dim].

        Both share the arena's memory; strided over blocks, contiguous within one.
        """
        spec = self.layers[layer]
        flat = self._layer_bytes(layer).view(_TORCH_DTYPES[self.dtype])
        k_size = self.block_size * spec.kv_heads * spec.k_dim
        v_size = self.block_size * spec.kv_heads * spec.v_dim
        blocks = flat.view(self.num_blocks, k_size + v_size)
        shape = (self.num_blocks, self.block_size, spec.kv_heads)
        k = blocks[:, :k_size].unflatten(1, (*shape[1:], spec.k_dim))
        if v_size == 0:
            return k, flat.new_empty((*shape, 0))
        return k, blocks[:, k_size:].unflatten(1, (*shape[1:], spec.v_dim))

    def scales(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """int8 KV: views of K's and V's scales, each [num_blocks, block_size, kv_heads] float32.

        Raises InternalError for any other dtype. MLA has no V: its scales are K's.
        """
        if not self._scales:
            raise InternalError(f"KV stored as {self.dtype} has no scales")
        scales = self._scales[layer]
        return scales[:, 0], scales[:, -1]

    def layer_buffer(self, layer: int) -> memoryview:
        """The layer's bytes, block after block, writable. Raises InternalError off the CPU."""
        if self.device.type != "cpu":
            raise InternalError("only a pool in host memory has a buffer; stage a device pool")
        return self._layer_bytes(layer).numpy().data

    def copy_block(self, source: int, target: int) -> None:
        """Copy one block's KV in every layer: what follows BlockPool.copy_on_write()."""
        for blocks in self._block_rows():
            blocks[target] = blocks[source]

    def read_blocks(self, blocks: Sequence[int]) -> HostBlocks:
        """Copies of `blocks` in host memory; finished when this returns."""
        rows = torch.tensor(blocks, device=self.device)
        return HostBlocks(tuple(layer.index_select(0, rows).cpu() for layer in self._block_rows()))

    def write_blocks(self, host: HostBlocks, rows: Sequence[int], blocks: Sequence[int]) -> None:
        """Copy rows of `host` back into `blocks`; finished when this returns."""
        source, target = torch.tensor(rows), torch.tensor(blocks, device=self.device)
        for layer, kept in zip(self._block_rows(), host.layers, strict=True):
            layer.index_copy_(0, target, kept.index_select(0, source).to(self.device))
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _block_rows(self) -> list[torch.Tensor]:
        """Everything that belongs to a block: [num_blocks, words] per layer, then its scales."""
        rows = [
            self._layer_bytes(layer).view(self.num_blocks, self.block_bytes(layer))
            for layer in range(len(self.layers))
        ]
        rows += [scales.flatten(1).view(torch.uint8) for scales in self._scales]
        return [_in_words(row) for row in rows]

    def _scale_shape(self, layer: int) -> tuple[int, int, int, int]:
        spec = self.layers[layer]
        return self.num_blocks, 2 if spec.v_dim else 1, self.block_size, spec.kv_heads

    def _layer_bytes(self, layer: int) -> torch.Tensor:
        start = self._offsets[layer]
        return self._memory[start : start + self.num_blocks * self.block_bytes(layer)]


def _in_words(rows: torch.Tensor) -> torch.Tensor:
    """[n, bytes] uint8 as [n, bytes / 8] int64 where that divides: torch copies rows of bytes one
    byte at a time (docs/log.md)."""
    divides = rows.shape[1] % 8 == 0 and rows.storage_offset() % 8 == 0
    return rows.view(torch.int64) if divides else rows


def bytes_per_block(layers: tuple[LayerSpec, ...], block_size: int, dtype: str) -> int:
    """Bytes of one block over all layers, scales included."""
    return block_size * sum(layer.token_bytes(dtype) + layer.scale_bytes(dtype) for layer in layers)
