"""The KV pools of a tensor-parallel group: one per rank, each with its heads of every block.

They lie side by side in one piece of anonymous shared memory (memfd), which every rank's process
maps. So the leader reaches all of them: what it does to a block between two steps (copy, clear,
swap, transfers) it does to every rank's part itself. That is safe because a step's last collective
orders the ranks: when the leader has finished a step, nobody touches KV until the next message.

    | rank 0: all blocks | rank 1: all blocks | ...      each from a page boundary on

CPU only. It has no name in any file system, and goes with the last process that maps it.
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
    """The leader's own pool, whose block operations reach those of all ranks.

    It stands where an engine wants its KVArena: attention and sizes see rank 0's heads alone.
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
        """See KVArena. No rank's `source` is another pool's: these adopt none."""
        for arena in self.ranks:
            KVArena.copy_block(arena, source, target)

    def clear_block(self, block: int) -> None:
        """See KVArena."""
        for arena in self.ranks:
            KVArena.clear_block(arena, block)

    def read_blocks(self, blocks: Sequence[int]) -> HostBlocks:
        """See KVArena: a row holds the block's parts in rank order."""
        parts = [KVArena.read_blocks(arena, blocks).words for arena in self.ranks]
        return HostBlocks(torch.cat(parts, dim=1))

    def write_blocks(self, host: HostBlocks, rows: Sequence[int], blocks: Sequence[int]) -> None:
        """See KVArena."""
        parts = host.words.chunk(len(self.ranks), dim=1)
        for arena, words in zip(self.ranks, parts, strict=True):
            KVArena.write_blocks(arena, HostBlocks(words), rows, blocks)


class SharedMemory:
    """The group's memory as one process maps it. `descriptor`: of the memfd, from make_memory;
    the caller's to close, once all ranks have mapped it."""

    def __init__(
        self,
        descriptor: int,
        place: RankPlace,
        blocks: tuple[int, int],
        layers: tuple[LayerSpec, ...],
        dtype: str,
    ) -> None:
        """`blocks`: (how many, tokens in each). `layers`: the whole model's. The first to map
        it gives it its size."""
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
        """The bytes of one rank's pool: uint8, zeros at first."""
        return self._bytes[rank * self._stride :][: self._num_bytes]

    def arena(self, rank: int) -> KVArena:
        """One rank's pool."""
        return KVArena(
            self._layers, self.num_blocks, self.block_size, self._dtype,
            memory=lambda num_bytes, page_bytes: self.part(rank),
        )  # fmt: skip


def make_memory() -> int:
    """A descriptor of shared memory that has no size yet; not inherited unless passed on."""
    return os.memfd_create("baton-kv")
