"""Image files for tests, good and hostile; all made here."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

from PIL import Image

SIZE = (60, 40)


def picture(kind: str = "PNG", size: tuple[int, int] = SIZE, **options: Any) -> bytes:
    """A file with a gradient, so that no two columns are equal."""
    image = Image.linear_gradient("L").resize(size).convert("RGB")
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def animation(kind: str, num_frames: int = 3, size: tuple[int, int] = SIZE) -> bytes:
    frames = [Image.new("RGB", size, (40 * number % 256, 0, 0)) for number in range(num_frames)]
    file = io.BytesIO()
    frames[0].save(file, kind, save_all=True, append_images=frames[1:])
    return file.getvalue()


def png_claiming(width: int, height: int, pixels: bytes = b"") -> bytes:
    """A PNG whose header says that size; its rows are `pixels`, compressed."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        check = struct.pack(">I", zlib.crc32(kind + content))
        return struct.pack(">I", len(content)) + kind + content + check

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    rows = zlib.compress(pixels, 9)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")
    )


def bomb(edge: int) -> bytes:
    """A real PNG of edge x edge equal pixels: a thousandth of its size."""
    return png_claiming(edge, edge, bytes(1 + edge) * edge)


def jpeg_claiming(width: int, height: int) -> bytes:
    data = bytearray(picture("JPEG"))
    at = data.index(b"\xff\xc0")
    data[at + 5 : at + 9] = struct.pack(">HH", height, width)
    return bytes(data)


def gif_claiming(width: int, height: int) -> bytes:
    data = bytearray(picture("GIF"))
    data[6:10] = struct.pack("<HH", width, height)
    return bytes(data)


def webp_claiming(width: int, height: int) -> bytes:
    """The header of an extended WebP of that canvas, with a small frame."""
    canvas = b"".join((edge - 1).to_bytes(3, "little") for edge in (width, height))
    frame = picture("WEBP")[12:]
    body = b"WEBP" + b"VP8X" + struct.pack("<I", 10) + bytes(4) + canvas + frame
    return b"RIFF" + struct.pack("<I", len(body)) + body


SVG = b'<svg xmlns="http://www.w3.org/2000/svg"><image href="http://127.0.0.1/"/></svg>'
