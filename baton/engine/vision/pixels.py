"""PixelReader: from the file of an image to pixel values, by transformers' own image processor.

Files come from clients: whatever is wrong with one is an InvalidRequest on `images`. transformers'
PIL processors are used on every node, whether torchvision is there or not: the two round
differently.
"""

from __future__ import annotations

import io
import threading
from pathlib import Path
from typing import Any, Final

from PIL import Image, ImageOps
from torch import Tensor
from transformers import AutoImageProcessor

from baton.protocol.errors import InvalidRequest, ModelRefused

FORMATS: Final = ("PNG", "JPEG", "WEBP", "GIF")
MOST_PIXELS: Final = 1 << 26  # 8192 x 8192; decoded, 200 MB


class PixelReader:
    """Reads files for one checkpoint. Used by any thread, one file at a time: a decoded file takes
    up to 200 MB."""

    def __init__(self, checkpoint: Path, options: dict[str, Any]) -> None:
        """`options`: for the processor, beside those in its file. Raises ModelRefused for a
        processor that Baton cannot use."""
        self._options = options
        self._turn = threading.Lock()
        self._processor: Any = AutoImageProcessor.from_pretrained(
            str(checkpoint), backend="pil", local_files_only=True
        )
        if getattr(self._processor, "do_pan_and_scan", None):
            raise ModelRefused("its image processor cuts images into crops (do_pan_and_scan)")

    def read(self, data: bytes) -> dict[str, Tensor]:
        """Return what the processor makes of one file. Raises InvalidRequest."""
        with self._turn:
            image = opened(data)
            try:
                found = self._processor(images=[image], return_tensors="pt", **self._options)
            except ValueError as error:  # such as an absurd ratio of sides
                raise InvalidRequest(f"an image cannot be used: {error}", field="images") from error
        return {name: value for name, value in found.items() if isinstance(value, Tensor)}

    def measure(self, height: int, width: int) -> dict[str, Tensor]:
        """Return what the processor makes of a grey image of this size."""
        image = Image.new("RGB", (width, height), (128, 128, 128))
        return dict(self._processor(images=[image], return_tensors="pt", **self._options))


def opened(data: bytes) -> Image.Image:
    """Decode a file: upright, RGB, of an animation the first picture. Raises InvalidRequest."""
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
        if image.width * image.height > MOST_PIXELS:  # before any pixel is decoded
            raise InvalidRequest(
                f"an image has {image.width} x {image.height} pixels; {MOST_PIXELS} are the most",
                field="images",
            )
        return ImageOps.exif_transpose(image).convert("RGB")
    except (OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError) as error:
        raise InvalidRequest(f"an image cannot be read: {error}", field="images") from error
