"""Images of a prompt: their places, and what they do to the hashes of blocks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.protocol.block_hashes import block_hashes
from baton.protocol.errors import InvalidRequest
from baton.protocol.images import ImageInput, check_images, digest_of

ROOT = b"root"
CAT, DOG = b"cat", b"dog"


def _image(data: bytes, start: int, count: int = 4) -> ImageInput:
    return ImageInput(digest_of(data), start, count, data)


@given(st.integers(0, 12), st.integers(1, 5))
def test_blocks_differ_from_the_one_in_which_another_image_begins(start: int, size: int) -> None:
    prompt = [7] * 16
    cat = block_hashes(ROOT, prompt, size, [_image(CAT, start)])
    dog = block_hashes(ROOT, prompt, size, [_image(DOG, start)])
    same = min(len(cat), start // size)
    assert cat[:same] == dog[:same] == block_hashes(ROOT, prompt, size)[:same]
    assert all(one != other for one, other in zip(cat[same:], dog[same:], strict=True))


def test_an_images_place_within_a_block_counts() -> None:
    prompt = [7] * 8
    hashes = {tuple(block_hashes(ROOT, prompt, 8, [_image(CAT, at)])) for at in range(5)}
    assert len(hashes) == 5


@pytest.mark.parametrize(
    "images",
    [
        pytest.param([_image(CAT, 5)], id="beyond the prompt"),
        pytest.param([_image(CAT, 4), _image(DOG, 0)], id="out of order"),
        pytest.param([_image(CAT, 0), _image(DOG, 3)], id="one over another"),
        pytest.param([_image(CAT, 0, 0)], id="no tokens"),
        pytest.param([ImageInput(digest_of(CAT), 0, 4, DOG)], id="another digest"),
    ],
)
def test_images_that_do_not_fit_are_refused(images: list[ImageInput]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_images(images, 8)
    assert caught.value.field == "images"
    check_images([_image(CAT, 0), _image(DOG, 4)], 8)
