"""HandOn: requests that move to another node, and the leases of exports. Event loop only.

An abort that comes before the router has heard of an export ends that export: see `forget`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine
from typing import Any

from baton.engine.thread import EngineThread
from baton.node.requests import NodeRequest, failure
from baton.node.role import NodeRole
from baton.protocol.errors import BatonError, GivenBack
from baton.protocol.events import HandleReady, NodeStep
from baton.protocol.handles import KVHandle
from baton.protocol.messages import AbortRequest
from kv_transfer.protocol.base import KVConnector

log = logging.getLogger(__name__)


class HandOn:
    """Exports requests that move away.

    `role` makes the exports; `spawn` runs a task for the shell.
    """

    def __init__(
        self,
        thread: EngineThread,
        connector: KVConnector,
        role: NodeRole,
        spawn: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        self._thread = thread
        self._connector = connector
        self._role = role
        self._spawn = spawn
        self._exports: dict[str, KVHandle] = {}  # exports of requests that left with their KV

    async def leave(self, entry: NodeRequest) -> None:
        """Let `entry` go: with its KV under a lease if it decodes, otherwise without KV.

        The event sent here is the request's last, after all its tokens, because steps reach this
        loop in the order of the engine thread.
        """
        request = entry.request
        try:
            handle = await self._thread.call(lambda engine: self._role.hand_on(engine, request))
        except Exception:
            log.exception("request %s cannot be exported", request.id)
            handle = None
        if handle is None:
            _give_back(entry)
        elif entry.cancelled:
            await self.release(handle, "nobody wants the request any more")
        else:
            log.info("request %s leaves with %d tokens", request.id, handle.num_tokens)
            self._exports[request.id] = handle
            if entry.spans is not None:
                entry.spans.exported(handle, self._connector.bytes_of(handle.num_tokens))
            ready = HandleReady(request.id, request.epoch, handle)
            entry.send(NodeStep(handles=(ready,)))
            entry.end()

    def forget(self, message: AbortRequest) -> None:
        """Release the export of a request that was aborted before its router had heard of the
        export.
        """
        handle = self._exports.get(message.request_id)
        if handle is not None and handle.epoch <= message.epoch:
            self._spawn(self.release(handle, "the request was aborted"))

    def freed(self, handle: KVHandle) -> None:
        """Forget an export that nobody reads any more."""
        if self._exports.get(handle.request_id) is handle:
            del self._exports[handle.request_id]

    async def renew(self, handle: KVHandle) -> None:
        try:
            await self._connector.renew(handle)
        except BatonError as error:
            # Not an error: the receiver may just have acknowledged the export, and a failed fetch
            # is reported anyway.
            log.debug("request %s: no renewal: %s", handle.request_id, error.message)

    async def release(self, handle: KVHandle, why: str) -> None:
        try:
            await self._connector.release(handle, why)
        except BatonError as error:
            log.debug("request %s: no release: %s", handle.request_id, error.message)


def _give_back(entry: NodeRequest) -> None:
    if not (entry.cancelled or entry.ended.done()):
        error = GivenBack("there is no KV worth moving")
        entry.send(NodeStep(failed=(failure(entry.request, error),)))
        entry.cancel()
