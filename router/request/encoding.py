"""ImageEncoding: has the images of one request encoded before a node computes its prompt.

    route     nodes are chosen, as for any request
    encode    images that the chosen node needs go to encode nodes: each file to the node that its
              digest names, so that equal images of many requests are encoded once
    answer    handles of their rows, which go along with the submission
    release   the exports, once the prompt is admitted or given up

If an encode node fails, another one is asked. If none is left, the node that computes the prompt
encodes the images itself; a prefill node without a vision tower is then not chosen. Without encode
nodes nothing of this happens. Event loop only.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeAlias

from baton.protocol.errors import InternalError, NodeLost, error_from_code
from baton.protocol.events import Encoded, RequestFailed
from baton.protocol.handles import EncodedImage
from baton.protocol.images import ImageInput
from baton.protocol.messages import SubmitEncode
from baton.protocol.request import Request
from baton.runtime.concurrency import together
from router.nodes.attachments import Attempt, NodeEvent, SessionLost
from router.nodes.policy import Ask, NodeSnapshot, Route
from router.request import choice
from router.request.attempt import NodeAttempts
from router.request.dispatch_parts import DispatchParts
from router.request.timeline import Milestone
from router.request.trace import RequestTrace

logger = logging.getLogger(__name__)
EncodedImages: TypeAlias = tuple[EncodedImage, ...]


class ImageEncoding:
    """The images of one journey. Mutates its `ask`; exports are kept in its `attempts`."""

    def __init__(
        self,
        attempts: NodeAttempts,
        ask: Ask,
        parts: DispatchParts,
        trace: RequestTrace,
        mark: Callable[[Milestone], object],
    ) -> None:
        self._attempts = attempts
        self._ask = ask
        self._parts = parts
        self._trace = trace
        self._mark = mark
        self._avoided: set[str] = set()  # boots that failed this request

    async def routed(self, request: Request) -> tuple[Route, EncodedImages]:
        """Choose the nodes of a request, and have its images encoded for them.

        Raises what choice.route() does, InvalidRequest for a broken file, and NodeLost if too many
        nodes have died of the request.
        """
        ask, parts = self._ask, self._parts
        ask.encodes = bool(self._encoders())
        route = choice.route(ask, parts, self._trace)
        wanted = _wanted(ask, route)
        if not wanted or not ask.encodes:
            return route, ()
        self._mark(Milestone.ENCODING)
        encoded = await self._encoded(request, wanted)
        if len(encoded) < len(wanted):
            ask.encodes = False
            route = choice.route(ask, parts, self._trace)
        return route, encoded

    def rows_lost(self) -> None:
        """Note that a node did not get the rows of this epoch: avoid those that have them."""
        self._avoided |= {attempt.boot_id for attempt, _ in self._attempts.images}

    def _encoders(self) -> list[NodeSnapshot]:
        """Return the encode nodes that may be asked."""
        return [
            node
            for node in self._parts.registry.snapshots(encoding=True)
            if node.takes_requests
            and node.model == self._ask.model
            and node.boot_id not in self._avoided
            and self._ask.model_digest in (None, node.model_digest)
        ]

    async def _encoded(self, request: Request, wanted: Sequence[ImageInput]) -> EncodedImages:
        """Return the images that some encode node has encoded; it may not be all of them."""
        left = {image.digest: image for image in wanted}
        found: list[EncodedImage] = []
        while left and (nodes := self._encoders()):
            of_node: defaultdict[str, list[ImageInput]] = defaultdict(list)
            for image in left.values():
                of_node[named(nodes, image.digest).boot_id].append(image)
            for some in await together([self._on(b, request, i) for b, i in of_node.items()]):
                found += some
                for image in some:
                    del left[image.digest]
        return tuple(found)

    async def _on(self, boot_id: str, request: Request, images: list[ImageInput]) -> EncodedImages:
        """Return what one encode node makes of images; () if it failed, and avoid it from then on.
        Raises its refusal of a file, and NodeLost after too many deaths."""
        attempt, event = await self._asked(boot_id, replace(request, images=tuple(images)))
        match event:
            case Encoded():
                self._attempts.images += [(attempt, each.handle) for each in event.images]
                if {each.digest for each in event.images} != {each.digest for each in images}:
                    raise InternalError("an encode node answered with other images")
                return event.images
            case RequestFailed():
                error = error_from_code(event.code, event.message, event.field)
                if not event.retryable:
                    raise error
            case SessionLost():
                error = NodeLost(f"node {event.node_id} was lost: {event.reason}")
                if event.suspect:
                    self._ask.blame(boot_id, hung=event.stalled)
                    if await choice.is_guilty(self._ask, self._parts.registry):
                        raise error
            case _:
                raise InternalError(f"{type(event).__name__} is no answer of an encode node")
        self._avoided.add(boot_id)
        logger.info("request %s: images go elsewhere: %s", request.id, error.message)
        return ()

    async def _asked(self, boot_id: str, request: Request) -> tuple[Attempt, NodeEvent]:
        """Submit images to a node; return its answer. Cancelling the call aborts the work there."""
        inbox: asyncio.Queue[NodeEvent] = asyncio.Queue()
        attempt = Attempt(request.id, request.epoch, inbox.put_nowait)
        session = self._parts.registry.session(boot_id)
        if session is None:
            return attempt, SessionLost(boot_id, "it is not connected")
        session.attach(attempt)
        answered = False
        try:
            session.send(SubmitEncode(request))
            event = await inbox.get()
            answered = True
            return attempt, event
        finally:
            attempt.leave(abort=not answered)


def _wanted(ask: Ask, route: Route) -> list[ImageInput]:
    """Return the images whose rows the computing node needs: those behind what it has cached. A
    node without a vision tower gets all, as it may have cached less than is known here."""
    node, cached = route.decode, route.decode_cached
    if route.prefill is not None:
        node, cached = route.prefill, route.prefill_cached
    begin = 0 if node.needs_rows else cached
    needed = [image for image in ask.images if image.end > begin]
    return list({image.digest: image for image in needed}.values())


def named(nodes: Sequence[NodeSnapshot], digest: bytes) -> NodeSnapshot:
    """Return the node that a digest names: always the same one while it is there (rendezvous
    hashing)."""

    def rank(node: NodeSnapshot) -> bytes:
        return hashlib.blake2b(node.node_id.encode() + digest, digest_size=8).digest()

    return max(nodes, key=rank)
