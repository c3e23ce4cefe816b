"""Where the tokens of a sequence lie in a paged arena, and how they become wire bytes and back.

A block (a page) of an arena holds a slot for each layer of its layer group. A slot is
`[2, block_size, kv_heads, head_dim]`: all K rows, then all V rows (`[block_size, kv_heads, k_dim]`
alone for MLA). The wire carries the K rows, then the V rows of a token range, token-major. Both are
row-major in the token, so any two block sizes interoperate by a list of byte ranges alone.
    slot:  | K row 0 .. K row B-1 | V row 0 .. V row B-1 |     row = kv_heads * dim * item bytes

Whole rows are read as views. A slice of heads (for a peer of another tensor-parallel size) is
packed into a host copy, as its pieces are too small to send one by one. int8 scales lie behind the
slots of a page.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import torch

from baton.engine.memory.state_arena import StateArena
from baton.protocol.errors import ConfigError, InternalError, KVCorrupt
from baton.protocol.kv_spec import DTYPE_BYTES, HeldBlocks, LayerSpec, PoolFormat
from kv_transfer.pool.codec import Rows, bytes_of, unpack
from kv_transfer.protocol.base import Blocks, Payload
from kv_transfer.protocol.frames import Buffer
from kv_transfer.protocol.messages import INT8, RAW
from kv_transfer.protocol.shares import heads_of, rows_bytes

HOLE: Final = 0xFFFF_FFFF  # a block id that no pool has


class Arena(Protocol):
    """What this module needs of baton.engine.memory.kv_cache.KVArena.

    Its layers are those of this rank: their kv_heads count the heads that lie here.

    layer(l): K [num_blocks, block_size, kv_heads, k_dim] and V [.., v_dim] of the pool's dtype;
    longer where other pools' blocks can be read behind the own ones.
    scales(l): int8 KV's [num_blocks, block_size, kv_heads], K's and V's.
    group_of[l]: which of a sequence's block lists layer l reads.
    states: the slots of recurrent states, None if no layer keeps one.
    buffer(): all pages' bytes, writable (CPU arenas only); layer l of block b begins at b *
    page_bytes + slot_offset(l).
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

    @property
    def states(self) -> StateArena | None: ...

    def layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]: ...
    def scales(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]: ...
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
    """Return (offset, length) in the arena's bytes of the K rows, then V rows of `tokens` [start,
    end).

    All these tokens must be held. The ranges are in wire order. Neighbouring rows are merged:
    within a block, and across adjacent blocks for a lone layer of MLA. `spec` is the pool's own:
    its kv_heads count the heads that lie there.
    """
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
            page = held.ids[_place(held, token // size)] * slot.page_bytes
            offset = page + slot.offset + base + (token % size) * row
            length = (upto - token) * row
            if ranges and sum(ranges[-1]) == offset:
                ranges[-1] = (ranges[-1][0], ranges[-1][1] + length)
            else:
                ranges.append((offset, length))
            token = upto
    return ranges


def _place(held: HeldBlocks, index: int) -> int:
    """Return the index of the sequence's block `index` among the held ones. Raises InternalError if
    it is no longer held.
    """
    if index < held.first:
        raise InternalError(f"block {index} of a sequence is not held any more")
    return index - held.first


class ArenaMemory:
    """Implements base.KVMemory over a KV arena: views into it on CPU, host copies for any other
    device.
    """

    def __init__(
        self,
        arena: Arena,
        staged: bool | None = None,
        *,
        layers: tuple[LayerSpec, ...] | None = None,
        tp: tuple[int, int] = (1, 0),
        windowed: bool = False,
    ) -> None:
        """`staged`: copy through host memory; None = only if the arena is not in host memory.
        `layers` (of the whole model) and `tp` (size, rank): given where the arena holds a slice of
        the heads. `windowed`: the pool keeps of a sliding-window layer only what later tokens see.
        Raises ConfigError if the arena does not hold this rank's heads.
        """
        self.layers = arena.layers if layers is None else layers
        self.format = PoolFormat(arena.block_size, arena.dtype, *tp, codecs=(RAW, INT8))
        self.windowed = windowed
        self._arena = arena
        self._heads = [heads_of(spec.kv_heads, self.format) for spec in self.layers]
        if [len(heads) for heads in self._heads] != [spec.kv_heads for spec in arena.layers]:
            raise ConfigError(f"the KV pool does not hold the heads of rank {tp[1]} of {tp[0]}")
        self._staged = arena.device.type != "cpu" if staged is None else staged
        self._buffer = memoryview(b"") if self._staged else arena.buffer().cast("B")

    def heads(self, layer: int) -> range:
        """Return the KV heads that lie here, as indices of the whole model."""
        return self._heads[layer]

    def group(self, layer: int) -> int:
        """Return which of a sequence's block lists the layer reads."""
        return self._arena.group_of[layer]

    def tables(self, blocks: Blocks) -> tuple[tuple[int, ...], ...]:
        """Return one block table per layer group, with HOLE for each missing block.

        So the other blocks keep their places. Nobody reads a hole, and a peer that tries is
        refused.
        """
        return tuple((*(HOLE,) * held.first, *held.ids) for held in blocks)

    def written(self, layer: int, blocks: Blocks, upto: int) -> None:
        """Do nothing: memory that the host has written needs no mark."""

    def landed(self) -> None:
        """Do nothing: what the host has written is there."""

    def read(
        self, layer: int, blocks: Blocks, start: int, end: int, heads: range | None = None
    ) -> Sequence[memoryview]:
        """Return fragments of tokens [start, end) in Payload's order.

        Whole rows on the CPU are views without a copy, valid while the blocks are pinned.
        """
        heads = self._heads[layer] if heads is None else heads
        views = self._row_views(layer, blocks, start, end, heads)
        if views is not None and self.format.dtype != INT8:
            return views
        block, row = self.slots(layer, blocks, start, end)
        parts = self.parts(layer, heads)
        if views is not None:
            parts = parts[-len(parts) // 2 :]  # the scales
        return [*(views or ()), *(bytes_of(part[block, row].cpu()) for part in parts)]

    def views(
        self, layer: int, blocks: Blocks, start: int, end: int, heads: range
    ) -> Sequence[memoryview] | None:
        """Return views of whole rows of an exact pool in main memory; None otherwise."""
        if self.format.dtype == INT8:
            return None  # an int8 pool's scales must be gathered
        return self._row_views(layer, blocks, start, end, heads)

    def write(self, layer: int, blocks: Blocks, start: int, end: int, payload: Payload) -> None:
        """Write `payload`, which may be of any dtype, as tokens [start, end)."""
        heads = self._heads[layer] if payload.heads is None else payload.heads
        spec = self.layers[layer]
        wanted = (end - start) * rows_bytes(spec, len(heads), payload.dtype)
        if len(payload.data) != wanted:
            raise KVCorrupt(f"payload of {len(payload.data)} bytes, not {wanted}")
        views = self.views(layer, blocks, start, end, heads)
        if views is not None and payload.dtype == self.format.dtype:
            taken = 0
            for view in views:
                view[:] = payload.data[taken : taken + len(view)]
                taken += len(view)
            return
        rows = unpack(spec, Payload(payload.data, payload.dtype, heads))
        self._scatter(layer, blocks, (start, end), heads, [r.to(self.format.dtype) for r in rows])

    # ---- recurrent state ------------------------------------------------------------------------
    def read_state(self, layer: int, blocks: Blocks, start: int, end: int) -> Sequence[memoryview]:
        """See KVMemory. On the CPU the fragments are views, valid while the slot is pinned."""
        parts = self._state(layer, blocks, start, end)
        return [part.cpu().numpy().data for part in parts]

    def write_state(self, layer: int, blocks: Blocks, start: int, data: Buffer) -> None:
        """See KVMemory. Raises KVCorrupt for bytes that the layer's state does not have."""
        taken = 0
        for part in self._state(layer, blocks, start, start + len(data)):
            # bytearray: torch wants writable memory
            piece = bytearray(memoryview(data)[taken : taken + part.numel()])
            part.copy_(torch.frombuffer(piece, dtype=torch.uint8))
            taken += part.numel()
        if self._arena.device.type == "cuda":
            torch.cuda.current_stream(self._arena.device).synchronize()

    def _state(self, layer: int, blocks: Blocks, start: int, end: int) -> list[torch.Tensor]:
        """Return views of bytes [start, end) of a layer's state, uint8, none of them empty. Raises
        InternalError where only a part of the state lies, that of one tensor-parallel rank."""
        states, slot = self._arena.states, blocks[0].state_slot
        if states is None or slot is None:
            raise InternalError(f"there is no slot for the recurrent state of layer {layer}")
        if not 0 <= start < end <= self.layers[layer].state_bytes:
            raise KVCorrupt(f"bytes [{start}, {end}) of the state of layer {layer}")
        held = states.layer_bytes(layer, slot)
        if sum(map(torch.Tensor.numel, held)) != self.layers[layer].state_bytes:
            raise InternalError(f"only a part of the state of layer {layer} is here")
        parts: list[torch.Tensor] = []
        at = 0
        for whole in held:
            part = whole[max(0, start - at) : max(0, end - at)]
            at += whole.numel()
            if part.numel():
                parts.append(part)
        return parts

    # ---- whole rows in main memory -------------------------------------------------------------
    def _row_views(
        self, layer: int, blocks: Blocks, start: int, end: int, heads: range
    ) -> list[memoryview] | None:
        if self._staged or heads != self._heads[layer]:
            return None
        slot = Slot(self._arena.page_bytes, self._arena.slot_offset(layer))
        held = blocks[self._arena.group_of[layer]]
        ranges = byte_ranges(self._arena.layers[layer], self.format, slot, held, (start, end))
        return [self._buffer[offset : offset + length] for offset, length in ranges]

    # ---- slices, scales, devices: through torch ------------------------------------------------
    def parts(self, layer: int, heads: range | None = None) -> list[torch.Tensor]:
        """Return K, V (unless MLA), then int8's scales of both, of `heads` (None = all here).

        They are views: [num_blocks, block_size, heads, dim], and scales without dim. fp8 as bytes.
        """
        own = self._heads[layer]
        wanted = own if heads is None else heads
        if not own.start <= wanted.start <= wanted.stop <= own.stop:
            raise InternalError(f"{wanted} are not all in {own}")
        local = slice(wanted.start - own.start, wanted.stop - own.start)
        count = 2 if self.layers[layer].v_dim else 1
        tensors = list(self._arena.layer(layer)[:count])
        if self.format.dtype == INT8:
            tensors += self._arena.scales(layer)[:count]
        return [movable(tensor)[:, :, local] for tensor in tensors]

    def slots(
        self, layer: int, blocks: Blocks, start: int, end: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return each token's block and row index [end - start], int64, on the arena's device."""
        size, held = self.format.block_size, blocks[self._arena.group_of[layer]]
        _place(held, start // size)
        tokens = torch.arange(start, end)
        block = torch.tensor(held.ids, dtype=torch.long)[tokens // size - held.first]
        return block.to(self._arena.device), (tokens % size).to(self._arena.device)

    def _scatter(
        self, layer: int, blocks: Blocks, tokens: tuple[int, int], heads: range, rows: list[Rows]
    ) -> None:
        block, row = self.slots(layer, blocks, *tokens)
        tensors = [part.values for part in rows]
        tensors += [part.scales for part in rows if part.scales is not None]
        device = self._arena.device
        for target, values in zip(self.parts(layer, heads), tensors, strict=True):
            target[block, row] = movable(values).to(device)
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()


def movable(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that can be indexed: an fp8 tensor's bytes, as torch cannot index fp8
    itself.
    """
    return tensor.view(torch.uint8) if tensor.dtype is torch.float8_e4m3fn else tensor
