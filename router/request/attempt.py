"""NodeAttempts: the nodes that work on one request, and the KV export between them. Mechanics only.

It holds at most one Attempt for the prefill and one for the decode, collects their events in one
inbox, and renews the lease of the export until the decode node does that. After a migration the
prefill attempt is the decode node that exported the KV. Not here: when to do which
(router/request/dispatch.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from baton.protocol.errors import BatonError, NodeLost
from baton.protocol.events import TokenEvent
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
    """A node could not do its part; another may. `export_lost`: the KV that was being handed over
    is of no use any more."""

    def __init__(self, error: BatonError, *, export_lost: bool = False) -> None:
        super().__init__(str(error))
        self.error = error
        self.export_lost = export_lost


class NodeAttempts:
    """`inbox`: the nodes' events, for the journey.

    `decoding`: the decode node has sent an event, so it needs the export no more.
    `exporter_suspect`: the exporter was lost, and this request may be the cause.
    """

    def __init__(self, registry: NodeRegistry) -> None:
        self._registry = registry
        self.inbox: asyncio.Queue[tuple[Attempt, NodeEvent]] = asyncio.Queue()
        self._renewal: asyncio.TimerHandle | None = None  # None: nothing to renew, or D does
        self.prefill: Attempt | None = None
        self.decode: Attempt | None = None
        self.handle: KVHandle | None = None
        self.prefilled = False
        self.decoding = False
        self._timed_out = False  # a fetch of the export did
        self.exporter_suspect = False
        # Shows a decode node's event that only continues its sample; None while others are due.
        self.shows: Callable[[TokenEvent], bool] | None = None

    @property
    def has_export(self) -> bool:
        """Is there KV that another decode node may fetch?"""
        return (
            self.handle is not None
            and self.prefill is not None
            and self.prefill.connected
            and not self.decoding
        )

    @property
    def exporter_is_suspect(self) -> bool:
        """If the exporter has died, may this request be the cause? The decode node may know of
        the death before this router does."""
        attempt = self.prefill
        if attempt is not None and attempt.connected and attempt.session is not None:
            return attempt.request_id in attempt.session.suspects
        return self.exporter_suspect

    def is_doomed_by(self, lost: SessionLost) -> bool:
        """The decode node notices this loss of the exporter late or never: its machine is silent,
        or its engine hangs in the prefill while its lane still asks the decode node to wait."""
        return not self.decoding and (lost.silent or (lost.stalled and not self.prefilled))

    def submit(
        self, node: NodeSnapshot, message: SubmitPrefill | SubmitDecode, num_tokens: int
    ) -> Attempt:
        """The message's request goes to `node`, which has so many tokens to compute.

        Raises NodeLost when the node has just gone away.
        """
        request = message.request
        session = self._registry.session(node.boot_id)
        if session is None:
            raise NodeLost(f"node {node.node_id} is not connected")

        def deliver(event: NodeEvent) -> None:
            # Nearly all tokens of all streams come through here. They are shown at once, without a
            # switch to the journey's task, unless an earlier event still waits for that task.
            shows = self.shows if attempt is self.decode and self.inbox.empty() else None
            if shows is None or not isinstance(event, TokenEvent) or not shows(event):
                self.inbox.put_nowait((attempt, event))

        attempt = Attempt(request.id, request.epoch, deliver, max(0, num_tokens))
        session.attach(attempt)
        session.send(message)
        return attempt

    def take_handle(self, handle: KVHandle) -> None:
        """The export has just been made. From now on this router renews its lease."""
        self.handle = handle
        self._timed_out = False
        self._renew_later(handle)

    def may_fetch_again(self) -> bool:
        """After a fetch that timed out: is the exporter still there, and was that the first?"""
        first, self._timed_out = not self._timed_out, True
        return self.has_export and first

    def take_over(self, handle: KVHandle) -> None:
        """The decode node has let go of the running request. Now it is the exporter, and its events
        as an owner are ignored."""
        if self.prefill is not None:
            self.prefill.leave(abort=False)
        if self.decode is not None:
            self.decode.leave(abort=False)
        self.prefill, self.decode = self.decode, None
        self.prefilled, self.decoding, self.shows = True, False, None
        self.exporter_suspect = False
        self.take_handle(handle)

    def has_prefilled(self) -> None:
        """Token 1 is there. Notify the decode node, unless it got the request after that."""
        if not self.prefilled and self.decode is not None:
            self.decode.send(Prefilled(self.decode.request_id, self.decode.epoch))
        self.prefilled = True

    def renew(self) -> None:
        """Renew the lease now and every third of it."""
        if self.handle is None or self.prefill is None:
            return
        self.prefill.send(RenewExport(self.handle))
        self._renew_later(self.handle)

    def _renew_later(self, handle: KVHandle) -> None:
        self.stop_renewing()
        loop = asyncio.get_running_loop()
        self._renewal = loop.call_later(handle.lease_ms / 3000, self.renew)

    def stop_renewing(self) -> None:
        """The decode node renews the lease now, and reports the exporter's death."""
        if self._renewal is not None:
            self._renewal.cancel()
            self._renewal = None

    @property
    def is_subscribed(self) -> bool:
        return self.handle is not None and self._renewal is None

    def pending_events(self) -> list[tuple[Attempt, NodeEvent]]:
        """Events that have been delivered and not been read."""
        return [self.inbox.get_nowait() for _ in range(self.inbox.qsize())]

    def drop_decode(self) -> None:
        """The decode node failed. The export stays, and its lease is renewed here again."""
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
        """Stop every node and release the export: nobody needs their work."""
        if self.decode is not None:
            self.decode.leave(abort=True)
        if self.prefill is not None:
            self.prefill.leave(abort=True)
            if self.handle is not None and not self.decoding:
                self.prefill.send(ReleaseExport(self.handle, why))
        self._forget()

    def finish(self) -> None:
        """The decode node ended the request by itself."""
        for attempt in (self.prefill, self.decode):
            if attempt is not None:
                attempt.leave(abort=False)
        self._forget()

    def _forget(self) -> None:
        self.stop_renewing()
        self.prefill = self.decode = self.handle = None
        self.prefilled = self.decoding = self.exporter_suspect = False
        self.shows = None
