"""The KV pools of a tensor-parallel group: one per rank, each with its heads of every block.

The pools lie side by side in one piece of anonymous shared memory (memfd), which every rank's
process maps. So the leader can write all of them. What it does to a block between two steps (copy,
clear, swap, transfers) it does to every rank's part itself. This is safe because a step's last
collective orders the ranks: once the leader has finished a step, no rank touches KV until the next
message.

    | rank 0: all blocks | rank 1: all blocks | ...      each pool begins at a page boundary

CPU only. The memory has no name in any file system. It is freed when the last process that maps it
ends.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence

import torch

from baton.engine.memory.kv_cache import HostBlocks, KVArena, bytes_per_block
from baton.engine.state.place import LEADER, RankPlace, rank_layers
from baton.protocol.kv_spec import LayerSpec


class GroupArena(KVArena):
    """The leader's own pool. Its block operations change the pools of all ranks.

    An engine uses it as its KVArena. Attention and sizes see rank 0's heads alone.
    """

    def __init__(self, memory: SharedMemory, layers: tuple[LayerSpec, ...], dtype: str) -> None:
        """`layers`: the whole model's."""
        place = memory.place
        super().__init__(
            rank_layers(layers, place.size), memory.num_blocks, memory.block_size, dtype,
            memory=lambda num_bytes, page_bytes: memory.part(LEADER),
        )  # fmt: skip
        self.model_layers = layers
        self.ranks: tuple[KVArena, ...] = (
            self, *(memory.arena(rank) for rank in range(1, place.size))
        )  # fmt: skip

    def copy_block(self, source: int, target: int) -> None:
        """See KVArena. Every rank's `source` lies in its own pool: these pools adopt no blocks."""
        for arena in self.ranks:
            KVArena.copy_block(arena, source, target)

    def clear_block(self, block: int) -> None:
        """See KVArena."""
        for arena in self.ranks:
            KVArena.clear_block(arena, block)

    def read_blocks(self, blocks: Sequence[int]) -> HostBlocks:
        """See KVArena. A row holds the parts of a block in rank order."""
        parts = [KVArena.read_blocks(arena, blocks).words for arena in self.ranks]
        return HostBlocks(torch.cat(parts, dim=1))

    def write_blocks(self, host: HostBlocks, rows: Sequence[int], blocks: Sequence[int]) -> None:
        """See KVArena."""
        parts = host.words.chunk(len(self.ranks), dim=1)
        for arena, words in zip(self.ranks, parts, strict=True):
            KVArena.write_blocks(arena, HostBlocks(words), rows, blocks)


class SharedMemory:
    """The group's memory as one process maps it. `descriptor`: that of the memfd, from make_memory.
    The caller closes it once all ranks have mapped the memory."""

    def __init__(
        self,
        descriptor: int,
        place: RankPlace,
        blocks: tuple[int, int],
        layers: tuple[LayerSpec, ...],
        dtype: str,
    ) -> None:
        """Map the memory. The leader sets its size, so the leader must map it first. `blocks`: the
        number of blocks, and the tokens in each. `layers`: the whole model's."""
        self.place = place
        self.num_blocks, self.block_size = blocks
        self._layers = rank_layers(layers, place.size)
        self._dtype = dtype
        page = bytes_per_block(self._layers, self.block_size, dtype)
        self._num_bytes = self.num_blocks * page
        self._stride = -(-self._num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        if place.leads:
            os.ftruncate(descriptor, place.size * self._stride)
        mapped = mmap.mmap(descriptor, place.size * self._stride)
        self._bytes = torch.frombuffer(mapped, dtype=torch.uint8)

    def part(self, rank: int) -> torch.Tensor:
        """Return the bytes of one rank's pool, uint8; all are zero at first."""
        return self._bytes[rank * self._stride :][: self._num_bytes]

    def arena(self, rank: int) -> KVArena:
        """Return the pool of one rank."""
        return KVArena(
            self._layers, self.num_blocks, self.block_size, self._dtype,
            memory=lambda num_bytes, page_bytes: self.part(rank),
        )  # fmt: skip


def make_memory() -> int:
    """Return a descriptor of shared memory that has no size yet. Child processes do not inherit it
    unless it is passed on."""
    return os.memfd_create("baton-kv")
