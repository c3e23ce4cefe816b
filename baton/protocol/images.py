"""Images of a prompt: where their placeholder tokens stand, and the files themselves.

    prompt_ids   [ text | <vision_start> | pad pad pad pad ... | <vision_end> | text ]
                                          ^start, num_tokens
A router writes the placeholders and sends the files with the request; a node turns each file into
one row per placeholder. Equal placeholders stand for different images, so KV blocks are told apart
by the digests (block_hashes.py).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from baton.protocol.errors import InvalidRequest

DIGEST_BYTES: Final = 16


def digest_of(data: bytes) -> bytes:
    """Return the digest of a file: equal files are one image."""
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).digest()


@dataclass(frozen=True, slots=True)
class ImageInput:
    """One image: its placeholders are prompt_ids[start : start + num_tokens].

    They may have other tokens between them, such as Pixtral's ends of rows. `data` is the file as
    it came (PNG, JPEG, WebP or GIF), `digest` its digest_of().
    """

    digest: bytes
    start: int
    num_tokens: int
    data: bytes = field(repr=False, default=b"")

    @property
    def end(self) -> int:
        return self.start + self.num_tokens


def check_images(images: Sequence[ImageInput], num_prompt: int) -> None:
    """Raise InvalidRequest unless the images stand one behind the other within the prompt, and
    each digest is that of its file."""
    at = 0
    for image in images:
        if image.num_tokens < 1 or image.start < at or image.end > num_prompt:
            raise InvalidRequest("images must lie in the prompt, in order", field="images")
        if image.digest != digest_of(image.data):
            raise InvalidRequest("an image's digest is not that of its file", field="images")
        at = image.end


def salt(images: Sequence[ImageInput], start: int, end: int) -> bytes:
    """Return what the hash of the block of tokens [start, end) says of images: the place and the
    digest of each that begins there; empty if none does."""
    return b"".join(
        (image.start - start).to_bytes(4, "little") + image.digest
        for image in images
        if start <= image.start < end
    )
