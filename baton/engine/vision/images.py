"""Images: the images of an engine's requests, from their files to rows of the model's input.

    read(request)      file -> pixels, placeholders counted        any thread; before admission
    make_rows(chunks)  pixels -> vision tower -> ImageRows         the thread of the steps
    release(chunks)    a request forgets rows that it needs no more

An image is decoded and encoded once for all requests that have it (by digest), as long as the cache
of pixels and rows keeps it; its bytes are bounded. A request holds the rows that its next chunks
need, so it never encodes an image twice. Rows behind a prefix hit are never made.

Rows may also come from an encode node:
    keep_fetched(...)  rows -> the cache                           any thread
    lent(...)          `read` finds these rows, whatever the cache keeps; the request then has them
Without a reader this node has no vision tower, and rows come in no other way.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from baton.engine.models.tower import VisionTower
from baton.engine.state.images import ImageRows, PromptImage, PromptImages
from baton.engine.state.interface import SequenceChunk
from baton.engine.vision.pixels import PixelReader
from baton.protocol.errors import InvalidRequest, RowsLost
from baton.protocol.images import ImageInput
from baton.protocol.request import Request


@dataclass(frozen=True, slots=True)
class KnownImage:
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
    """Owns the cache of one engine. `most_bytes`: what pixels and rows in it may take. `reader`:
    None = this node has no vision tower."""

    def __init__(self, reader: PixelReader | None, tower: VisionTower, most_bytes: int) -> None:
        self.tower = tower
        self.most_bytes = most_bytes
        self._reader = reader
        self._lock = threading.Lock()  # over all below; files are read outside it
        self._cache: OrderedDict[bytes, KnownImage] = OrderedDict()
        self._lent: dict[bytes, list[KnownImage]] = {}  # once for each request that has it lent
        self._num_bytes = 0
        self._num_encoded = 0
        self._num_reused = 0
        self._num_fetched = 0

    @property
    def mutual(self) -> bool:
        """Whether the tokens of an image see each other, and must be computed in one step."""
        return self.tower.family.mutual

    @property
    def has_tower(self) -> bool:
        """Whether this node can encode images itself."""
        return self._reader is not None

    @property
    def num_bytes(self) -> int:
        """The bytes of pixels and rows in the cache."""
        return self._num_bytes

    def take_counts(self) -> tuple[int, int, int]:
        """Return since the last call: how many images were encoded here, how many requests found an
        image encoded for another, how many came from encode nodes."""
        with self._lock:
            counts = self._num_encoded, self._num_reused, self._num_fetched
            self._num_encoded = self._num_reused = self._num_fetched = 0
        return counts

    def read(self, request: Request) -> PromptImages | None:
        """Read the files of a request; None if it has none. Raises InvalidRequest for a broken
        file, and for placeholders that are not as many as the image has rows; RowsLost without a
        vision tower, for an image whose rows are not here. From any thread."""
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

    # ---- rows of encode nodes ----

    def encoded(self, digest: bytes) -> KnownImage | None:
        """Return an image whose rows are in the cache. From any thread."""
        with self._lock:
            known = self._cache.get(digest)
            if known is None or known.rows is None:
                return None
            self._cache.move_to_end(digest)
            self._num_reused += 1
            return known

    def keep_fetched(self, digest: bytes, grid: tuple[int, int], rows: ImageRows) -> KnownImage:
        """Keep rows that an encode node has made, if they fit. From any thread."""
        known = KnownImage(grid, rows=rows)
        self._keep(digest, known)
        with self._lock:
            self._num_fetched += 1
        return known

    @contextmanager
    def lent(self, known: Mapping[bytes, KnownImage]) -> Iterator[None]:
        """Let `read` find these images, by digest, even if the cache forgets them. From any
        thread."""
        with self._lock:
            for digest, each in known.items():
                self._lent.setdefault(digest, []).append(each)
        try:
            yield
        finally:
            with self._lock:
                for digest in known:
                    self._lent[digest].pop()
                    if not self._lent[digest]:
                        del self._lent[digest]

    # ---- inside ----

    def _placed(self, request: Request, image: ImageInput) -> PromptImage:
        with self._lock:
            lent = self._lent.get(image.digest)
            known = lent[-1] if lent else None
        rows = None if known is None else known.rows
        height, width = (known or self._known(image)).grid
        prompt, token, family = request.prompt_ids, self.tower.token, self.tower.family
        places = tuple(at for at in range(image.start, image.end) if prompt[at] == token)
        gaps = not family.breaks and len(places) != image.num_tokens
        if gaps or len(places) != height * width:
            raise InvalidRequest(
                f"an image has {height * width} rows, and its {image.num_tokens} tokens of the "
                f"prompt have {len(places)} placeholders (token {token})",
                field="images",
            )
        return PromptImage(image, places, (height, width) if family.grid else None, rows)

    def _known(self, image: ImageInput) -> KnownImage:
        with self._lock:
            known = self._cache.get(image.digest)
            if known is not None:
                self._cache.move_to_end(image.digest)
                return known
        if self._reader is None:
            raise RowsLost("no encode node's rows of an image are here, and no vision tower")
        pixels = self._reader.read(image.data)
        known = KnownImage(self.tower.grid(pixels), pixels)
        self._keep(image.digest, known)
        return known

    def _rows(self, image: ImageInput) -> ImageRows:
        known = self._known(image)
        if known.rows is not None:
            with self._lock:
                self._num_reused += 1
            return known.rows
        assert known.pixels is not None, "there are pixels until there are rows"
        rows = self.tower.rows(known.pixels)
        with self._lock:
            self._num_encoded += 1
        self._keep(image.digest, KnownImage(known.grid, rows=rows))
        return rows

    def _keep(self, digest: bytes, known: KnownImage) -> None:
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
