"""ImageEncoder: the vision tower of a process that has no language model.

    read(data)     file -> pixels               any thread
    rows(pixels)   pixels -> ImageRows          the engine's thread
The rows are kept in the blocks of the engine's pool, under keys of the file's digest.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from typing import Final

import torch
from torch import Tensor

from baton.engine.models.tower import VisionTower
from baton.engine.state.images import ImageRows
from baton.engine.state.interface import ModelInfo
from baton.engine.vision.pixels import PixelReader

MOST_GRIDS: Final = 65_536  # of files, remembered by digest


class ImageEncoder:
    """Owns the tower, and what is known of files: their grids of tokens, by digest."""

    def __init__(self, info: ModelInfo, reader: PixelReader, tower: VisionTower) -> None:
        self.info = info
        self._reader = reader
        self._tower = tower
        self._grids: OrderedDict[bytes, tuple[int, int]] = OrderedDict()

    def read(self, data: bytes) -> dict[str, Tensor]:
        """Decode a file to what the tower takes. Raises InvalidRequest."""
        return self._reader.read(data)

    def grid(self, digest: bytes) -> tuple[int, int] | None:
        """Return rows and columns of tokens of an image that was encoded before. Engine thread."""
        return self._grids.get(digest)

    @torch.inference_mode()
    def rows(self, digest: bytes, pixels: dict[str, Tensor]) -> ImageRows:
        """Run the tower over one image, and remember its grid. Engine thread. Raises ModelRefused
        if there are not as many rows as the grid has."""
        rows = self._tower.rows(pixels)
        self._grids[digest] = self._tower.grid(pixels)
        self._grids.move_to_end(digest)
        if len(self._grids) > MOST_GRIDS:
            self._grids.popitem(last=False)
        return rows

    def count(self, pixels: dict[str, Tensor]) -> int:
        """Return how many rows an image will have."""
        height, width = self._tower.grid(pixels)
        return height * width


def keys_of(digest: bytes, count: int) -> list[bytes]:
    """Return the keys of an image's `count` blocks in the pool's map."""
    return [
        hashlib.blake2b(digest + index.to_bytes(4, "little"), digest_size=16).digest()
        for index in range(count)
    ]
