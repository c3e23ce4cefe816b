"""Where the tokens of a sequence lie in a paged arena, and how they become wire bytes and back.

One layer of an arena is, block after block, `[2, block_size, kv_heads, head_dim]`: all K rows of
the block, then all its V rows (`[block_size, kv_heads, k_dim]` alone for MLA). The wire wants K
rows, then V rows of a token range, token-major. Both are row-major in the token, so any two block
sizes interoperate by a list of byte ranges alone.

    block b:  | K row 0 .. K row B-1 | V row 0 .. V row B-1 |     row = kv_heads * dim * item bytes
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from baton.errors import ConfigError
from baton.kv_spec import DTYPE_BYTES, LayerSpec, PoolFormat


class Arena(Protocol):
    """What is needed of baton.engine.kv_cache.KVArena.

    layer(l): K [num_blocks, block_size, kv_heads, k_dim] and V [.., v_dim] of the pool's dtype;
    layer_buffer(l): all bytes of layer l, writable (CPU arenas only).
    """

    @property
    def layers(self) -> tuple[LayerSpec, ...]: ...
    @property
    def block_size(self) -> int: ...
    @property
    def dtype(self) -> str: ...
    @property
    def device(self) -> torch.device: ...

    def layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]: ...
    def layer_buffer(self, layer: int) -> memoryview: ...


def byte_ranges(
    spec: LayerSpec, pool: PoolFormat, blocks: Sequence[int], start: int, end: int
) -> list[tuple[int, int]]:
    """(offset, length) in the layer's bytes of K rows, then V rows of tokens [start, end), in wire
    order; neighbouring rows are merged (within a block, and across adjacent blocks for MLA)."""
    item = DTYPE_BYTES[pool.dtype]
    size = pool.block_size
    block_bytes = size * spec.token_bytes(pool.dtype)
    v_offset = size * spec.kv_heads * spec.k_dim * item
    ranges: list[tuple[int, int]] = []
    for base, dim in ((0, spec.k_dim), (v_offset, spec.v_dim)):
        row = spec.kv_heads * dim * item
        if row == 0:
            continue
        token = start
        while token < end:
            upto = min(end, (token // size + 1) * size)
            offset = blocks[token // size] * block_bytes + base + (token % size) * row
            length = (upto - token) * row
            if ranges and sum(ranges[-1]) == offset:
                ranges[-1] = (ranges[-1][0], ranges[-1][1] + length)
            else:
                ranges.append((offset, length))
            token = upto
    return ranges


class ArenaMemory:
    """base.KVMemory over a KV arena: views into it on CPU, host copies for any other device."""

    def __init__(self, arena: Arena, staged: bool | None = None) -> None:
        """`staged`: copy through host memory; None = unless the arena lies in it itself.

        Raises ConfigError for int8 KV: the frames carry no scales yet.
        """
        if arena.dtype == "int8":
            raise ConfigError(
                "KV transfer cannot carry the scales of int8 KV: prefill and decode nodes need "
                "--kv-cache-dtype auto or fp8",
                field="kv_cache_dtype",
            )
        self.layers = arena.layers
        self.format = PoolFormat(arena.block_size, arena.dtype)
        self._arena = arena
        self._staged = arena.device.type != "cpu" if staged is None else staged
        self._buffers = (
            [arena.layer_buffer(layer).cast("B") for layer in range(len(arena.layers))]
            if not self._staged
            else []
        )

    def read(self, layer: int, blocks: Sequence[int], start: int, end: int) -> Sequence[memoryview]:
        """K, then V fragments of tokens [start, end). CPU: no copy, valid while pinned."""
        if self._staged:
            return self._read_device(layer, blocks, start, end)
        buffer = self._buffers[layer]
        ranges = byte_ranges(self.layers[layer], self.format, blocks, start, end)
        return [buffer[offset : offset + length] for offset, length in ranges]

    def write(
        self, layer: int, blocks: Sequence[int], start: int, end: int, payload: memoryview
    ) -> None:
        """Put `payload` (as `read` gives it) into tokens [start, end)."""
        if self._staged:
            self._write_device(layer, blocks, start, end, payload)
            return
        buffer = self._buffers[layer]
        taken = 0
        for offset, length in byte_ranges(self.layers[layer], self.format, blocks, start, end):
            buffer[offset : offset + length] = payload[taken : taken + length]
            taken += length

    # ---- devices: staged through host memory ---------------------------------------------------
    def _read_device(
        self, layer: int, blocks: Sequence[int], start: int, end: int
    ) -> list[memoryview]:
        block, row = self._slots(blocks, start, end)
        # The engine publishes what it has enqueued on the default stream; this copy is enqueued
        # behind it on the same stream and waits for itself.
        tensors = self._arena.layer(layer)
        return [
            memoryview(t[block, row].contiguous().view(torch.uint8).cpu().numpy().tobytes())
            for t in tensors
            if t.numel()
        ]

    def _write_device(
        self, layer: int, blocks: Sequence[int], start: int, end: int, payload: memoryview
    ) -> None:
        block, row = self._slots(blocks, start, end)
        taken = 0
        for tensor in self._arena.layer(layer):
            if tensor.numel() == 0:
                continue
            shape = (end - start, *tensor.shape[2:])
            length = shape[0] * shape[1] * shape[2] * tensor.element_size()
            # bytearray: torch wants writable memory, a frame is not
            host = torch.frombuffer(bytearray(payload[taken : taken + length]), dtype=torch.uint8)
            tensor[block, row] = host.view(tensor.dtype).view(shape).to(tensor.device)
            taken += length
        if self._arena.device.type == "cuda":
            torch.cuda.current_stream(self._arena.device).synchronize()

    def _slots(
        self, blocks: Sequence[int], start: int, end: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Block and row index [end - start] of each token, on the arena's device."""
        size = self.format.block_size
        tokens = torch.arange(start, end)
        block = torch.tensor(blocks, dtype=torch.long)[tokens // size]
        return block.to(self._arena.device), (tokens % size).to(self._arena.device)
