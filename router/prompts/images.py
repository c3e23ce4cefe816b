"""ImageReader: the images of a request -> files that can be decoded, with their sizes.

    part      as the client sent it (router/images/parts.py)
    bytes     base64 becomes bytes in a thread; a URL is fetched (router/images/fetching.py)
    digest    in the same thread; a file that this tenant has sent before is known by it
    size      a child process decodes the file once (baton/images/checker.py)

Every limit is checked as early as it can be: the number of images first, then bytes, then pixels.
No error and no log line quotes an image.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from baton.images.checker import ImageChecker
from baton.images.decoding import DecodedSize
from baton.images.model import ImageFile, ImageModel
from baton.protocol.errors import BatonError, InvalidRequest, ModelRefused, UnsupportedFeature
from baton.protocol.images import digest_of
from baton.runtime.heap import give_back
from baton.text.tokenizer import Tokenizer
from router.images.fetching import MediaFetcher, too_large
from router.images.limits import MAX_REQUEST_BYTES, ImageLimits
from router.images.parts import LOW_EDGE, ImagePart, decoded
from router.prompts.off_loop import OffLoop, WorkLane
from router.tenants.keys import Grant

logger = logging.getLogger(__name__)
AT_ONCE: Final = 4  # images of one request that are fetched or decoded at the same time
CHECK_S: Final = 0.02  # expected time of one image; the tenant is charged the real time afterwards
KNOWN_FILES: Final = 4096


@dataclass(slots=True)
class _KnownSizes:
    """The sizes of files that were decoded lately: a chat sends its images again with every turn.

    Each tenant knows its own files, so the time of an answer tells nobody what others have sent.
    Any thread."""

    _sizes: OrderedDict[tuple[str, bytes], DecodedSize] = field(
        default_factory=OrderedDict[tuple[str, bytes], DecodedSize]
    )
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def find(self, key: tuple[str, bytes]) -> DecodedSize | None:
        with self._lock:
            found = self._sizes.get(key)
            if found is not None:
                self._sizes.move_to_end(key)
            return found

    def keep(self, key: tuple[str, bytes], size: DecodedSize) -> None:
        with self._lock:
            self._sizes[key] = size
            while len(self._sizes) > KNOWN_FILES:
                self._sizes.popitem(last=False)


def images_of(directory: str, tokenizer: Tokenizer) -> ImageModel | None:
    """Return what a model's files say of images; None, with a warning in the log, if they cannot be
    followed: the model's texts are served all the same."""
    try:
        return ImageModel.load(directory, tokenizer)
    except ModelRefused as error:
        logger.warning("no images are served: %s", error.message)
        return None


class ImageReader:
    """Reads the images of requests for one model; `model` None: it reads no images. `close` ends
    the child processes; calling it twice is safe."""

    def __init__(
        self,
        model: ImageModel | None,
        limits: ImageLimits | None = None,
        fetcher: MediaFetcher | None = None,
        checker: ImageChecker | None = None,
    ) -> None:
        self.model = model
        self._limits = limits or ImageLimits()
        self._fetcher = fetcher or MediaFetcher(self._limits)
        self._checker = checker or ImageChecker()
        self._known = _KnownSizes()

    async def read(
        self, parts: Sequence[ImagePart], grant: Grant, off_loop: OffLoop
    ) -> list[ImageFile]:
        """Return the files of a request's images, in order.

        Raises InvalidRequest or UnsupportedFeature, naming the part's field; Overloaded,
        Unavailable."""
        if not parts:
            return []
        limits, first = self._limits, parts[0].field
        if self.model is None:
            raise UnsupportedFeature(f"{first}: the served model reads no images", field=first)
        if len(parts) > limits.num_images:
            late = parts[limits.num_images].field
            message = (
                f"{late}: at most {limits.num_images} images of one request (--limit-mm-per-prompt)"
            )
            raise InvalidRequest(message, field=late)
        for part in parts:
            _check_bytes(part.num_bytes, limits.image_bytes, part.field)
        room = _Room(MAX_REQUEST_BYTES)
        for part in parts:
            room.take(part.num_bytes, part.field)
        turns = asyncio.Semaphore(AT_ONCE)

        async def one(part: ImagePart) -> ImageFile:
            async with turns:
                return await self._one(part, grant, off_loop, room)

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(part)) for part in parts]
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from failures
        return [task.result() for task in tasks]

    async def _one(
        self, part: ImagePart, grant: Grant, off_loop: OffLoop, room: _Room
    ) -> ImageFile:
        fetched = b""
        if part.url:
            most = min(self._limits.image_bytes, room.left)
            fetched = await self._fetcher.get(part.url, part.field, grant, most)
            room.take(len(fetched), part.field)
        return await off_loop.run(
            WorkLane.IMAGE, grant, CHECK_S, lambda: self._checked(part, fetched, grant.domain)
        )

    def _checked(self, part: ImagePart, fetched: bytes, domain: str) -> ImageFile:
        """Decode a part and check its file, in a thread. `fetched`: the file of a URL."""
        data = fetched or decoded(part)
        try:
            _check_bytes(len(data), self._limits.image_bytes, part.field)
            digest = digest_of(data)
            edge = LOW_EDGE if part.low else 0
            size = None if edge else self._known.find((domain, digest))
            if size is None:
                size = self._checker.check(data, self._limits.image_pixels, edge)
            if size.smaller:
                data, digest = size.smaller, digest_of(size.smaller)
            elif not edge:
                self._known.keep((domain, digest), size)
        except BatonError as error:
            if error.field is not None:
                raise
            raise type(error)(
                f"{part.field}: {error.message}",
                field=part.field,
                retry_after_s=error.retry_after_s,
            ) from error
        finally:
            give_back(len(data))
        return ImageFile(data, digest, size.width, size.height, part.field)

    def close(self) -> None:
        self._checker.close()


@dataclass(slots=True)
class _Room:
    """How many bytes the images of one request may still have together."""

    left: int

    def take(self, num_bytes: int, field: str) -> None:
        """Raises InvalidRequest if there is no room for so many."""
        if num_bytes > self.left:
            message = f"{field}: the images of a request have at most {MAX_REQUEST_BYTES} bytes"
            raise InvalidRequest(message, field=field)
        self.left -= num_bytes


def _check_bytes(num_bytes: int, most: int, field: str) -> None:
    if num_bytes > most:
        raise InvalidRequest(f"{field}: {too_large(most)}", field=field)
