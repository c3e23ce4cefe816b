"""Direct lanes for the contract: a pool is made in the memory that its lane reads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

import torch

from baton.engine.memory.kv_cache import KVArena, MakeMemory
from baton.protocol.handles import LaneAddress
from baton.runtime.timing import Timing
from kv_transfer.lanes.nixl import NixlLane, NixlPool
from kv_transfer.lanes.shm import ShmLane
from kv_transfer.lanes.shm_arena import ShmArena
from kv_transfer.pool.memory_map import map_of
from kv_transfer.protocol.base import Lane, Serve, Wire
from tests.transfer.faults import FaultyLane

RESERVED_BYTES: Final = 1 << 26  # as many addresses as the small pools of peers need


class LateLane:
    """base.Lane that is made with its node's pool, which lies in memory that the lane reads."""

    direct = True

    def __init__(
        self,
        name: str,
        memory: Callable[[str, int], torch.Tensor],
        make: Callable[[KVArena], Lane],
        inner: Lane,
    ) -> None:
        """`memory`: (boot id, bytes) -> uint8, asked for once; then `make` is given the pool."""
        self.name = name
        self.inner = inner
        self._memory = memory
        self._make = make
        self._lane: Lane | None = None

    def pool(self, boot_id: str, make: Callable[[MakeMemory], KVArena]) -> KVArena:
        pool = make(lambda num_bytes, _: self._memory(boot_id, num_bytes))
        self._lane = self._make(pool)
        return pool

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


def pool_of(lane: Lane, boot_id: str, make: Callable[[MakeMemory | None], KVArena]) -> KVArena:
    """The pool of a node on `lane`."""
    while isinstance(lane, FaultyLane):
        lane = lane.inner
    return lane.pool(boot_id, make) if isinstance(lane, LateLane) else make(None)


def shm_lane(inner: Callable[[], Lane], directory: Path, arenas: list[ShmArena]) -> LateLane:
    """`arenas` collects what the caller closes."""
    late, own = inner(), list[ShmArena]()

    def memory(boot_id: str, num_bytes: int) -> torch.Tensor:
        # Page ids do not matter here: bytes are found through the map.
        own.append(ShmArena(boot_id, num_bytes, 1, directory, RESERVED_BYTES))
        arenas.extend(own)
        return own[0].memory()

    def make(pool: KVArena) -> Lane:
        (arena,) = own
        num_bytes = arena.place.num_bytes
        return ShmLane(late, arena, map_of(pool, arena.address, num_bytes, pool.num_blocks))

    return LateLane("shm", memory, make, late)


def nixl_lane(inner: Callable[[], Lane], timing: Timing) -> LateLane:
    late, own = inner(), list[torch.Tensor]()

    def memory(boot_id: str, num_bytes: int) -> torch.Tensor:
        own.append(torch.zeros(num_bytes, dtype=torch.uint8))
        return own[0]

    def make(pool: KVArena) -> Lane:
        (memory,) = own
        pool_map = map_of(pool, memory.data_ptr(), memory.nbytes, pool.num_blocks)
        return NixlLane(late, NixlPool(memory, pool_map), timing)

    return LateLane("nixl", memory, make, late)
