"""Where the tokens of a sequence lie in a paged arena, and how they become wire bytes and back.

A block (a page) of an arena holds a slot for each layer of its layer group. A slot is
`[2, block_size, kv_heads, head_dim]`: all K rows, then all V rows (`[block_size, kv_heads, k_dim]`
alone for MLA). The wire wants K rows, then V rows of a token range, token-major. Both are row-major
in the token, so any two block sizes interoperate by a list of byte ranges alone.

    slot:  | K row 0 .. K row B-1 | V row 0 .. V row B-1 |     row = kv_heads * dim * item bytes
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from baton.errors import ConfigError
from baton.kv_spec import DTYPE_BYTES, BlockLists, HeldBlocks, LayerSpec, PoolFormat


class Arena(Protocol):
    """What is needed of baton.engine.kv_cache.KVArena.

    layer(l): K [num_blocks, block_size, kv_heads, k_dim] and V [.., v_dim] of the pool's dtype;
    group_of[l]: which of a sequence's block lists layer l reads; buffer(): all blocks' bytes,
    writable (CPU arenas only), where layer l of block b begins at b * page_bytes + slot_offset(l).
    """

    page_bytes: int

    @property
    def layers(self) -> tuple[LayerSpec, ...]: ...
    @property
    def block_size(self) -> int: ...
    @property
    def dtype(self) -> str: ...
    @property
    def device(self) -> torch.device: ...

    @property
    def group_of(self) -> tuple[int, ...]: ...

    def layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]: ...
    def slot_offset(self, layer: int) -> int: ...
    def buffer(self) -> memoryview: ...


@dataclass(frozen=True, slots=True)
class Slot:
    """Where a layer lies in the arena's bytes: at `offset` of each page of `page_bytes`."""

    page_bytes: int
    offset: int


def byte_ranges(
    spec: LayerSpec, pool: PoolFormat, slot: Slot, held: HeldBlocks, tokens: tuple[int, int]
) -> list[tuple[int, int]]:
    """(offset, length) in the arena's bytes of K rows, then V rows of `tokens` [start, end), all
    held, in wire order; neighbouring rows are merged (within a block, and across adjacent blocks
    for a lone layer of MLA)."""
    start, end = tokens
    item = DTYPE_BYTES[pool.dtype]
    size = pool.block_size
    v_offset = size * spec.kv_heads * spec.k_dim * item
    ranges: list[tuple[int, int]] = []
    for base, dim in ((0, spec.k_dim), (v_offset, spec.v_dim)):
        row = spec.kv_heads * dim * item
        if row == 0:
            continue
        token = start
        while token < end:
            upto = min(end, (token // size + 1) * size)
            page = held.ids[token // size - held.first] * slot.page_bytes
            offset = page + slot.offset + base + (token % size) * row
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
        self._buffer = memoryview(b"") if self._staged else arena.buffer().cast("B")

    def read(self, layer: int, blocks: BlockLists, start: int, end: int) -> Sequence[memoryview]:
        """K, then V fragments of tokens [start, end). CPU: no copy, valid while pinned."""
        held = blocks[self._arena.group_of[layer]]
        first = min(end, max(start, held.first * self.format.block_size))
        fragments = self._read_held(layer, held, first, end) if first < end else []
        if first == start:
            return fragments
        # Nobody will look at a hole, but a frame has bytes for each of its tokens.
        k_left, _ = self._part_bytes(layer, end - first)
        k_count = 0
        while k_left > 0:
            k_left -= fragments[k_count].nbytes
            k_count += 1
        k_hole, v_hole = (
            memoryview(bytes(size)) for size in self._part_bytes(layer, first - start)
        )
        return [k_hole, *fragments[:k_count], v_hole, *fragments[k_count:]]

    def write(
        self, layer: int, blocks: BlockLists, start: int, end: int, payload: memoryview
    ) -> None:
        """Put `payload` (as `read` gives it) into tokens [start, end); drops those not held."""
        held = blocks[self._arena.group_of[layer]]
        first = min(end, max(start, held.first * self.format.block_size))
        if first > start:
            k_bytes, v_bytes = self._part_bytes(layer, end - start)
            k_hole, v_hole = self._part_bytes(layer, first - start)
            v = payload[k_bytes : k_bytes + v_bytes]
            payload = memoryview(bytes(payload[k_hole:k_bytes]) + bytes(v[v_hole:]))
        if first < end:
            self._write_held(layer, held, first, end, payload)

    def _part_bytes(self, layer: int, num_tokens: int) -> tuple[int, int]:
        """Bytes of K and of V of so many tokens."""
        spec = self.layers[layer]
        row = num_tokens * spec.kv_heads * DTYPE_BYTES[self.format.dtype]
        return row * spec.k_dim, row * spec.v_dim

    def _ranges(self, layer: int, held: HeldBlocks, start: int, end: int) -> list[tuple[int, int]]:
        slot = Slot(self._arena.page_bytes, self._arena.slot_offset(layer))
        return byte_ranges(self.layers[layer], self.format, slot, held, (start, end))

    def _read_held(
        self, layer: int, held: HeldBlocks, start: int, end: int
    ) -> Sequence[memoryview]:
        if self._staged:
            return self._read_device(layer, held, start, end)
        ranges = self._ranges(layer, held, start, end)
        return [self._buffer[offset : offset + length] for offset, length in ranges]

    def _write_held(
        self, layer: int, held: HeldBlocks, start: int, end: int, payload: memoryview
    ) -> None:
        if self._staged:
            self._write_device(layer, held, start, end, payload)
            return
        taken = 0
        for offset, length in self._ranges(layer, held, start, end):
            self._buffer[offset : offset + length] = payload[taken : taken + length]
            taken += length

    # ---- devices: staged through host memory ---------------------------------------------------
    def _read_device(self, layer: int, held: HeldBlocks, start: int, end: int) -> list[memoryview]:
        block, row = self._slots(held, start, end)
        # The engine publishes what it has enqueued on the default stream; this copy is enqueued
        # behind it on the same stream and waits for itself.
        tensors = self._arena.layer(layer)
        return [
            memoryview(t[block, row].contiguous().view(torch.uint8).cpu().numpy().tobytes())
            for t in tensors
            if t.numel()
        ]

    def _write_device(
        self, layer: int, held: HeldBlocks, start: int, end: int, payload: memoryview
    ) -> None:
        block, row = self._slots(held, start, end)
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

    def _slots(self, held: HeldBlocks, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Block and row index [end - start] of each token, on the arena's device."""
        size = self.format.block_size
        tokens = torch.arange(start, end)
        block = torch.tensor(held.ids, dtype=torch.long)[tokens // size - held.first]
        return block.to(self._arena.device), (tokens % size).to(self._arena.device)
