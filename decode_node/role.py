"""DecodeRole: reserve blocks, fetch the KV, admit the request as computed, stream tokens.

Life of a request with a handle:
    ticket in line  -> the lease on the exporter is renewed while the request waits for blocks
    reserved        -> Subscribed goes to the router: from now on this node reports the exporter's
                       death
    fetched         -> every digest was checked and END confirmed the lease: now the blocks count
    added           -> it forks to its samples; their first events repeat END's tokens, then token 2
                       of each sample follows

Without a handle the prompt is computed here (local prefill). Every exit frees the blocks, the place
in the queue and the slot.

A running request may move to another decode node: `hand_on` exports its blocks as a prefill node
would, and the export is complete at once.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from baton.engine.core.engine import Engine
from baton.engine.core.grammars import prepared
from baton.engine.core.images import read_ahead
from baton.engine.state.adoption import Adoption
from baton.engine.state.interface import Reservation, Task
from baton.engine.thread import StepReport
from baton.node.pooling import PoolingDesk
from baton.node.requests import NodeRequest
from baton.node.role import MakeThread, RoleContext
from baton.node.tracing import FETCH, PREFILLING
from baton.protocol.clock import Clock
from baton.protocol.errors import InvalidRequest, KVTimeout, UnsupportedFeature
from baton.protocol.events import FirstToken, NodeStep, SpanName, Subscribed, TokenEvent
from baton.protocol.handles import KVHandle
from baton.protocol.messages import Submission, SubmitDecode, SubmitEncode, SubmitPrefill
from baton.protocol.request import Request
from baton.runtime.failpoints import FAILPOINTS
from decode_node.admission import FetchAdmission, FetchTicket
from kv_transfer.protocol.base import HeldExport

T = TypeVar("T")


class Seat:
    """What one request holds in the engine. Used on the engine thread only, so in order."""

    def __init__(self, entry: NodeRequest, clock: Clock) -> None:
        self._entry = entry
        self._clock = clock
        self._reservation: Reservation | None = None
        self._adoption: Adoption | None = None
        self._added = False

    def add(self, engine: Engine) -> None:
        """Let the engine compute the prompt. Raises InvalidRequest."""
        engine.add(self._entry.wanted, Task.LOCAL)
        engine.stats.queue_seconds += self._clock.monotonic() - self._entry.request.arrival
        self._added = True

    def reserve(
        self, engine: Engine, num_tokens: int, precision: str | None, adopting: bool
    ) -> Reservation | None:
        """Reserve blocks for KV that comes from elsewhere; return None if there is no room.

        `precision`: the precisions through which the KV has passed on its way here; None if none.
        `adopting`: full blocks can stay where they are. Raises InvalidRequest, naming the field.
        """
        request = self._entry.request
        engine.validate(request, Task.LOCAL)
        # A request of several samples cannot adopt: forks share blocks of this pool only.
        adopting = adopting and engine.may_adopt and request.params.width == 1
        self._reservation = engine.reserve(request, num_tokens, precision, adopting)
        if self._reservation is not None:
            engine.stats.queue_seconds += self._clock.monotonic() - request.arrival
        return self._reservation

    def adopt(self, adoption: Adoption) -> None:
        """Set the adoption that `leave` ends if the request does not enter the engine.

        Event loop, before `add_computed`.
        """
        self._adoption = adoption

    def add_computed(self, engine: Engine, first_tokens: Sequence[FirstToken]) -> None:
        """Enter the engine with the reserved blocks, whose KV was fetched and verified."""
        engine.add(self._entry.wanted, Task.LOCAL, self._reservation, first_tokens, self._adoption)
        self._added = True

    def leave(self, engine: Engine) -> None:
        """Free what the request holds; do nothing if the request has ended by itself."""
        if self._added:
            engine.abort(self._entry.request.id)
        elif self._reservation is not None:
            engine.cancel(self._reservation)
            if self._adoption is not None:
                self._adoption.end()


class DecodeRole:
    """Implements baton.node.role.NodeRole for a decode node."""

    def __init__(self, context: RoleContext, make_thread: MakeThread) -> None:
        self._context = context
        self.thread = make_thread(None)
        self._pooling = PoolingDesk(self)
        self._stepped: set[str] = set()  # requests of the last step; only for failpoints
        self._admission = FetchAdmission(
            context.config.max_queued_fetches, context.config.max_ready_fetches, self.thread.call
        )

    @property
    def fetching(self) -> int:
        return self._admission.num_active

    def check(self, message: Submission) -> None:
        if isinstance(message, SubmitPrefill | SubmitEncode):
            text = "a decode node exports neither prompts nor images"
            raise UnsupportedFeature(text, field="task")
        if isinstance(message, SubmitDecode) and message.handle is not None:
            check_handle(message.request, message.handle)

    async def serve(self, entry: NodeRequest) -> None:
        if entry.pool is not None:
            return await self._pooling.serve(entry, entry.pool)
        seat = Seat(entry, self._context.clock)
        try:
            grammar = await prepared(self.thread.engine.grammars, entry.request.params.guided)
            model = self.thread.engine.model
            rows = None
            if entry.encoded:
                rows = await self._context.rows.brought(model, entry.request, entry.encoded)
            async with read_ahead(model, entry.request, rows):
                if entry.handle is None:
                    await self.thread.call(seat.add)
                else:
                    await self._hand_over(entry, entry.handle, seat)
            del grammar  # held until the engine has it
            await asyncio.shield(entry.ended)
        finally:
            self.thread.post(lambda engine: self._leave(engine, seat))

    async def _hand_over(self, entry: NodeRequest, handle: KVHandle, seat: Seat) -> None:
        """Reserve, fetch, enter the engine. Raises BatonError; KVErrors are retryable."""
        request = entry.request
        ticket = self._admission.ticket(ready=entry.prefilled.is_set())
        try:
            admitted = self._admitted(entry, handle, seat, ticket)
            reservation = await self._while_leased(handle, request.epoch, admitted)
            if entry.spans is not None:
                entry.spans.enter(FETCH)
            entry.send(NodeStep(subscribed=(Subscribed(request.id, request.epoch),)))
            fetching_at = self._context.clock.monotonic()
            fetched = await self._context.connector.fetch(
                handle,
                request.epoch,
                reservation.blocks,
                reservation.start_token,
                adopt=reservation.adopting,
            )
            entry.note(
                SpanName.FETCH,
                fetching_at,
                self._context.clock.monotonic(),
                kv_bytes=fetched.num_bytes,
                lane=fetched.lane,
                layers=fetched.layers,
            )
            if reservation.adopting and fetched.held is not None:
                seat.adopt(self._adoption(request.id, fetched.adopted, fetched.held))
        finally:
            self._admission.release(ticket)
        self._context.observe_fetch(fetched.seconds)
        if entry.spans is not None:
            entry.spans.fetched(fetched)
        await self.thread.call(lambda engine: seat.add_computed(engine, fetched.first_tokens))

    async def _admitted(
        self, entry: NodeRequest, handle: KVHandle, seat: Seat, ticket: FetchTicket
    ) -> Reservation:
        """Return blocks for the export when it is time to fetch.

        For a small export that is after token 1.
        """
        connector = self._context.connector
        precision, adopting = connector.precision_of(handle), connector.adopts(handle)
        reservation = await self._admission.admit(
            ticket, lambda engine: seat.reserve(engine, handle.num_tokens, precision, adopting)
        )
        FAILPOINTS.hit("d.reserved")
        entry.note(SpanName.QUEUE, entry.request.arrival, self._context.clock.monotonic())
        if connector.follows_prefill(handle):
            if entry.spans is not None:
                entry.spans.enter(PREFILLING)
            await entry.prefilled.wait()
        return reservation

    def _adoption(self, request_id: str, pages: Sequence[int], held: HeldExport) -> Adoption:
        context = self._context

        def release() -> None:
            # If the loop is closed, the end of the lease frees the export.
            with contextlib.suppress(RuntimeError):
                context.loop.call_soon_threadsafe(lambda: context.spawn(held.release()))

        return Adoption(request_id, pages, release, held.safe, held.wanted)

    async def _while_leased(self, handle: KVHandle, epoch: int, work: Coroutine[Any, Any, T]) -> T:
        """Await `work` while the lease is renewed; if the lease ends first, raise its error."""
        loop = asyncio.get_running_loop()
        keeper = loop.create_task(self._keep_lease(handle, epoch))
        worker = loop.create_task(work)
        try:
            await asyncio.wait({keeper, worker}, return_when=asyncio.FIRST_COMPLETED)
            if worker.done():
                return worker.result()
            await keeper
            raise KVTimeout("the lease is renewed no more")
        finally:
            for task in (keeper, worker):
                task.cancel()
            await asyncio.gather(keeper, worker, return_exceptions=True)

    async def _keep_lease(self, handle: KVHandle, epoch: int) -> None:
        """Renew the lease every third of its length. Raises KVError when the lease is lost.

        A single renewal without an answer is no loss, because the exporter may be busy for a
        moment.
        """
        lease_s = handle.lease_ms / 1000
        renewed_at = self._context.clock.monotonic()
        while True:
            await asyncio.sleep(lease_s / 3)  # the sender of the handle has just renewed the lease
            try:
                async with asyncio.timeout(lease_s / 3):
                    await self._context.connector.renew(handle, epoch)
                renewed_at = self._context.clock.monotonic()
            except (KVTimeout, TimeoutError) as error:
                if self._context.clock.monotonic() - renewed_at >= lease_s:
                    raise KVTimeout("the exporter does not answer renewals") from error

    def ends(self, entry: NodeRequest, event: TokenEvent) -> bool:
        return event.finish_reason is not None and entry.sample_ended(event.sample)

    def written(self, events: Sequence[TokenEvent]) -> None:
        """Do nothing: nothing waits for these events."""

    def blocks_freed(self) -> None:
        self._admission.wake()
        self._pooling.blocks_freed()

    # ---- engine thread ----

    def hand_on(self, engine: Engine, request: Request) -> KVHandle | None:
        departure = engine.hand_on(request.id)
        if departure is None:
            return None
        connector, num_tokens = self._context.connector, departure.num_tokens
        try:
            handle = connector.export(request, 0, departure.blocks, num_tokens)
        except Exception:
            engine.unpin(departure.blocks)  # there is no export that would return them
            raise
        for layer in range(len(engine.info.layers)):
            connector.publish(handle, layer, num_tokens)
        connector.complete(handle, departure.first_tokens)
        return handle

    def on_step(self, report: StepReport) -> None:
        """Pass failpoints, and tell nodes that have adopted our blocks whether we are short of
        room.
        """
        if FAILPOINTS.armed and report.events:
            self._pass_step({event.request_id for event in report.events})
        self._context.connector.want_back(report.short_of_room)

    def _pass_step(self, ids: set[str]) -> None:
        if not ids <= self._stepped:
            FAILPOINTS.hit("d.step1")
        else:
            FAILPOINTS.hit("d.step_n")
        self._stepped = ids

    def _leave(self, engine: Engine, seat: Seat) -> None:
        seat.leave(engine)
        # This request may have been the one that waited for room. Perhaps no step follows that
        # would report it.
        self._context.connector.want_back(engine.short_of_room)
        self._context.loop.call_soon_threadsafe(self.blocks_freed)


def check_handle(request: Request, handle: KVHandle) -> None:
    """Raise InvalidRequest for a handle of another request, or with more tokens than the
    request.
    """
    if handle.request_id != request.id or handle.epoch > request.epoch:
        raise InvalidRequest("the handle belongs to another request or epoch", field="handle")
    if not 0 < handle.num_tokens <= len(request.known_ids):
        raise InvalidRequest(
            f"the handle has {handle.num_tokens} tokens, the request {len(request.known_ids)}",
            field="handle",
        )
