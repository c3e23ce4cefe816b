"""Rows of images in the blocks of an encode node's pool. Engine thread.

A row is a token of the pool, and `embeds` and each of `deep` are its layers. Full or not, a block
is found again by its image's digest; blocks that no export holds are evicted, least recently used
first.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from baton.engine.state.images import ImageRows
from baton.engine.vision.encoder import ImageEncoder, keys_of
from baton.protocol.errors import InternalError, Unavailable
from baton.protocol.kv_spec import BlockLists, HeldBlocks

if TYPE_CHECKING:  # it lies above this package
    from baton.engine.core.engine import Engine


@dataclass(frozen=True, slots=True)
class PinnedRows:
    """The rows of one image: `height` x `width` tokens of `blocks`, which the caller unpins."""

    blocks: BlockLists
    height: int
    width: int

    @property
    def num_rows(self) -> int:
        return self.height * self.width


def encoder_of(engine: Engine) -> ImageEncoder:
    """Return the engine's encoder. Raises InternalError if it has none."""
    encoder = engine.active.image_encoder
    if encoder is None:
        raise InternalError("this engine has no image encoder")
    return encoder


def pin_known(engine: Engine, digest: bytes) -> PinnedRows | None:
    """Pin the rows of an image that was encoded before; None if they are not all here."""
    grid = encoder_of(engine).grid(digest)
    if grid is None:
        return None
    pool, (height, width) = engine.pool, grid
    keys = keys_of(digest, pool.blocks_for(height * width))
    found = pool.lookup(keys)
    if len(found) < len(keys):
        return None
    blocks = (HeldBlocks(tuple(found)),)
    engine.pin(blocks)
    engine.stats.num_reused_images += 1
    return PinnedRows(blocks, height, width)


def encode(engine: Engine, digest: bytes, pixels: dict[str, Tensor]) -> PinnedRows | None:
    """Run the tower over an image and pin its rows; None if there is no room for them now.

    Raises Unavailable if the pool is too small for them.
    """
    encoder, pool, began = encoder_of(engine), engine.pool, time.perf_counter()
    num_rows = encoder.count(pixels)
    count = pool.blocks_for(num_rows)
    if count > pool.num_blocks:
        raise Unavailable(
            f"an image of {num_rows} rows needs {count} blocks, this encode node has "
            f"{pool.num_blocks} (--image-cache-memory)"
        )
    taken = pool.allocate(count)
    if taken is None:
        return None
    try:
        _write(engine, encoder.rows(digest, pixels), taken)
        for block, key in zip(taken, keys_of(digest, count), strict=True):
            pool.register(block, key, parent=None)
        blocks = (HeldBlocks(tuple(taken)),)
        engine.pin(blocks)
    finally:
        pool.unref(taken)  # the pin holds them now
    engine.stats.num_encoded_images += 1
    engine.stats.step_done(time.perf_counter() - began, num_rows)
    height, width = encoder.grid(digest) or (1, num_rows)
    return PinnedRows(blocks, height, width)


def _write(engine: Engine, rows: ImageRows, blocks: list[int]) -> None:
    arena = engine.arena
    index = torch.tensor(blocks, device=arena.device)
    for layer, values in enumerate((rows.embeds, *rows.deep)):
        place, _ = arena.layer(layer)
        num_rows, width = values.shape
        padded = values.new_zeros(len(blocks) * arena.block_size, width)
        padded[:num_rows] = values
        place[index] = padded.view(len(blocks), arena.block_size, 1, width).to(place.dtype)
