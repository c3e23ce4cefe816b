"""A KV arena on a device, for staging.py: ArenaPool, and CudaCopies for a CUDA device.

This module only makes the device calls. The logic around them is in staging.py, which the tests
check with a fake device. "The compute stream" is the stream that is current where a CudaCopies is
made: the engine's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from baton.engine.parallel.pool import GroupArena
from baton.protocol.errors import KVCorrupt
from baton.protocol.kv_spec import LayerSpec, PoolFormat
from kv_transfer.pool.codec import converted
from kv_transfer.pool.group_memory import GroupMemory
from kv_transfer.pool.layout import Arena, ArenaMemory
from kv_transfer.pool.staging import NUM_SLOTS, Mark, Places, StagedMemory
from kv_transfer.protocol.base import Blocks, KVMemory, Payload
from kv_transfer.protocol.frames import Buffer
from kv_transfer.protocol.shares import rows_bytes


class ArenaPool:
    """Implements staging.DevicePool for a KV arena. `described`: an ArenaMemory of the same arena,
    which knows the format.
    """

    def __init__(self, described: ArenaMemory) -> None:
        self._described = described

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        return self._described.layers

    @property
    def format(self) -> PoolFormat:
        return self._described.format

    @property
    def windowed(self) -> bool:
        return self._described.windowed

    def heads(self, layer: int) -> range:
        return self._described.heads(layer)

    def group(self, layer: int) -> int:
        return self._described.group(layer)

    def tables(self, blocks: Blocks) -> tuple[tuple[int, ...], ...]:
        return self._described.tables(blocks)

    def parts(self, layer: int, heads: range | None) -> Sequence[torch.Tensor]:
        """Return K, V, then int8's scales, as [num_blocks, block_size, heads, dim] views of the
        arena.
        """
        parts = self._described.parts(layer, heads)
        return [part[..., None] if part.dim() == 3 else part for part in parts]

    def places(self, layer: int, blocks: Blocks, start: int, end: int) -> Places:
        block, row = self._described.slots(layer, blocks, start, end)
        return Places(block.cpu(), row.cpu())

    def read_state(self, layer: int, blocks: Blocks, start: int, end: int) -> Sequence[memoryview]:
        return self._described.read_state(layer, blocks, start, end)

    def write_state(self, layer: int, blocks: Blocks, start: int, data: Buffer) -> None:
        self._described.write_state(layer, blocks, start, data)

    def converted(self, layer: int, num_tokens: int, payload: Payload) -> Sequence[memoryview]:
        heads = self.heads(layer) if payload.heads is None else payload.heads
        spec = self.layers[layer]
        wanted = num_tokens * rows_bytes(spec, len(heads), payload.dtype)
        if len(payload.data) != wanted:
            raise KVCorrupt(f"payload of {len(payload.data)} bytes, not {wanted}")
        if payload.dtype == self.format.dtype:
            return [payload.data]
        return converted(spec, Payload(payload.data, payload.dtype, heads), self.format.dtype)


class CudaMark:
    """A CUDA event. `wait` sleeps in the driver instead of spinning, as data-plane threads have no
    core of their own.
    """

    def __init__(self) -> None:
        self.event = torch.cuda.Event(blocking=True)

    def done(self) -> bool:
        return self.event.query()

    def wait(self) -> None:
        self.event.synchronize()


class CudaCopies:
    """Implements staging.DeviceCopies with one copy stream per lane."""

    def __init__(self, device: torch.device, num_lanes: int) -> None:
        self._device = device
        self._compute = torch.cuda.current_stream(device)
        self._streams = [torch.cuda.Stream(device) for _ in range(num_lanes)]

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def mark(self) -> Mark:
        return self._record(self._compute)

    def gather(
        self,
        lane: int,
        sources: Sequence[torch.Tensor],
        places: Places,
        host: torch.Tensor,
        after: Mark,
    ) -> Mark:
        """See staging.DeviceCopies. One gather kernel and one copy per source."""
        stream = self._after(lane, after)
        with torch.cuda.stream(stream):
            block, row = self._indices(places)
            taken = 0
            for source in sources:
                part = source[block, row].contiguous().view(torch.uint8).flatten()
                host[taken : taken + part.numel()].copy_(part, non_blocking=True)
                taken += part.numel()
            return self._record(stream)

    def scatter(
        self,
        lane: int,
        host: torch.Tensor,
        targets: Sequence[torch.Tensor],
        places: Places,
        after: Mark,
    ) -> Mark:
        """See staging.DeviceCopies. One copy in all, and one scatter kernel per target."""
        stream = self._after(lane, after)
        with torch.cuda.stream(stream):
            block, row = self._indices(places)
            staged = host.to(self._device, non_blocking=True)
            taken = 0
            for target in targets:
                shape = (len(places.row), *target.shape[2:])
                size = shape[0] * shape[1] * shape[2] * target.element_size()
                # copied, so that it is aligned for a wider dtype
                part = staged[taken : taken + size].clone()
                target[block, row] = part.view(target.dtype).view(shape)
                taken += size
            return self._record(stream)

    def hold_compute(self, until: Mark) -> None:
        assert isinstance(until, CudaMark), "marks are of one device"
        self._compute.wait_event(until.event)

    def _after(self, lane: int, after: Mark) -> torch.cuda.Stream:
        assert isinstance(after, CudaMark), "marks are of one device"
        stream = self._streams[lane]
        stream.wait_event(after.event)
        return stream

    def _indices(self, places: Places) -> tuple[torch.Tensor, torch.Tensor]:
        return places.block.to(self._device), places.row.to(self._device)

    def _record(self, stream: torch.cuda.Stream) -> CudaMark:
        mark = CudaMark()
        mark.event.record(stream)
        return mark


def memory_of(arena: Arena, timeout_s: float) -> KVMemory:
    """Return the KVMemory of a node's pool, on a device or not.

    `timeout_s`: see StagedMemory. Call it where the engine's compute stream is current.
    """
    if isinstance(arena, GroupArena):
        return GroupMemory(arena)
    # Of a sliding window the engine keeps only what later tokens see, as exporter and as fetcher.
    described = ArenaMemory(arena, windowed=True)
    if arena.device.type == "cpu":
        return described
    return StagedMemory(ArenaPool(described), CudaCopies(arena.device, NUM_SLOTS), timeout_s)
