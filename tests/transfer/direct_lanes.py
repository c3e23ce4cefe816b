"""Direct lanes for the contract: a pool moves into the memory that its lane reads before use."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from baton.engine.kv_cache import KVArena
from baton.handles import LaneAddress
from baton.timing import Timing
from kv_transfer.base import Lane, Serve, Wire
from kv_transfer.memory_map import map_of
from kv_transfer.nixl import NixlLane, NixlPool
from kv_transfer.shm import ShmLane
from kv_transfer.shm_arena import ShmArena
from tests.transfer.faults import FaultyLane

Make = Callable[[KVArena, str], Lane]  # (pool, boot id) -> lane


class LateLane:
    """base.Lane that is made when its node's pool is known."""

    direct = True

    def __init__(self, name: str, make: Make, inner: Lane) -> None:
        self.name = name
        self.inner = inner
        self._make = make
        self._lane: Lane | None = None

    def bind(self, arena: KVArena, boot_id: str) -> None:
        self._lane = self._make(arena, boot_id)

    @property
    def lane(self) -> Lane:
        assert self._lane is not None
        return self._lane

    def start(self, boot_id: str, serve: Serve) -> LaneAddress:
        return self.lane.start(boot_id, serve)

    def reaches(self, address: LaneAddress) -> bool:
        return self.lane.reaches(address)

    def open(self, address: LaneAddress) -> Wire:
        return self.lane.open(address)

    def stop(self) -> None:
        self.lane.stop()


def bind(lane: Lane, arena: KVArena, boot_id: str) -> None:
    """Before anybody keeps a view of `arena`'s memory."""
    while isinstance(lane, FaultyLane):
        lane = lane.inner
    if isinstance(lane, LateLane):
        lane.bind(arena, boot_id)


def move(arena: KVArena, memory: torch.Tensor) -> None:
    """Put the pool's bytes, scales too, into `memory`."""
    old = arena._memory
    arena._memory = memory[: old.nbytes].copy_(old)
    for index, scales in enumerate(arena._scales):
        start = scales.data_ptr() - old.data_ptr()
        place = arena._memory[start : start + scales.nbytes]
        arena._scales[index] = place.view(torch.float32).view(scales.shape)


def shm_lane(inner: Callable[[], Lane], directory: Path, arenas: list[ShmArena]) -> LateLane:
    """`arenas` collects what the caller closes."""
    late = inner()

    def make(pool: KVArena, boot_id: str) -> Lane:
        # Page ids do not matter here: bytes are found through the map.
        arena = ShmArena(boot_id, pool.num_bytes, 1, directory)
        arenas.append(arena)
        move(pool, arena.memory())
        return ShmLane(late, arena, map_of(pool, arena.address, arena.place.num_bytes))

    return LateLane("shm", make, late)


def nixl_lane(inner: Callable[[], Lane], timing: Timing) -> LateLane:
    late = inner()

    def make(pool: KVArena, boot_id: str) -> Lane:
        memory = torch.zeros(pool.num_bytes, dtype=torch.uint8)
        move(pool, memory)
        pool_map = map_of(pool, memory.data_ptr(), memory.nbytes)
        return NixlLane(late, NixlPool(memory, pool_map), timing)

    return LateLane("nixl", make, late)
