"""RowFetches: brings the rows of images from encode nodes before a request enters the engine.

    brought(...)    each encoded image: in the cache, or fetched under its lease, digests checked
    read_ahead()    (engine/core/images.py) lends them to the engine's images, and reads the others

Rows travel as KV does (kv_transfer/), in an exchange of their own: a row is a token. If they cannot
be fetched, this node encodes the image itself; without a vision tower it refuses with RowsLost, and
the router asks again. Nothing of this exists before the first encoded image comes. Event loop only.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

from baton.engine.loading.loading import LoadedModel
from baton.engine.state.images import ROWS_RULE, ImageRows
from baton.protocol.errors import KVError, RowsLost
from baton.protocol.handles import EncodedImage
from baton.protocol.kv_spec import layout_fingerprint
from baton.protocol.request import Request
from baton.runtime.concurrency import DigestLocks
from kv_transfer.connector import Connector
from kv_transfer.pool.rows import RowMemory

if TYPE_CHECKING:  # lazy at run time: it takes transformers
    from baton.engine.vision.images import Images, KnownImage

log = logging.getLogger(__name__)
# memory, fingerprint -> a connector that only fetches
MakeRowConnector: TypeAlias = Callable[[RowMemory, str], Connector]


class RowFetches:
    """All fetches of rows of one node."""

    def __init__(self, make_connector: MakeRowConnector) -> None:
        self._make_connector = make_connector
        self._exchange: tuple[RowMemory, Connector] | None = None
        self._turns = DigestLocks()

    async def brought(
        self, model: LoadedModel | None, request: Request, encoded: Sequence[EncodedImage]
    ) -> dict[bytes, KnownImage]:
        """Return the encoded images of a request by digest, without those that this node has to
        encode itself.

        Raises RowsLost for rows that did not come to a node without a vision tower.
        """
        images = None if model is None else model.images
        known: dict[bytes, KnownImage] = {}
        if model is None or images is None:
            return known  # the engine will refuse the request
        for image in encoded:
            found = await self._image(model, images, request.epoch, image)
            if found is not None:
                known[image.digest] = found
        return known

    def let_go(self) -> None:
        """Close old idle connections. Called at each heartbeat."""
        if self._exchange is not None:
            self._exchange[1].let_go()

    async def stop(self) -> None:
        if self._exchange is not None:
            await self._exchange[1].stop()

    async def _image(
        self, model: LoadedModel, images: Images, epoch: int, image: EncodedImage
    ) -> KnownImage | None:
        """Return the image with its rows; None if this node has to encode it."""
        async with self._turns.of(image.digest):  # one fetch for all requests that have the image
            known = images.encoded(image.digest)
            if known is not None:
                return known
            try:
                rows = await self._fetched(model, epoch, image)
            except KVError as error:
                log.info("an image's rows did not come: %s", error.message)
                if images.has_tower:
                    return None
                raise RowsLost(f"an image's rows did not come: {error.message}") from error
            return images.keep_fetched(image.digest, (image.height, image.width), rows)

    async def _fetched(self, model: LoadedModel, epoch: int, image: EncodedImage) -> ImageRows:
        memory, connector = self._opened(model)
        blocks = memory.take(image.handle.num_tokens)
        try:
            await connector.fetch(image.handle, epoch, blocks)
        finally:
            rows = memory.give_back(blocks)
        rows = rows.to(model.device)
        return ImageRows(rows[0], rows[1:])

    def _opened(self, model: LoadedModel) -> tuple[RowMemory, Connector]:
        if self._exchange is None:
            assert model.images is not None, "the caller has looked"
            layers = model.images.tower.row_layers
            memory = RowMemory(layers, model.info.dtype or model.info.kv_dtype)
            fingerprint = layout_fingerprint(model.info.digest, ROWS_RULE, layers)
            self._exchange = memory, self._make_connector(memory, fingerprint)
        return self._exchange
