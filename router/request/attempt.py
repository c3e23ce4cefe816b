"""NodeAttempts: the nodes that work on one request, and the KV export between them.

NodeAttempts holds at most one Attempt for the prefill and one for the decode, collects their events
in one inbox, and renews the lease of the export until the decode node renews it. After a migration,
`prefill` is the attempt at the decode node that exported the KV. The decisions when to submit, drop
or finish an attempt are not made here but in router/request/dispatch.py.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from baton.protocol.errors import BatonError, NodeLost
from baton.protocol.events import NodeTimings, TokenEvent
from baton.protocol.handles import KVHandle
from baton.protocol.messages import (
    Prefilled,
    ReleaseExport,
    RenewExport,
    StopSample,
    SubmitDecode,
    SubmitPrefill,
)
from router.nodes.attachments import Attempt, NodeEvent, SessionLost
from router.nodes.policy import NodeSnapshot
from router.nodes.registry import NodeRegistry


class HopFailed(Exception):
    """A node could not do its part of a request; another node may be able to.

    `export_lost`: the KV export cannot be fetched any more, so the prompt is computed again.
    """

    def __init__(self, error: BatonError, *, export_lost: bool = False) -> None:
        super().__init__(str(error))
        self.error = error
        self.export_lost = export_lost


class NodeAttempts:
    """The attempts of one request and its KV export.

    `visited` takes where the time went on a node. `inbox`: the nodes' other events, for the
    journey. `handle`: the KV export, None before there is one. `prefilled`: the prompt is computed.
    `decoding`: the decode node has sent an event, so it needs the export no more.
    `exporter_suspect`: the exporter was lost, and this request may be the cause. `images`: exports
    of encode nodes for the node that computes the prompt, each with the attempt that made it.
    """

    def __init__(self, registry: NodeRegistry, visited: Callable[[str, NodeTimings], None]) -> None:
        self._registry = registry
        self._visited = visited
        self.inbox: deque[tuple[Attempt, NodeEvent]] = deque()
        self._reader: asyncio.Future[None] | None = None  # what the journey waits for
        # None: there is no lease to renew, or the decode node renews it.
        self._renewal: asyncio.TimerHandle | None = None
        self.prefill: Attempt | None = None
        self.decode: Attempt | None = None
        self.handle: KVHandle | None = None
        self.prefilled = False
        self.decoding = False
        self._timed_out = False  # a fetch of this export has timed out before
        self.exporter_suspect = False
        self.images: list[tuple[Attempt, KVHandle]] = []
        # Shows a decode node's event without the journey's task, if the event only continues its
        # sample. None: all events go to the inbox.
        self.shows: Callable[[TokenEvent], bool] | None = None

    @property
    def has_export(self) -> bool:
        """Whether there is an export that another decode node may fetch."""
        return (
            self.handle is not None
            and self.prefill is not None
            and self.prefill.connected
            and not self.decoding
        )

    @property
    def exporter_is_suspect(self) -> bool:
        """Whether this request may be the cause of the exporter's death, if the exporter has died.

        The decode node may report the death before this router notices it. While the session with
        the exporter stands, the answer is what it would be if the exporter died now.
        """
        attempt = self.prefill
        if attempt is not None and attempt.connected and attempt.session is not None:
            return attempt.request_id in attempt.session.suspects
        return self.exporter_suspect

    def needs_prefill(self, lost: SessionLost) -> bool:
        """Whether the prefill node's loss ends the epoch: nobody subscribed to its export, or the
        decode node would notice the loss late or never.

        The latter is so if the exporter's machine is silent, or if the exporter's engine hangs
        during the prefill while its data plane still asks the decode node to wait. It is not so
        once the decode node decodes.
        """
        unseen = not self.decoding and (lost.silent or (lost.stalled and not self.prefilled))
        return unseen or not (self.is_subscribed or (lost.drained and self.prefilled))

    def submit(
        self, node: NodeSnapshot, message: SubmitPrefill | SubmitDecode, num_tokens: int
    ) -> Attempt:
        """Send the message's request to `node` and return the attempt there.

        `num_tokens`: prompt tokens that the node has to compute. Raises NodeLost when the node has
        just gone away.
        """
        request = message.request
        session = self._registry.session(node.boot_id)
        if session is None:
            raise NodeLost(f"node {node.node_id} is not connected")

        def deliver(event: NodeEvent) -> None:
            # Nearly all tokens of all streams come through here. They are shown at once, without a
            # switch to the journey's task, unless an earlier event still waits for that task.
            shows = None if attempt is not self.decode or self.inbox else self.shows
            if shows is None or not isinstance(event, TokenEvent) or not shows(event):
                if isinstance(event, NodeTimings):
                    self._visited(node.node_id, event)
                else:
                    self.inbox.append((attempt, event))
                    if self._reader is not None and not self._reader.done():
                        self._reader.set_result(None)

        attempt = Attempt(request.id, request.epoch, deliver, max(0, num_tokens))
        session.attach(attempt)
        session.send(message)
        return attempt

    def wait(self) -> asyncio.Future[None]:
        """Return a future that is done when the next event comes into the empty inbox. One task
        waits at a time: asyncio.Queue, which allows several, costs four times as much."""
        self._reader = asyncio.get_running_loop().create_future()
        return self._reader

    def take_handle(self, handle: KVHandle) -> None:
        """Store the handle of an export that has just been made, and begin to renew its lease."""
        self.handle = handle
        if self.images:
            self._release_images()  # the prompt is admitted, so their rows are there
        self._timed_out = False
        self._renew_later(handle)

    def may_fetch_again(self) -> bool:
        """Note that a fetch of the export has timed out; return whether to try once more.

        True if the exporter is still connected and this was the first time-out of this export.
        """
        first, self._timed_out = not self._timed_out, True
        return self.has_export and first

    def take_over(self, handle: KVHandle) -> None:
        """Make the decode node the exporter: it has let go of the running request and exported its
        KV as `handle`. Tokens that it still sends for the request are ignored."""
        if self.prefill is not None:
            self.prefill.leave(abort=False)
        if self.decode is not None:
            self.decode.leave(abort=False)
        self.prefill, self.decode = self.decode, None
        self.prefilled, self.decoding, self.shows = True, False, None
        self.exporter_suspect = False
        self.take_handle(handle)

    def has_prefilled(self) -> None:
        """Note that token 1 has come, and tell the decode node, if it has the request already."""
        if not self.prefilled and self.decode is not None:
            self.decode.send(Prefilled(self.decode.request_id, self.decode.epoch))
        self.prefilled = True

    def renew(self) -> None:
        """Renew the export's lease now, and again after each third of the lease time."""
        if self.handle is None or self.prefill is None:
            return
        self.prefill.send(RenewExport(self.handle))
        self._renew_later(self.handle)

    def _renew_later(self, handle: KVHandle) -> None:
        self.stop_renewing()
        loop = asyncio.get_running_loop()
        self._renewal = loop.call_later(handle.lease_ms / 3000, self.renew)

    def stop_renewing(self) -> None:
        """Stop renewing the lease: from now on the decode node renews it, and reports the
        exporter's death."""
        if self._renewal is not None:
            self._renewal.cancel()
            self._renewal = None

    @property
    def is_subscribed(self) -> bool:
        """Whether the decode node fetches the export and renews its lease."""
        return self.handle is not None and self._renewal is None

    def pending_events(self) -> list[tuple[Attempt, NodeEvent]]:
        """Remove and return the events that have been delivered and that nobody has read."""
        pending = list(self.inbox)
        self.inbox.clear()
        return pending

    def drop_decode(self) -> None:
        """Abort the request on the decode node, which failed. Keep the export, and let this router
        renew its lease again."""
        if self.decode is not None:
            self.decode.leave(abort=True)
        self.decode = self.shows = None
        self.renew()

    def stop_sample(self, sample: int) -> None:
        """Ask the decode node to end one of the request's samples."""
        attempt = self.decode
        if attempt is not None:
            attempt.send(StopSample(attempt.request_id, attempt.epoch, sample))

    def give_up(self, why: str) -> None:
        """Abort the request on both nodes and release the export, with `why` as the reason."""
        if self.decode is not None:
            self.decode.leave(abort=True)
        if self.prefill is not None:
            self.prefill.leave(abort=True)
            if self.handle is not None and not self.decoding:
                self.prefill.send(ReleaseExport(self.handle, why))
        self._forget()

    def finish(self) -> None:
        """Leave both nodes without aborting: the decode node has ended the request by itself."""
        for attempt in (self.prefill, self.decode):
            if attempt is not None:
                attempt.leave(abort=False)
        self._forget()

    def _release_images(self) -> None:
        for attempt, handle in self.images:
            attempt.send(ReleaseExport(handle, "fetched or not needed"))
        self.images = []

    def _forget(self) -> None:
        self.stop_renewing()
        if self.images:
            self._release_images()
        self.prefill = self.decode = self.handle = None
        self.prefilled = self.decoding = self.exporter_suspect = False
        self.shows = None
