"""ArenaPool: a KV arena on a device as staging.py wants to see it: tensors and indices."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from baton.protocol.errors import KVCorrupt
from baton.protocol.kv_spec import LayerSpec, PoolFormat
from kv_transfer.pool.codec import converted
from kv_transfer.pool.layout import ArenaMemory
from kv_transfer.pool.staging import Places
from kv_transfer.protocol.base import Blocks, Payload
from kv_transfer.protocol.shares import rows_bytes


class ArenaPool:
    """staging.DevicePool. `described` answers for the format: an ArenaMemory of the arena."""

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
        """K, V, then int8's scales, [num_blocks, block_size, heads, dim] views of the arena."""
        parts = self._described.parts(layer, heads)
        return [part[..., None] if part.dim() == 3 else part for part in parts]

    def places(self, layer: int, blocks: Blocks, start: int, end: int) -> Places:
        block, row = self._described.slots(layer, blocks, start, end)
        return Places(block.cpu(), row.cpu())

    def converted(self, layer: int, num_tokens: int, payload: Payload) -> Sequence[memoryview]:
        heads = self.heads(layer) if payload.heads is None else payload.heads
        spec = self.layers[layer]
        wanted = num_tokens * rows_bytes(spec, len(heads), payload.dtype)
        if len(payload.data) != wanted:
            raise KVCorrupt(f"payload of {len(payload.data)} bytes, not {wanted}")
        if payload.dtype == self.format.dtype:
            return [payload.data]
        return converted(spec, Payload(payload.data, payload.dtype, heads), self.format.dtype)
