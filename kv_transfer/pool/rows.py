"""RowMemory: where the rows of images are received, one tensor of main memory for each fetch.

It looks like a KV pool to the connector: a row of an image is a token, `embeds` and each of the
deep rows are layers, and one block holds a whole image. Nothing is exported from it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Final

import torch

from baton.protocol.errors import InternalError, KVCorrupt
from baton.protocol.kv_spec import HeldBlocks, LayerSpec, PoolFormat
from kv_transfer.pool.codec import TORCH_DTYPES, unpack
from kv_transfer.protocol.base import Blocks, Payload
from kv_transfer.protocol.frames import Buffer
from kv_transfer.protocol.shares import rows_bytes

MOST_ROWS: Final = 1 << 24  # of one image
_ONE_HEAD: Final = range(1)


class RowMemory:
    """Implements base.KVMemory. Entries are taken and given back on the event loop; the threads of
    the data plane write into those that are taken."""

    windowed = True  # as a node's pool is; rows have no window, so all are sent

    def __init__(self, layers: tuple[LayerSpec, ...], dtype: str) -> None:
        """`layers`: VisionTower.row_layers. `dtype`: in which rows are kept here."""
        self.layers = layers
        self.format = PoolFormat(MOST_ROWS, dtype)
        self._numbers = itertools.count()
        self._entries: dict[int, torch.Tensor] = {}

    def take(self, num_rows: int) -> Blocks:
        """Make room for an image of `num_rows` rows."""
        number, width = next(self._numbers), self.layers[0].k_dim
        shape = (len(self.layers), num_rows, width)
        self._entries[number] = torch.zeros(shape, dtype=TORCH_DTYPES[self.format.dtype])
        return (HeldBlocks((number,)),)

    def give_back(self, blocks: Blocks) -> torch.Tensor:
        """Forget an entry and return it: [layers, rows, H]."""
        return self._entries.pop(blocks[0].ids[0])

    # ---- base.KVMemory ----

    def heads(self, layer: int) -> range:
        return _ONE_HEAD

    def group(self, layer: int) -> int:
        return 0

    def tables(self, blocks: Blocks) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(held.ids) for held in blocks)

    def views(
        self, layer: int, blocks: Blocks, start: int, end: int, heads: range
    ) -> Sequence[memoryview] | None:
        rows = self._entries[blocks[0].ids[0]][layer, start:end]
        return [rows.view(torch.uint8).view(-1).numpy().data]

    def write(self, layer: int, blocks: Blocks, start: int, end: int, payload: Payload) -> None:
        spec = self.layers[layer]
        if len(payload.data) != (end - start) * rows_bytes(spec, 1, payload.dtype):
            raise KVCorrupt(f"payload of {len(payload.data)} bytes for {end - start} rows")
        (rows,) = unpack(spec, Payload(payload.data, payload.dtype, _ONE_HEAD))
        target = self._entries[blocks[0].ids[0]][layer, start:end]
        target.copy_(rows.to(self.format.dtype).values[:, 0])

    def read(
        self, layer: int, blocks: Blocks, start: int, end: int, heads: range | None = None
    ) -> Sequence[memoryview]:
        raise InternalError("received rows of images are not exported")

    def read_state(self, layer: int, blocks: Blocks, start: int, end: int) -> Sequence[memoryview]:
        raise InternalError("rows of images keep no recurrent state")

    def write_state(self, layer: int, blocks: Blocks, start: int, data: Buffer) -> None:
        raise InternalError("rows of images keep no recurrent state")

    def written(self, layer: int, blocks: Blocks, upto: int) -> None:
        """Do nothing: see `read`."""

    def landed(self) -> None:
        """Do nothing: what the host has written is there."""
