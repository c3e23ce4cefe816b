"""Images: the images of an engine's requests, from their files to rows of the model's input.

    read(request)      file -> pixels, placeholders counted        any thread; before admission
    make_rows(chunks)  pixels -> vision tower -> ImageRows         the thread of the steps
    release(chunks)    a request forgets rows that it needs no more

An image is decoded and encoded once for all requests that have it (by digest), as long as the cache
of pixels and rows keeps it; its bytes are bounded. A request holds the rows that its next chunks
need, so it never encodes an image twice. Rows behind a prefix hit are never made.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from baton.engine.models.tower import VisionTower
from baton.engine.state.images import ImageRows, PromptImage, PromptImages
from baton.engine.state.interface import SequenceChunk
from baton.engine.vision.pixels import ImageReader
from baton.protocol.errors import InvalidRequest
from baton.protocol.images import ImageInput
from baton.protocol.request import Request


@dataclass(frozen=True, slots=True)
class _Known:
    """What is known of a file: its grid of tokens, and its pixels or, once encoded, its rows."""

    grid: tuple[int, int]
    pixels: dict[str, Tensor] | None = None
    rows: ImageRows | None = None

    @property
    def num_bytes(self) -> int:
        if self.rows is not None:
            return self.rows.num_bytes
        return sum(value.nbytes for value in (self.pixels or {}).values())


class Images:
    """Owns the cache of one engine. `most_bytes`: what pixels and rows in it may take."""

    def __init__(self, reader: ImageReader, tower: VisionTower, most_bytes: int) -> None:
        self.tower = tower
        self.most_bytes = most_bytes
        self._reader = reader
        self._lock = threading.Lock()  # over the cache; files are read outside it
        self._cache: OrderedDict[bytes, _Known] = OrderedDict()
        self._num_bytes = 0
        self._num_encoded = 0
        self._num_reused = 0

    @property
    def mutual(self) -> bool:
        """Whether the tokens of an image see each other, and must be computed in one step."""
        return self.tower.family.mutual

    @property
    def num_bytes(self) -> int:
        """The bytes of pixels and rows in the cache."""
        return self._num_bytes

    def take_counts(self) -> tuple[int, int]:
        """Return since the last call: how many images were encoded, and how many requests found an
        image encoded for another. For the thread of the steps."""
        counts = self._num_encoded, self._num_reused
        self._num_encoded = self._num_reused = 0
        return counts

    def read(self, request: Request) -> PromptImages | None:
        """Read the files of a request; None if it has none. Raises InvalidRequest for a broken
        file, and for placeholders that are not as many as the image has rows. From any thread."""
        if not request.images:
            return None
        placed = tuple(self._placed(request, each) for each in request.images)
        return PromptImages(placed, self.mutual)

    def make_rows(self, chunks: Sequence[SequenceChunk]) -> None:
        """Set the rows of all images that the chunks need."""
        for chunk in chunks:
            if chunk.images is not None:
                for image, _, _ in chunk.images.parts(chunk.start, len(chunk.token_ids)):
                    if image.rows is None:
                        image.rows = self._rows(image.image)

    def release(self, chunks: Sequence[SequenceChunk]) -> None:
        """Let the requests forget rows that their chunks, which are laid out, needed last."""
        for chunk in chunks:
            if chunk.images is not None:
                end = chunk.start + len(chunk.token_ids)
                for image in chunk.images.images:
                    if image.image.end <= end:
                        image.rows = None

    # ---- inside ----

    def _placed(self, request: Request, image: ImageInput) -> PromptImage:
        height, width = self._known(image).grid
        prompt, token, family = request.prompt_ids, self.tower.token, self.tower.family
        places = tuple(at for at in range(image.start, image.end) if prompt[at] == token)
        gaps = not family.breaks and len(places) != image.num_tokens
        if gaps or len(places) != height * width:
            raise InvalidRequest(
                f"an image has {height * width} rows, and its {image.num_tokens} tokens of the "
                f"prompt have {len(places)} placeholders (token {token})",
                field="images",
            )
        return PromptImage(image, places, (height, width) if family.grid else None)

    def _known(self, image: ImageInput) -> _Known:
        with self._lock:
            known = self._cache.get(image.digest)
            if known is not None:
                self._cache.move_to_end(image.digest)
                return known
        pixels = self._reader.read(image.data)
        known = _Known(self.tower.grid(pixels), pixels)
        self._keep(image.digest, known)
        return known

    def _rows(self, image: ImageInput) -> ImageRows:
        known = self._known(image)
        if known.rows is not None:
            self._num_reused += 1
            return known.rows
        assert known.pixels is not None, "there are pixels until there are rows"
        rows = self.tower.rows(known.pixels)
        self._num_encoded += 1
        self._keep(image.digest, _Known(known.grid, rows=rows))
        return rows

    def _keep(self, digest: bytes, known: _Known) -> None:
        """Keep what is known of a file, in place of what was, if it fits; forget what was used
        longest ago."""
        with self._lock:
            before = self._cache.get(digest)
            if before is not None and before.rows is not None:
                return
            if known.num_bytes > self.most_bytes:
                return
            if before is not None:
                self._num_bytes -= self._cache.pop(digest).num_bytes
            self._cache[digest] = known
            self._num_bytes += known.num_bytes
            while self._num_bytes > self.most_bytes:
                _, gone = self._cache.popitem(last=False)
                self._num_bytes -= gone.num_bytes
