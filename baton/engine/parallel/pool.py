"""The memory of a tensor-parallel group: for each rank a KV pool with its heads of every block, and
its slots of recurrent state with its heads of every state.

The pools lie side by side in one piece of anonymous shared memory (memfd), which every rank's
process maps. So the leader can write all of them. What it does to a block or a slot between two
steps (copy, clear, swap, transfers) it does to every rank's part itself. This is safe because a
step's last collective orders the ranks: once the leader has finished a step, no rank touches KV or
states until the next message.

    | rank 0: all blocks, all slots | rank 1: all blocks, all slots | ...

Each of these parts begins at a page boundary.

CPU only. The memory has no name in any file system. It is freed when the last process that maps it
ends.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence

import torch

from baton.engine.memory.kv_cache import HostBlocks, KVArena, bytes_per_block
from baton.engine.memory.state_arena import StateArena
from baton.engine.memory.state_sizes import slot_bytes
from baton.engine.state.place import LEADER, RankPlace, rank_layers
from baton.protocol.kv_spec import LayerSpec


class GroupArena(KVArena):
    """The leader's own pool. Its block operations change the pools of all ranks, and its `states`
    the states of all ranks.

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
        if memory.num_slots:
            self.states = GroupStates(memory, layers)

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


class GroupStates(StateArena):
    """The leader's own states. Its operations on slots change the states of all ranks."""

    def __init__(self, memory: SharedMemory, layers: tuple[LayerSpec, ...]) -> None:
        """`layers`: the whole model's."""
        size = memory.place.size
        super().__init__(
            rank_layers(layers, size), memory.num_slots, num_checkpoints=memory.num_checkpoints,
            memory=memory.state_part(LEADER),
        )  # fmt: skip
        self._model_layers = layers
        self._ranks = (self, *(memory.states(rank) for rank in range(1, size)))

    def copy(self, source: int, target: int) -> None:
        """See StateArena."""
        for arena in self._ranks:
            StateArena.copy(arena, source, target)

    def read_slots(self, slots: Sequence[int]) -> torch.Tensor:
        """See StateArena. A row holds the parts of a slot in rank order."""
        return torch.cat([StateArena.read_slots(arena, slots) for arena in self._ranks], dim=1)

    def write_slots(self, rows: torch.Tensor, slots: Sequence[int]) -> None:
        """See StateArena."""
        for arena, part in zip(self._ranks, rows.chunk(len(self._ranks), dim=1), strict=True):
            StateArena.write_slots(arena, part, slots)

    def layer_bytes(self, layer: int, slot: int) -> tuple[torch.Tensor, ...]:
        """See StateArena. Joined they are the whole model's state: of the convolution each segment
        with all its heads, then the matrices of all heads. Of a state that every rank keeps whole
        they are the leader's."""
        spec = self._model_layers[layer].state
        if spec is None:
            return ()
        if not spec.segments:
            return super().layer_bytes(layer, slot)
        share = spec.share(len(self._ranks))
        width = share.conv_bytes // sum(share.segments)
        sizes = [segment * width for segment in share.segments]
        convs, matrices = zip(
            *(StateArena.layer_bytes(arena, layer, slot) for arena in self._ranks), strict=True
        )
        segments = zip(*(conv.split(sizes) for conv in convs), strict=True)
        return (*(part for segment in segments for part in segment), *matrices)


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
        states: tuple[int, int] = (0, 0),
    ) -> None:
        """Map the memory. The leader sets its size, so the leader must map it first. `blocks`: the
        number of blocks, and the tokens in each. `states`: the number of slots for recurrent
        states, and of checkpoints. `layers`: the whole model's."""
        self.place = place
        self.num_blocks, self.block_size = blocks
        self.num_slots, self.num_checkpoints = states
        self._layers = rank_layers(layers, place.size)
        self._dtype = dtype
        page = bytes_per_block(self._layers, self.block_size, dtype)
        self._num_bytes = self.num_blocks * page
        self._behind = _whole_pages(self._num_bytes)  # where the states begin
        self._state_bytes = sum(states) * slot_bytes(self._layers)
        self._stride = self._behind + _whole_pages(self._state_bytes)
        if place.leads:
            os.ftruncate(descriptor, place.size * self._stride)
        mapped = mmap.mmap(descriptor, place.size * self._stride)
        self._bytes = torch.frombuffer(mapped, dtype=torch.uint8)

    def part(self, rank: int) -> torch.Tensor:
        """Return the bytes of one rank's pool, uint8; all are zero at first."""
        return self._bytes[rank * self._stride :][: self._num_bytes]

    def arena(self, rank: int) -> KVArena:
        """Return the pool of one rank."""
        arena = KVArena(
            self._layers, self.num_blocks, self.block_size, self._dtype,
            memory=lambda num_bytes, page_bytes: self.part(rank),
        )  # fmt: skip
        arena.states = self.states(rank) if self.num_slots else None
        return arena

    def state_part(self, rank: int) -> torch.Tensor:
        """Return the bytes of one rank's states, uint8; all are zero at first."""
        return self._bytes[rank * self._stride + self._behind :][: self._state_bytes]

    def states(self, rank: int) -> StateArena:
        """Return the states of one rank."""
        return StateArena(
            self._layers, self.num_slots, num_checkpoints=self.num_checkpoints,
            memory=self.state_part(rank),
        )  # fmt: skip


def _whole_pages(num_bytes: int) -> int:
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


def make_memory() -> int:
    """Return a descriptor of shared memory that has no size yet. Child processes do not inherit it
    unless it is passed on."""
    return os.memfd_create("baton-kv")
