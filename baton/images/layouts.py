"""The tokens that stand for one image in a prompt, from its width and height in pixels.

Each family resizes an image in its own way first, so that it falls into whole patches:

    ResizedGrid    Qwen2.5-VL, Qwen3-VL, Qwen3.5    one token for merge_size x merge_size patches
    PatchRows      Mistral 3, Pixtral               the same, and a token at the end of each row
    FixedCount     Gemma 3                          always the same number

Pure arithmetic. Source: transformers' image_processing_pil_qwen2_vl.py (smart_resize),
image_processing_pil_pixtral.py (get_resize_output_image_size), processing_pixtral.py,
processing_gemma3.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Protocol

from baton.protocol.errors import InvalidRequest

MAX_ASPECT_RATIO: Final = 200  # the limit of Qwen's processors


class ImageLayout(Protocol):
    """How an image becomes tokens."""

    def tokens(self, width: int, height: int) -> tuple[int, ...]:
        """Return the tokens of an image of that many pixels, at least one.

        Raises InvalidRequest for a shape that the model cannot read."""
        ...


@dataclass(frozen=True, slots=True)
class ResizedGrid:
    """An image is resized to multiples of `factor` pixels, with `min_pixels` to `max_pixels` in
    all; each square of `factor` x `factor` pixels is one `token`."""

    token: int
    factor: int
    min_pixels: int
    max_pixels: int

    def tokens(self, width: int, height: int) -> tuple[int, ...]:
        rows, columns = self.grid(width, height)
        return (self.token,) * (rows * columns)

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """Return (rows, columns) of squares."""
        if max(width, height) > MAX_ASPECT_RATIO * min(width, height):
            raise InvalidRequest(
                f"an image of {width} x {height} pixels is too narrow for this model: one edge may"
                f" be {MAX_ASPECT_RATIO} times as long as the other"
            )
        factor = self.factor
        rows, columns = round(height / factor), round(width / factor)  # halves become even
        if rows * columns * factor**2 > self.max_pixels:
            shrink = math.sqrt((height * width) / self.max_pixels)
            rows = max(1, math.floor(height / shrink / factor))
            columns = max(1, math.floor(width / shrink / factor))
        elif rows * columns * factor**2 < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (height * width))
            rows = math.ceil(height * grow / factor)
            columns = math.ceil(width * grow / factor)
        return rows, columns


@dataclass(frozen=True, slots=True)
class PatchRows:
    """An image that is larger is shrunk to `longest_edge` pixels; each square of `factor` x
    `factor` pixels, the last ones padded, is one `token`. Each row ends with `row_end`, the last
    one with `image_end`."""

    token: int
    row_end: int
    image_end: int
    factor: int
    longest_edge: int

    def tokens(self, width: int, height: int) -> tuple[int, ...]:
        ratio = max(height / self.longest_edge, width / self.longest_edge)
        if ratio > 1:
            height, width = math.floor(height / ratio), math.floor(width / ratio)
        if not (height and width):
            raise InvalidRequest("an image is too narrow for this model")
        rows, columns = (-(-edge // self.factor) for edge in (height, width))
        row = (self.token,) * columns + (self.row_end,)
        return (*(row * rows)[:-1], self.image_end)


@dataclass(frozen=True, slots=True)
class FixedCount:
    """Every image is resized to the same square: it is `count` times `token`."""

    token: int
    count: int

    def tokens(self, width: int, height: int) -> tuple[int, ...]:
        return (self.token,) * self.count
