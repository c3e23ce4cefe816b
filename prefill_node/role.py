"""PrefillRole: prompt in, token 1 (of each sample) and KV blocks out.

Life of a request here:
    serve()          -> validated and added as Task.PREFILL (engine thread)
    admitted()       -> its blocks are exported under a lease; the handle goes to the router at once
    layer_written()  -> each layer of each chunk is published: a receiver may read it from then on
    on_step()        -> token 1 goes to the router with the step's message
    written()        -> token 1 is on the wire: the export is completed, and unsent parts follow

The export outlives the request: the receiver's ACK, the router's release or the end of the lease
unpins the blocks. Requests for vectors instead of tokens are served by baton/node/pooling.py.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Sequence

from baton.engine.core.engine import Engine
from baton.engine.core.grammars import prepared
from baton.engine.core.images import read_ahead
from baton.engine.state.interface import Task
from baton.engine.thread import StepReport
from baton.node.pooling import PoolingDesk
from baton.node.requests import NodeRequest
from baton.node.role import MakeThread, RoleContext
from baton.protocol.clock import Clock
from baton.protocol.errors import BatonError, KVStale, UnsupportedFeature
from baton.protocol.events import FirstToken, HandleReady, NodeStep, TokenEvent
from baton.protocol.handles import KVHandle
from baton.protocol.kv_spec import BlockLists
from baton.protocol.messages import Submission, SubmitDecode, SubmitEncode
from baton.protocol.request import Request
from baton.runtime.failpoints import FAILPOINTS
from kv_transfer.protocol.base import KVConnector

log = logging.getLogger(__name__)


class PrefillExports:
    """Implements EngineHooks: exports of prompts whose token 1 is not sampled yet.

    Engine thread only. On that thread it calls `exported(request, handle)` when an export begins,
    and `lost(request, error)` when nobody can fetch it any more, so that further computing would be
    useless. It calls `begun(request_id, upto_token)`, if given, for each chunk of each step.
    """

    def __init__(
        self,
        connector: KVConnector,
        exported: Callable[[Request, KVHandle], None],
        lost: Callable[[Request, BatonError], None],
        begun: Callable[[str, int], None] | None = None,
    ) -> None:
        self._connector = connector
        self._exported = exported
        self._lost = lost
        self._begun = begun
        self._open: dict[str, tuple[Request, KVHandle]] = {}

    def may_admit(self, num_tokens: int, num_pending: int) -> bool:
        """Whether there is room for one more export; a single export always fits.

        So prompts are computed only as fast as receivers take them.
        """
        alone = num_pending == 0 and self._connector.export_bytes == 0
        connector = self._connector
        return alone or connector.room_for(connector.bytes_of(num_tokens + num_pending))

    def admitted(self, request: Request, blocks: BlockLists, num_tokens: int) -> None:
        """Export the pinned blocks. If this raises, the engine unpins them and fails the step."""
        handle = self._connector.export(request, 0, blocks, num_tokens)
        self._open[request.id] = (request, handle)
        self._exported(request, handle)

    def layer_written(self, layer: int, progress: Sequence[tuple[str, int]]) -> None:
        if layer == 0 and progress:
            FAILPOINTS.hit("p.mid_chunk")
        if layer == 0 and self._begun is not None:
            for request_id, upto in progress:
                self._begun(request_id, upto)
        for request_id, upto in progress:
            request, handle = self._open.get(request_id, (None, None))
            if request is None or handle is None:
                continue  # given up in an earlier layer of this step
            if not self._connector.publish(handle, layer, upto):
                del self._open[request_id]
                self._lost(request, KVStale("the export was released before token 1"))

    def computed(
        self, request_id: str, events: Sequence[TokenEvent]
    ) -> tuple[KVHandle, tuple[FirstToken, ...]] | None:
        """End the computing of an export with token 1 of each sample.

        Return the arguments of `complete`, or None if the request has no export. `complete` puts
        the tokens into END; there are none if all samples have theirs already.
        """
        _, handle = self._open.pop(request_id, (None, None))
        return None if handle is None else (handle, first_tokens(events))

    def complete(self, request_id: str, events: Sequence[TokenEvent]) -> None:
        """Call `computed` and complete the export at once, for callers that send token 1 to
        nobody.
        """
        due = self.computed(request_id, events)
        if due is not None:
            self._connector.complete(*due)

    def give_up(self, request_id: str) -> KVHandle | None:
        """Forget `request_id`, which is computed no further; return its unfinished export.

        The caller must release the export. Return None if there is none.
        """
        _, handle = self._open.pop(request_id, (None, None))
        return handle


def first_tokens(events: Sequence[TokenEvent]) -> tuple[FirstToken, ...]:
    """Return what END carries of one request's events.

    That is token 1 of each sample, or the candidates with which its beam search begins.
    """
    tokens: list[FirstToken] = []
    for event in events:
        last = len(event.token_ids) - 1
        tokens += (
            FirstToken(
                position=event.position + index,
                token_id=token,
                sample=event.sample,
                finish_reason=event.finish_reason if index == last else None,
                logprobs=event.logprobs[index] if event.logprobs else (),
                drafts=event.drafts if index == last else (),
            )
            for index, token in enumerate(event.token_ids)
        )
        tokens += (
            FirstToken(event.position, each.token_id, rank, cumulative_logprob=each.logprob)
            for rank, each in enumerate(event.candidates)
        )
    return tuple(tokens)


def _add(engine: Engine, request: Request, clock: Clock) -> None:
    engine.add(request, Task.PREFILL)
    engine.stats.queue_seconds += clock.monotonic() - request.arrival
    FAILPOINTS.hit("p.queued")


class PrefillRole:
    """Implements baton.node.role.NodeRole for a prefill node."""

    def __init__(self, context: RoleContext, make_thread: MakeThread) -> None:
        self._context = context
        self._serving: dict[str, NodeRequest] = {}
        # Computed exports whose token 1 is on its way to the router. Only the engine thread adds
        # entries, and only the event loop removes them.
        self._unwritten: dict[tuple[str, int], tuple[KVHandle, tuple[FirstToken, ...]]] = {}
        noted = self._note_chunk if context.traced else None
        self._exports = PrefillExports(
            context.connector, self._handle_ready, self._export_lost, noted
        )
        self.thread = make_thread(self._exports)
        self._pooling = PoolingDesk(self)

    @property
    def fetching(self) -> int:
        return 0

    def check(self, message: Submission) -> None:
        if isinstance(message, SubmitDecode | SubmitEncode):
            text = "a prefill node neither decodes nor encodes for others"
            raise UnsupportedFeature(text, field="task")

    async def serve(self, entry: NodeRequest) -> None:
        if entry.pool is not None:
            return await self._pooling.serve(entry, entry.pool)
        request = entry.request
        self._serving[request.id] = entry
        try:
            grammar = await prepared(self.thread.engine.grammars, request.params.guided)
            model = self.thread.engine.model
            rows = None
            if entry.encoded:
                rows = await self._context.rows.brought(model, request, entry.encoded)
            async with read_ahead(model, request, rows):
                await self.thread.call(lambda engine: _add(engine, request, self._context.clock))
            del grammar  # held until the engine has it
            await asyncio.shield(entry.ended)
            entry.export = None  # from now on the export outlives the request
        finally:
            del self._serving[request.id]
            # This runs after the add, and does nothing if token 1 has been sampled.
            self.thread.post(lambda engine: self._gone(engine, request.id))
            if entry.export is not None:
                self._release(entry.export)

    def ends(self, entry: NodeRequest, event: TokenEvent) -> bool:
        return True  # all samples' events come in one step

    def written(self, events: Sequence[TokenEvent]) -> None:
        # Not earlier: the data plane would send megabytes on the core that should send token 1.
        for event in events:
            due = self._unwritten.pop((event.request_id, event.epoch), None)
            if due is not None:
                self._context.connector.complete(*due)

    def blocks_freed(self) -> None:
        """Let pooling jobs try again; the engine looks for room itself."""
        self._pooling.blocks_freed()

    # ---- engine thread ----

    def hand_on(self, engine: Engine, request: Request) -> KVHandle | None:
        """Return None: what is computed of a prompt is exported already, so nothing more can
        leave.
        """
        return None

    def on_step(self, report: StepReport) -> None:
        of_request: defaultdict[str, list[TokenEvent]] = defaultdict(list)
        for event in report.events:
            of_request[event.request_id].append(event)
        for request_id, events in of_request.items():
            FAILPOINTS.hit("p.done")
            due = self._exports.computed(request_id, events)
            if due is not None:
                self._unwritten[request_id, events[0].epoch] = due
        for failed in report.failed:
            self._leave(self.thread.engine, failed.request_id)
        self._context.connector.want_back(report.short_of_room)

    def _leave(self, engine: Engine, request_id: str) -> None:
        engine.abort(request_id)
        handle = self._exports.give_up(request_id)
        if handle is not None:
            self._context.loop.call_soon_threadsafe(self._release, handle)

    def _gone(self, engine: Engine, request_id: str) -> None:
        self._leave(engine, request_id)
        # This request may have been the one that waited for room. Perhaps no step follows that
        # would report it.
        self._context.connector.want_back(engine.short_of_room)

    def _handle_ready(self, request: Request, handle: KVHandle) -> None:
        self._context.loop.call_soon_threadsafe(self._send_handle, request, handle)

    def _note_chunk(self, request_id: str, upto_token: int) -> None:
        entry = self._serving.get(request_id)
        if entry is not None and entry.spans is not None:
            entry.spans.chunk(upto_token)

    def _export_lost(self, request: Request, error: BatonError) -> None:
        self.thread.engine.abort(request.id)
        self._context.loop.call_soon_threadsafe(self._break_off, request, error)

    # ---- event loop ----

    def _send_handle(self, request: Request, handle: KVHandle) -> None:
        entry = self._find(request)
        if entry is None:  # aborted while the engine admitted it
            self._release(handle)
            return
        entry.export = handle
        if entry.spans is not None:
            connector = self._context.connector
            entry.spans.exported(handle, connector.bytes_of(handle.num_tokens))
        entry.send(NodeStep(handles=(HandleReady(request.id, request.epoch, handle),)))

    def _break_off(self, request: Request, error: BatonError) -> None:
        entry = self._find(request)
        if entry is not None:
            entry.break_off(error)

    def _release(self, handle: KVHandle) -> None:
        self._context.spawn(self._context.connector.release(handle, "the prefill was aborted"))

    def _find(self, request: Request) -> NodeRequest | None:
        entry = self._serving.get(request.id)
        return None if entry is None or entry.request.epoch != request.epoch else entry
