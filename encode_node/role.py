"""EncodeRole: images in, rows of the model's input out.

Life of a request here:
    known     -> the rows of an image that was encoded before are pinned and exported again
    read      -> else its file is decoded, on a thread of its own
    encoded   -> the vision tower runs on the engine's thread; the rows lie in blocks of the pool,
                 found again by the file's digest, and are exported under a lease
    answered  -> one Encoded with the handles of all images of the request

Nothing of a request is left then. An export ends by the fetcher's ACK, by the router's release or
with its lease; the rows stay in the pool until others need the blocks. Equal images of several
requests wait for each other, so an image is encoded once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from torch import Tensor

from baton.engine.core.engine import Engine
from baton.engine.thread import StepReport
from baton.engine.vision.image_rows import encode, encoder_of, pin_known
from baton.node.requests import NodeRequest
from baton.node.role import MakeThread, RoleContext
from baton.protocol.errors import UnsupportedFeature
from baton.protocol.events import Encoded, NodeStep, TokenEvent
from baton.protocol.handles import EncodedImage, KVHandle
from baton.protocol.images import ImageInput
from baton.protocol.messages import Submission, SubmitEncode
from baton.protocol.request import Request
from baton.runtime.concurrency import DigestLocks
from baton.runtime.failpoints import FAILPOINTS


class EncodeRole:
    """Implements baton.node.role.NodeRole for an encode node."""

    def __init__(self, context: RoleContext, make_thread: MakeThread) -> None:
        self._context = context
        self.thread = make_thread(None)
        self._turns = DigestLocks()
        self._freed = asyncio.Event()

    @property
    def fetching(self) -> int:
        return 0

    def check(self, message: Submission) -> None:
        if not isinstance(message, SubmitEncode):
            raise UnsupportedFeature("an encode node only encodes images", field="task")

    async def serve(self, entry: NodeRequest) -> None:
        """Answer with the handles of all images. Raises InvalidRequest for a broken file,
        Unavailable for an image with more rows than the pool holds."""
        request, found = entry.request, list[EncodedImage]()
        answered = False
        try:
            for image in {each.digest: each for each in request.images}.values():
                found.append(await self._encoded(request, image))
            FAILPOINTS.hit("e.encoded")
            entry.send(NodeStep(encoded=(Encoded(request.id, request.epoch, tuple(found)),)))
            answered = True
            entry.end()
        finally:
            if not answered:  # an export that was on its way here goes with its lease
                for each in found:
                    self._release(each.handle)

    async def _encoded(self, request: Request, image: ImageInput) -> EncodedImage:
        async with self._turns.of(image.digest):
            known = await self._exported(request, image, None)
            if known is not None:
                return known
            encoder = encoder_of(self.thread.engine)
            pixels = await asyncio.to_thread(encoder.read, image.data)
            while True:
                # Read before the try, so that blocks freed during it are not missed.
                freed = self._freed
                found = await self._exported(request, image, pixels)
                if found is not None:
                    return found
                await freed.wait()

    async def _exported(
        self, request: Request, image: ImageInput, pixels: dict[str, Tensor] | None
    ) -> EncodedImage | None:
        return await self.thread.call(lambda engine: self._export(engine, request, image, pixels))

    def _release(self, handle: KVHandle) -> None:
        self._context.spawn(self._context.connector.release(handle, "nobody heard of it"))

    def ends(self, entry: NodeRequest, event: TokenEvent) -> bool:
        return True  # there are no token events

    def written(self, events: Sequence[TokenEvent]) -> None:
        """Do nothing: nothing waits for these events."""

    def blocks_freed(self) -> None:
        """Let images that wait for room try again."""
        self._freed.set()
        self._freed = asyncio.Event()

    # ---- engine thread ----

    def _export(
        self, engine: Engine, request: Request, image: ImageInput, pixels: dict[str, Tensor] | None
    ) -> EncodedImage | None:
        """Export the rows of an image; None if they are not known and there are no `pixels`, or no
        room for its rows."""
        pinned = pin_known(engine, image.digest)
        if pinned is None and pixels is not None:
            FAILPOINTS.hit("e.encoding")
            pinned = encode(engine, image.digest, pixels)
        if pinned is None:
            return None
        connector = self._context.connector
        try:
            handle = connector.export(request, 0, pinned.blocks, pinned.num_rows)
        except Exception:
            engine.unpin(pinned.blocks)  # there is no export that would return them
            raise
        for layer in range(len(engine.info.layers)):
            connector.publish(handle, layer, pinned.num_rows)
        connector.complete(handle, ())
        return EncodedImage(image.digest, pinned.height, pinned.width, handle)

    def hand_on(self, engine: Engine, request: Request) -> KVHandle | None:
        """Return None: a request has nothing here that could move."""
        return None

    def on_step(self, report: StepReport) -> None:
        """Do nothing: no step runs here."""
