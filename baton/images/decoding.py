"""Opens a client's image file, only to see that it can be decoded and how large it is.

The bytes say what kind of file it is, not its name or its declared type. The number of pixels is
read from the header and limited before a pixel is decoded: a file of a kilobyte may claim
gigabytes. Of an animation the first frame counts. The size is that of the image as it is shown:
a camera's file may say that it is to be turned.

The decoders are native code and may do anything with a hostile file, so the router calls this only
in a child process (checker.py).
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Final

from PIL import Image, ImageOps

from baton.protocol.errors import InvalidRequest

# The first bytes of a file -> Pillow's name of its format. WebP's name follows its length.
_BEGINNINGS: Final = {
    b"\x89PNG\r\n\x1a\n": "PNG",
    b"\xff\xd8\xff": "JPEG",
    b"GIF87a": "GIF",
    b"GIF89a": "GIF",
}
KINDS: Final = "PNG, JPEG, WebP or GIF"
_TURNED: Final = frozenset({5, 6, 7, 8})  # EXIF orientations that exchange width and height
_ORIENTATION: Final = 0x0112
_DRAFT_EDGE: Final = 64  # pixels: a JPEG is decoded at an eighth of its size, but read to its end


@dataclass(frozen=True, slots=True)
class DecodedSize:
    """Width and height in pixels, as the image is shown. `smaller`: another file to use in place of
    the original one; empty if the image was not too large."""

    width: int
    height: int
    smaller: bytes = b""


def decoded_size(data: bytes, max_pixels: int, max_edge: int = 0) -> DecodedSize:
    """Decode the image once; return its size. `max_edge`: shrink a larger image to this edge; 0 =
    never.

    Raises InvalidRequest (without a field) for a file that is no such image, is broken or cut
    short, or has more than `max_pixels`."""
    kind = kind_of(data)
    if kind == "WEBP":  # Pillow takes memory for the whole canvas when it opens one
        _check_pixels(_webp_size(data), max_pixels)
    Image.MAX_IMAGE_PIXELS = None  # the check below takes its place
    try:
        with Image.open(io.BytesIO(data), formats=(kind,)) as image:
            _check_pixels(image.size, max_pixels)
            if 0 < max_edge < max(image.size):
                return _shrunk(image, max_edge)
            width, height = image.size
            image.draft("RGB", (_DRAFT_EDGE, _DRAFT_EDGE))
            image.load()
            turned = image.getexif().get(_ORIENTATION) in _TURNED
    except (InvalidRequest, MemoryError):
        raise
    # Pillow's plugins raise anything over broken files, not only OSError.
    except Exception as error:
        raise InvalidRequest(f"the {kind} file cannot be decoded: it is broken or cut short") from (
            error
        )
    return DecodedSize(height, width) if turned else DecodedSize(width, height)


def kind_of(data: bytes) -> str:
    """Return Pillow's name of a file's format. Raises InvalidRequest for any other format."""
    for beginning, kind in _BEGINNINGS.items():
        if data.startswith(beginning):
            return kind
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "WEBP"
    raise InvalidRequest(f"the file is no {KINDS}")


def _check_pixels(size: tuple[int, int], max_pixels: int) -> None:
    width, height = size
    if width < 1 or height < 1:
        raise InvalidRequest("the image has no pixels")
    if width * height > max_pixels:
        raise InvalidRequest(
            f"the image has {width} x {height} pixels, more than the {max_pixels} that are allowed"
        )


def _webp_size(data: bytes) -> tuple[int, int]:
    """Return the size of a WebP's canvas. Source: RFC 9649, sections 2.5 to 2.7."""
    chunk, head = data[12:16], data[20:30]
    if len(head) == 10:
        if chunk == b"VP8X":
            return 1 + int.from_bytes(head[4:7], "little"), 1 + int.from_bytes(head[7:10], "little")
        if chunk == b"VP8L":
            bits = int.from_bytes(head[1:5], "little")
            return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
        if chunk == b"VP8 ":
            edges = (int.from_bytes(head[start : start + 2], "little") for start in (6, 8))
            width, height = (edge & 0x3FFF for edge in edges)
            return width, height
    raise InvalidRequest("the WEBP file cannot be decoded: it is broken or cut short")


def _shrunk(image: Image.Image, max_edge: int) -> DecodedSize:
    """Return a smaller PNG of the image, as models read it: turned, without transparency."""
    small = ImageOps.exif_transpose(image).convert("RGB")
    small.thumbnail((max_edge, max_edge), Image.Resampling.BICUBIC)
    file = io.BytesIO()
    small.save(file, "PNG")
    return DecodedSize(*small.size, file.getvalue())
