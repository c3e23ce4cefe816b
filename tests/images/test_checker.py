"""Files of clients: what is an image, how large it is, and that no file does harm."""

from __future__ import annotations

import io
import resource
import struct
from collections.abc import Iterator

import pytest
from PIL import Image

from baton.images.checker import ImageChecker
from baton.images.decoding import DecodedSize, decoded_size
from baton.protocol.errors import InvalidRequest, Unavailable
from baton.runtime.children import ChildBudget
from tests.images import files
from tests.images.files import SIZE, animation, picture

MOST = 1 << 20


@pytest.fixture(scope="module")
def checker() -> Iterator[ImageChecker]:
    made = ImageChecker()
    yield made
    made.close()


GOOD = {
    "png": picture(),
    "png with a palette": picture("GIF"),
    "jpeg": picture("JPEG"),
    "progressive jpeg": picture("JPEG", progressive=True),
    "webp": picture("WEBP"),
    "lossless webp": picture("WEBP", lossless=True),
    "extended webp": picture("WEBP", exif=b"Exif\x00\x00" + Image.Exif().tobytes()),
    "gif": animation("GIF"),
    "animated webp": animation("WEBP"),
    "animated png": animation("PNG"),
}


@pytest.mark.parametrize("name", GOOD)
def test_sizes(checker: ImageChecker, name: str) -> None:
    assert checker.check(GOOD[name], MOST) == DecodedSize(*SIZE)


def test_a_turned_photo_has_the_size_that_is_shown(checker: ImageChecker) -> None:
    for orientation, size in ((1, SIZE), (3, SIZE), (6, SIZE[::-1]), (8, SIZE[::-1])):
        exif = Image.Exif()
        exif[0x0112] = orientation
        for kind in ("JPEG", "PNG", "WEBP"):
            assert checker.check(picture(kind, exif=exif), MOST) == DecodedSize(size[0], size[1])


HUGE = {
    "png": files.png_claiming(50_000, 50_000),
    "jpeg": files.jpeg_claiming(65_000, 65_000),
    "gif": files.gif_claiming(65_000, 65_000),
    "webp": files.webp_claiming(16_000, 16_000),
}


@pytest.mark.parametrize("name", HUGE)
def test_pixels_are_counted_before_they_are_decoded(name: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(InvalidRequest, match="pixels, more than the 1048576 that are allowed"):
        decoded_size(HUGE[name], MOST)  # in this process: nothing large is made
    grown_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown_kb < 64 << 10


def _cut(data: bytes) -> bytes:
    return data[: len(data) * 2 // 3]


def _spoiled(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes(byte ^ 0xFF for byte in data[middle : middle + 16]) + data[-9:]


BROKEN = {
    "nothing": b"",
    "text": b"hello",
    "svg": files.SVG,
    "bmp": picture("BMP"),
    "tiff": picture("TIFF"),
    "pdf": b"%PDF-1.7",
    "a beginning alone": b"\x89PNG\r\n\x1a\n",
    "jpeg's beginning": b"\xff\xd8\xff",
    "webp's beginning": b"RIFF\x00\x00\x00\x00WEBP",
    "webp of no kind": b"RIFF" + struct.pack("<I", 30) + b"WEBPXXXX" + bytes(40),
    "no pixels": files.png_claiming(0, 7),
    "no rows": files.png_claiming(60, 40),
    **{f"cut {kind}": _cut(picture(kind)) for kind in ("PNG", "JPEG", "WEBP")},
    "cut gif": _cut(animation("GIF", 1)),
    "spoiled png": _spoiled(picture()),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_files_are_refused(checker: ImageChecker, name: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        checker.check(BROKEN[name], MOST)
    assert len(caught.value.message) < 200
    assert checker.check(GOOD["png"], MOST) == DecodedSize(*SIZE)  # the next file is read


def test_all_cuts_and_spoiled_bytes_end_in_a_size_or_a_refusal(checker: ImageChecker) -> None:
    for kind in ("PNG", "JPEG", "GIF", "WEBP"):
        whole = picture(kind, (16, 16))
        for at in range(0, len(whole), max(1, len(whole) // 25)):
            spoiled = whole[:at] + bytes([whole[at] ^ 0x55]) + whole[at + 1 :]
            for data in (whole[:at], spoiled):
                try:
                    found = checker.check(data, MOST)
                except InvalidRequest:
                    continue
                assert found.width * found.height <= MOST


def test_a_file_that_takes_too_much_is_given_up() -> None:
    small = ImageChecker(ChildBudget(cpu_s=5.0, memory_bytes=96 << 20, wall_s=30.0))
    quick = ImageChecker(ChildBudget(cpu_s=0.05, memory_bytes=1 << 30, wall_s=30.0))
    hasty = ImageChecker(ChildBudget(cpu_s=5.0, memory_bytes=1 << 30, wall_s=0.0))
    bomb = files.bomb(8000)
    try:
        with pytest.raises(InvalidRequest, match="too much memory"):
            small.check(files.bomb(12_000), 1 << 30)
        with pytest.raises(InvalidRequest, match="too much time"):
            quick.check(bomb, 1 << 30)
        with pytest.raises(Unavailable, match="too busy"):
            hasty.check(bomb, 1 << 30)
    finally:
        for each in (small, quick, hasty):
            each.close()
            each.close()


def test_a_large_image_is_made_smaller_if_asked(checker: ImageChecker) -> None:
    found = checker.check(picture("JPEG", (900, 300)), MOST, 90)
    assert (found.width, found.height) == (90, 30)
    with Image.open(io.BytesIO(found.smaller)) as image:
        assert (image.format, image.mode, image.size) == ("PNG", "RGB", (90, 30))
    assert checker.check(picture(), MOST, 90) == DecodedSize(*SIZE)
    assert checker.check(picture("JPEG", (900, 300)), MOST, 90) == found  # the same bytes again
