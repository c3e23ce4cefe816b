"""GroupMemory: the pools of a tensor-parallel group as one pool, for a connector beside its leader.

The leader has every rank's pool mapped (baton/engine/parallel/pool.py), so to its peers the node
looks like one that holds all heads: rows are put together from the ranks' slices, and cut into
them. A head that lies on several ranks is read from the first and written to all. A recurrent state
is the whole model's, too, put together by segments and heads. There are no views, as a row's bytes
lie in several pools. A group whose leader cannot reach the other ranks'
pools has a connector per rank instead (Connector.join_group).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from baton.engine.parallel.pool import GroupArena
from baton.protocol.errors import KVCorrupt
from baton.protocol.kv_spec import LayerSpec, PoolFormat
from kv_transfer.pool.codec import bytes_of, unpack
from kv_transfer.pool.layout import ArenaMemory, movable
from kv_transfer.protocol.base import Blocks, Payload
from kv_transfer.protocol.frames import Buffer
from kv_transfer.protocol.messages import INT8, RAW
from kv_transfer.protocol.shares import rows_bytes


class GroupMemory:
    """Implements base.KVMemory over a GroupArena."""

    def __init__(self, arena: GroupArena) -> None:
        self.arena = arena
        self.layers: tuple[LayerSpec, ...] = arena.model_layers
        self.format = PoolFormat(arena.block_size, arena.dtype, codecs=(RAW, INT8))
        self.windowed = True
        size = len(arena.ranks)
        self._ranks = [
            ArenaMemory(each, True, layers=self.layers, tp=(size, rank))
            for rank, each in enumerate(arena.ranks)
        ]

    def heads(self, layer: int) -> range:
        """Return all KV heads of the layer."""
        return range(self.layers[layer].kv_heads)

    def group(self, layer: int) -> int:
        """See KVMemory."""
        return self._ranks[0].group(layer)

    def tables(self, blocks: Blocks) -> tuple[tuple[int, ...], ...]:
        """See KVMemory."""
        return self._ranks[0].tables(blocks)

    def written(self, layer: int, blocks: Blocks, upto: int) -> None:
        """Do nothing: memory that the host has written needs no mark."""

    def landed(self) -> None:
        """Do nothing: what the host has written is there."""

    def views(
        self, layer: int, blocks: Blocks, start: int, end: int, heads: range
    ) -> Sequence[memoryview] | None:
        """Return None: a row's bytes lie in several pools."""
        return None

    def read(
        self, layer: int, blocks: Blocks, start: int, end: int, heads: range | None = None
    ) -> Sequence[memoryview]:
        """See KVMemory. Returns host copies."""
        wanted = self.heads(layer) if heads is None else heads
        block, row = self._ranks[0].slots(layer, blocks, start, end)
        slices: list[list[torch.Tensor]] = []
        taken = wanted.start
        for memory, piece in self._pieces(layer, wanted):
            fresh = range(max(piece.start, taken), piece.stop)
            if fresh:
                slices.append([part[block, row] for part in memory.parts(layer, fresh)])
                taken = fresh.stop
        return [bytes_of(torch.cat(parts, dim=1)) for parts in zip(*slices, strict=True)]

    def write(self, layer: int, blocks: Blocks, start: int, end: int, payload: Payload) -> None:
        """See KVMemory."""
        wanted = self.heads(layer) if payload.heads is None else payload.heads
        spec = self.layers[layer]
        expected = (end - start) * rows_bytes(spec, len(wanted), payload.dtype)
        if len(payload.data) != expected:
            raise KVCorrupt(f"payload of {len(payload.data)} bytes, not {expected}")
        unpacked = unpack(spec, Payload(payload.data, payload.dtype, wanted))
        rows = [each.to(self.format.dtype) for each in unpacked]
        tensors = [each.values for each in rows]
        tensors += [each.scales for each in rows if each.scales is not None]
        block, row = self._ranks[0].slots(layer, blocks, start, end)
        for memory, piece in self._pieces(layer, wanted):
            local = slice(piece.start - wanted.start, piece.stop - wanted.start)
            for target, values in zip(memory.parts(layer, piece), tensors, strict=True):
                target[block, row] = movable(values[:, local])

    def read_state(self, layer: int, blocks: Blocks, start: int, end: int) -> Sequence[memoryview]:
        """See KVMemory. The bytes are those of the whole state (GroupStates.layer_bytes)."""
        return self._ranks[0].read_state(layer, blocks, start, end)

    def write_state(self, layer: int, blocks: Blocks, start: int, data: Buffer) -> None:
        """See KVMemory. Each rank gets its heads of the whole state, or all of a state that is not
        split."""
        state = self.layers[layer].state
        whole = state is not None and not state.segments
        for memory in self._ranks if whole else self._ranks[:1]:
            memory.write_state(layer, blocks, start, data)

    def _pieces(self, layer: int, wanted: range) -> Iterator[tuple[ArenaMemory, range]]:
        """Yield each rank's memory with the wanted heads that it holds, in order; replicated heads
        repeat.
        """
        for memory in self._ranks:
            own = memory.heads(layer)
            piece = range(max(own.start, wanted.start), min(own.stop, wanted.stop))
            if piece:
                yield memory, piece
