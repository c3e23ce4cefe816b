"""The images of a request, as a step sees them. Values and arithmetic; no model, no files.

PromptImage   one image: its places in the prompt, and its rows while they are needed
PromptImages  those of one request, shared by all of its samples
ImageRows     what the vision tower makes of an image: one row for each place
StepImages    the rows of one step, and where they go
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from baton.protocol.images import ImageInput

ROWS_RULE: Final = "rows of images"  # in the place of the RoPE rule, in fingerprints of rows


@dataclass(frozen=True, slots=True)
class ImageRows:
    """`embeds` [rows, H] replace the embeddings of an image's placeholders. `deep` [layers, rows,
    H] are added behind the first layers (Qwen3-VL; elsewhere `layers` is 0)."""

    embeds: Tensor
    deep: Tensor

    @property
    def num_bytes(self) -> int:
        return self.embeds.nbytes + self.deep.nbytes


@dataclass(eq=False, slots=True)
class PromptImage:
    """One image of a request.

    `places` are the prompt positions of its rows, in order. `grid`: rows and columns of its tokens,
    where positions have three parts (M-RoPE); else None. `rows` are there from the chunk that first
    needs them to the one that computes the last place; only vision/images.py sets them.
    """

    image: ImageInput
    places: tuple[int, ...]
    grid: tuple[int, int] | None = None
    rows: ImageRows | None = None


class RowRange(NamedTuple):
    """Rows [first, last) of an image, which lie in a chunk."""

    image: PromptImage
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class PromptImages:
    """The images of one request, in the order of their places. `mutual`: the tokens of an image see
    each other, also later ones (Gemma 3)."""

    images: tuple[PromptImage, ...]
    mutual: bool = False

    def parts(self, start: int, count: int) -> Iterator[RowRange]:
        """Yield the images with rows among tokens [start, start + count), and which rows."""
        for each in self.images:
            if each.image.end > start and each.image.start < start + count:
                first, last = np.searchsorted(each.places, (start, start + count)).tolist()
                if first < last:
                    yield RowRange(each, first, last)

    def uncut(self, start: int, count: int) -> int:
        """Return how many of the `count` tokens from `start` on to compute at once, so that the
        tokens of an image that see each other are computed together; 0 if an image needs more."""
        if self.mutual:
            for each in self.images:
                if each.image.start < start + count < each.image.end:
                    return max(0, each.image.start - start)
        return count

    def mutual_ranges(self, start: int, count: int) -> tuple[tuple[int, int], ...]:
        """Return the tokens (from, to) of each image with tokens among [start, start + count), if
        its tokens see each other."""
        if not self.mutual:
            return ()
        ranges = ((each.image.start, each.image.end) for each in self.images)
        return tuple((low, high) for low, high in ranges if low < start + count and high > start)

    def positions(self, start: int, count: int) -> np.ndarray:
        """Return the M-RoPE positions [3, count] (time, row, column) of tokens [start, start +
        count). An image takes as many positions as its longer side has tokens; all of its tokens
        have one time. Source: Qwen2-VL, arXiv 2409.12191, section 2.1."""
        tokens = np.arange(start, start + count)
        time, row, column = found = np.repeat(tokens[None], 3, axis=0)
        for each in self.images:
            if each.grid is None or each.image.start >= start + count:
                continue
            height, width = each.grid
            index = tokens - each.image.start
            inside = (index >= 0) & (tokens < each.image.end)
            time[inside] -= index[inside]
            row[inside] -= (index - index // width)[inside]
            column[inside] -= (index - index % width)[inside]
            found[:, tokens >= each.image.end] -= each.image.num_tokens - max(height, width)
        return found


@dataclass(frozen=True, slots=True)
class StepImages:
    """The images of one step of T rows, on the model's device.

    `positions` [3, T] int64, M-RoPE positions; None where positions have one part. The rows `rows`
    [N] int64 of the step get `embeds` [N, H] as embeddings, and `deep` [layers, N, H] behind the
    first layers.
    """

    positions: Tensor | None
    rows: Tensor
    embeds: Tensor | None
    deep: Tensor | None


def step_images(
    chunks: Sequence[tuple[PromptImages | None, int, int]], device: torch.device
) -> StepImages | None:
    """Lay out the images of a step; None if no chunk has images. `chunks`: the images, first token
    and number of tokens of each chunk. The rows that the step needs must have been made."""
    if all(images is None for images, _, _ in chunks):
        return None
    positions, rows, found, at = list[np.ndarray](), list[int](), list[RowRange](), 0
    for images, start, count in chunks:
        if images is None:
            positions.append(np.repeat(np.arange(start, start + count)[None], 3, axis=0))
        else:
            positions.append(images.positions(start, count))
            for part in images.parts(start, count):
                found.append(part)
                rows += [at + p - start for p in part.image.places[part.first : part.last]]
        at += count
    grids = any(i.grid is not None for each, _, _ in chunks if each for i in each.images)
    placed = torch.from_numpy(np.concatenate(positions, axis=1)).to(device) if grids else None
    embeds = deep = None
    if found:
        made = [(part, part.image.rows) for part in found]
        assert all(rows is not None for _, rows in made), "made before the step"
        embeds = torch.cat([r.embeds[p.first : p.last] for p, r in made if r is not None])
        deep = torch.cat([r.deep[:, p.first : p.last] for p, r in made if r is not None], dim=1)
    return StepImages(placed, torch.tensor(rows, dtype=torch.int64, device=device), embeds, deep)
