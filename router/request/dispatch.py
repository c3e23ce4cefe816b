"""Dispatch: the journey of one request, from its record in the store to its last token.

Read `Journey.travel` first.

    QUEUED     recorded, or on its way to the store; a prefill node P and a decode node D are picked
    PREFILL    P computes the prompt
    TRANSFER   P's KV handle arrived, long before the KV: D gets handle and request and
               fetches while P computes; token 1 comes from P and is shown as it arrives
    DECODE     D decodes; what it repeats is dropped (if D prefills, too: QUEUED -> DECODE)
    FINISHED   or FAILED, or CANCELLED: exactly one of them

Migration: a decode node that drains or is full exports a running request's KV and lets go of it.
The request goes DECODE -> QUEUED (epoch + 1) -> TRANSFER -> DECODE on another decode node.
Failover: when a node is lost, the request goes back to QUEUED with epoch + 1 and its tokens so far;
after MAX_NODE_DEATHS it is FAILED. The journey has its own task: no client can hold it up.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Final

from baton.protocol.errors import (
    BatonError,
    Cancelled,
    DeadlineExceeded,
    GivenBack,
    InternalError,
    KVError,
    KVLost,
    KVTimeout,
    NodeLost,
    RowsLost,
    Unavailable,
    error_from_code,
)
from baton.protocol.events import HandleReady, RequestFailed, Subscribed, TokenEvent
from baton.protocol.handles import KVHandle
from baton.protocol.messages import Migrate, SubmitDecode, SubmitPrefill
from baton.protocol.request import TRANSITIONS, Request, RequestState
from baton.runtime.failpoints import FAILPOINTS
from baton.runtime.log import request_context
from router.nodes.attachments import Attempt, NodeEvent, SessionLost
from router.nodes.migration import Candidate, MigrationMove, Outcome
from router.nodes.policy import NodeSnapshot
from router.request import choice
from router.request.attempt import HopFailed, NodeAttempts
from router.request.dispatch_parts import DispatchParts
from router.request.encoding import ImageEncoding
from router.request.output_stream import OutputStream
from router.request.retry_budget import is_free, is_momentary
from router.request.timeline import Milestone, TimelineMark
from router.request.trace import RequestTrace
from router.store.ledger import RequestLedger, description

logger = logging.getLogger(__name__)
MAX_TRIES: Final = 8  # epochs of one request, whatever made them fail
MOVE_S: Final = 30.0  # a migration that took longer may be asked for again


class Journey:
    """One request under way, in its own task. `failure` is final once `output` has ended."""

    def __init__(self, request: Request, trace: RequestTrace, parts: DispatchParts) -> None:
        self.failure: BatonError | None = None
        self._request = request
        self._trace = trace
        self._parts = parts
        self._clock = parts.clock
        self.output = OutputStream(request, trace, parts.clock)
        self._attempts = NodeAttempts(parts.registry, partial(trace.visited, parts.clock))
        self._ask = choice.ask_of(request, trace)
        self._images: ImageEncoding | None = None
        if request.images:
            self._images = ImageEncoding(self._attempts, self._ask, parts, trace, self._mark)
        self._num_tries = 0
        self._planned: NodeSnapshot | None = None  # the decode node that the route named
        self._move: MigrationMove | None = None  # the migration under way
        self._moved_at: float | None = None
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._why: BatonError | None = None  # the failure if cancelled; None: Cancelled
        self._aborted = False
        self._closing = False

    # ---- for the dispatcher ----
    def start(self, ended: Callable[[], object]) -> None:
        self._task = asyncio.create_task(self._run(), name=f"request {self._request.id}")
        self._task.add_done_callback(partial(self._over, ended))
        deadline, late = self._request.deadline, "the deadline (--request-timeout-s) has passed"
        assert deadline is not None, "Dispatcher.run sets one"
        left_s, loop = max(0.0, deadline - self._clock.monotonic()), asyncio.get_running_loop()
        self._timer = loop.call_later(left_s, lambda: self.cancel(DeadlineExceeded(late)))

    def _over(self, ended: Callable[[], object], task: asyncio.Task[None]) -> None:
        ended()
        if self._timer is not None:
            self._timer.cancel()
        if task.cancelled():  # before the task began: `_run` has not run
            self.failure = Cancelled("the request was cancelled")
            self.output.close()

    def abort(self) -> None:
        """Cancel the request because a client or an operator asked for that by its id."""
        self._aborted = True
        self.cancel()

    def cancel(self, why: BatonError | None = None) -> None:
        """Cancel the request with the error `why`; do nothing if its end is being recorded."""
        if self._task is not None and not self._closing:
            self._why = why or self._why
            self._task.cancel()

    def stop_sample(self, sample: int) -> None:
        """End one sample: its node stops computing it, and later nodes do not begin it again."""
        self.output.stop(sample)
        self._request = replace(self._request, ended=self.output.ended)
        self._ask.known_ids = self._request.known_ids
        self._attempts.stop_sample(sample)
        if self.output.finished:  # the other samples have ended, too
            self._trace.stopped_by_text()
            self.cancel()

    @property
    def seen(self) -> tuple[Request, RequestTrace]:
        """The request as its nodes have it now, and its trace."""
        return self._request, self._trace

    @property
    def candidate(self) -> Candidate | None:
        """The request as a migrator sees it; None if no decode node has it or it is moving."""
        attempt = self._attempts.decode
        if attempt is None or self._closing or not attempt.connected or self._is_moving:
            return None
        tokens = len(self._request.prompt_ids) + self.output.num_tokens
        decoding = self._ended_on_decode and self.output.num_tokens > 0
        return Candidate(self._request.id, attempt.boot_id, tokens, decoding, self._moved_at)

    def begin_move(self) -> MigrationMove | None:
        """Ask the decode node to let go of the request. None if no other node could take it."""
        attempt, may_move = self._attempts.decode, choice.may_move
        if not (attempt and self.candidate and may_move(self._ask, self._parts, attempt.boot_id)):
            return None
        move = self._move = MigrationMove(attempt.boot_id, self._clock.monotonic())
        attempt.send(Migrate(self._request.id, attempt.epoch))
        return move

    @property
    def _is_moving(self) -> bool:
        return self._move is not None and self._clock.monotonic() - self._move.asked_at < MOVE_S

    async def stop(self, why: BatonError | None = None) -> None:
        """Cancel the request with the error `why` unless it has ended; wait until it has ended."""
        if self._task is not None and not self._task.done():
            self.cancel(why)
            await asyncio.wait({self._task})

    async def _run(self) -> None:
        """Run `travel`; however it ends, record exactly one terminal state and leave every node."""
        ledger: list[RequestLedger] = []
        outcome = RequestState.FAILED
        try:
            with request_context(self._request.id):
                await self.travel(ledger)
            outcome = RequestState.FINISHED
        except asyncio.CancelledError:
            if self._trace.text_stop:
                outcome = RequestState.FINISHED
            else:
                self.failure = self._why or Cancelled("the request was cancelled")
                if isinstance(self.failure, Cancelled):
                    outcome = RequestState.CANCELLED
        except BatonError as error:
            self.failure = error
        except Exception as error:  # the caller gets an opaque error, the log all of it
            logger.exception("request %s: dispatch failed", self._request.id)
            self.failure = InternalError("dispatch failed")
            self.failure.__cause__ = error
        finally:
            self._closing = True
            try:
                await self._close(ledger[0] if ledger else None, outcome)
            finally:
                for opened in ledger:
                    opened.abandon()
                self.output.close()

    def _mark(self, milestone: Milestone, why: str = "") -> float:
        """Note for the timeline what the journey has reached; return the time."""
        now, epoch, tokens = self._clock.monotonic(), self._request.epoch, self.output.num_tokens
        node = self._trace.node_at(milestone)
        self._trace.marks.append(TimelineMark(now, milestone, node, epoch, tokens, why))
        return now

    # ---- the journey ----
    async def travel(self, opened: list[RequestLedger]) -> None:
        """Run epochs until the last token. `opened` gets the ledger, for the caller to end it."""
        FAILPOINTS.hit("accepted")
        ledger = await self._parts.store.enter(self._request, description(self._request))
        opened.append(ledger)
        self._parts.retries.begin()
        while not self.output.finished:
            try:
                await self._run_epoch(ledger)
            except HopFailed as failure:
                await self._fail_over(ledger, failure)
            except Unavailable as error:
                await self._nobody_there(ledger, error)

    async def _run_epoch(self, ledger: RequestLedger) -> None:
        """Run one epoch: submit the request, then follow its nodes' events. Raises HopFailed."""
        self._num_tries += 1
        self.output.restart()
        try:
            if self._attempts.has_export:
                await self._hand_over(ledger)  # a decode node was lost, the export was not
                self._mark(Milestone.FETCHING if self._attempts.prefilled else Milestone.PREFILLING)
            else:
                if self._attempts.handle is not None:  # the export went before a decode node came
                    self._give_up("nobody fetched it")
                await self._begin(ledger)
            inbox = self._attempts.inbox
            while not self.output.finished:
                while not inbox:
                    await self._attempts.wait()
                attempt, event = inbox.popleft()
                if attempt is self._attempts.prefill:
                    await self._on_prefill(ledger, event)
                elif attempt is self._attempts.decode:
                    await self._on_decode(ledger, event)
                # else: from an attempt that was given up
        except NodeLost as error:  # a node went away between the choice and the submission
            raise HopFailed(error) from error

    def _give_up(self, why: str) -> None:
        self._attempts.give_up(why)
        self._end_move("failed")

    async def _begin(self, ledger: RequestLedger) -> None:
        """Submit the request to a prefill node; if none is chosen, to the decode node."""
        images = self._images
        routed = None if images is None else await images.routed(self._request)
        route, encoded = routed or (choice.route(self._ask, self._parts, self._trace), ())
        trace, self._planned = self._trace, route.decode
        trace.placed(route)
        at = self._mark(Milestone.PREFILLING)
        trace.dispatched_at = trace.dispatched_at or at
        known, attempts = len(self._request.known_ids), self._attempts
        if route.prefill is None:
            message = SubmitDecode(self._request, encoded=encoded)
            attempts.decode = attempts.submit(route.decode, message, known - route.decode_cached)
            await self._accepted(ledger)
            ledger.post(RequestState.DECODE, decode_node=route.decode.node_id)
        else:
            message, cached = SubmitPrefill(self._request, encoded), route.prefill_cached
            attempts.prefill = attempts.submit(route.prefill, message, known - cached)
            await self._accepted(ledger)
            ledger.post(RequestState.PREFILL, prefill_node=route.prefill.node_id)

    async def _accepted(self, ledger: RequestLedger) -> None:
        """Wait for the store to have the record: only then tokens are shown. The prefill runs."""
        await ledger.accepted()
        if self._trace.queued_at is None:
            FAILPOINTS.hit("logged")
            self._trace.queued_at = self._clock.monotonic()

    async def _hand_over(self, ledger: RequestLedger) -> None:
        """Submit request and KV handle to a decode node, which fetches while the prefill runs."""
        handle = self._attempts.handle
        assert handle is not None, "there is an export to hand over"
        node, self._planned = self._planned, None
        if node is None or self._parts.registry.session(node.boot_id) is None:
            node = choice.decode_node(self._ask, self._parts, self._trace, handle)
        self._trace.decode_node = node.node_id
        ledger.post(RequestState.TRANSFER, decode_node=node.node_id)
        message = SubmitDecode(self._request, handle, prefilling=not self._attempts.prefilled)
        self._attempts.decode = self._attempts.submit(node, message, 0)

    async def _on_prefill(self, ledger: RequestLedger, event: NodeEvent) -> None:
        attempts = self._attempts
        match event:
            case HandleReady() if attempts.handle is None:
                self._mark(Milestone.EXPORTED)
                attempts.take_handle(event.handle)
                await self._hand_over(ledger)
            case TokenEvent():
                self._trace.count(event)
                self.output.show(event)
                if not (attempts.prefilled or attempts.decoding):
                    self._mark(Milestone.PREFILLED)
                attempts.has_prefilled()
            case RequestFailed() if not (attempts.prefilled and attempts.is_subscribed):
                self._refused(attempts.prefill, event)
            case SessionLost() if attempts.needs_prefill(event):
                raise HopFailed(self._lost(attempts.prefill, event))
            case SessionLost() if not self.output.prompt_reported:
                lost = self._lost(attempts.prefill, event)  # only P reports the prompt's logprobs
                raise HopFailed(KVLost(lost.message), export_lost=True) from lost
            case SessionLost():  # once D subscribes, it is D that reports the export's end
                attempts.exporter_suspect = event.suspect
            case _:
                pass

    async def _on_decode(self, ledger: RequestLedger, event: NodeEvent) -> None:
        attempts = self._attempts
        match event:
            case Subscribed():
                self._trace.subscribed_at = self._mark(Milestone.SUBSCRIBED)
                attempts.stop_renewing()
            case TokenEvent():
                if attempts.shows is None:
                    self._mark(Milestone.DECODING)
                self._trace.count(event, computes=attempts.handle is None)
                if attempts.handle is not None and not attempts.decoding:
                    await self._handed_over(ledger)
                self.output.decoded(event, self._attempts.handle is not None)
                attempts.shows = self.output.show_next  # for the next events
            case RequestFailed():
                self._refused(attempts.decode, event)
            case SessionLost():
                raise HopFailed(self._lost(attempts.decode, event))
            case HandleReady():
                await self._move_on(ledger, event.handle)
            case _:
                pass  # Pooled, Encoded: other modules of this package ask for them

    async def _handed_over(self, ledger: RequestLedger) -> None:
        """Note the decode node's first event: it has all of the KV, the export is not needed."""
        self._attempts.decoding = True
        self._attempts.stop_renewing()
        if self._move is None or not self._move.tokens:
            # The first counts, if a decode node was lost since.
            self._trace.handover_at = self._trace.handover_at or self._clock.monotonic()
        else:
            self._trace.migrations += 1
            self._moved_at = self._clock.monotonic()
            self._end_move("done")
        ledger.post(RequestState.DECODE)

    async def _move_on(self, ledger: RequestLedger, handle: KVHandle) -> None:
        """Hand the request to another decode node: the present one has exported it as `handle`."""
        assert self._attempts.decode is not None, "it was the decode node that said so"
        source = self._attempts.decode.boot_id
        if self._move is None:  # that migration was given up before
            self._move = MigrationMove(source, self._clock.monotonic())
        self._move.tokens = handle.num_tokens
        self._attempts.take_over(handle)
        self._mark(Milestone.MOVING)
        self._ask.avoid(source)
        await self._next_epoch(ledger)
        await self._hand_over(ledger)  # never to the exporter itself

    def _end_move(self, outcome: Outcome) -> None:
        if self._move:
            self._move.end(outcome, self._parts.migrations, self._clock.monotonic())
            self._parts.events.note("migration", outcome, request_id=self._request.id)
            self._move = None

    # ---- when a node fails ----
    def _lost(self, attempt: Attempt | None, event: SessionLost) -> NodeLost:
        if attempt is not None:
            self._ask.avoid(attempt.boot_id)
            if event.suspect:
                self._ask.blame(attempt.boot_id, hung=event.stalled)
            if self._move and self._move.source == attempt.boot_id:
                self._end_move("given back" if event.drained else "failed")
        return NodeLost(f"node {event.node_id} was lost: {event.reason}")

    def _refused(self, attempt: Attempt | None, event: RequestFailed) -> None:
        """Raise HopFailed if another node may do better, else the error that the node gave."""
        error = error_from_code(event.code, event.message, event.field)
        if not event.retryable or attempt is None:
            raise error
        if isinstance(error, KVError):
            raise self._kv_failed(attempt, error)
        if isinstance(error, GivenBack):
            self._ask.avoid(attempt.boot_id)
            self._end_move("given back")
        elif self._images is not None and isinstance(error, RowsLost):
            self._images.rows_lost()
        else:
            self._ask.refused(attempt.boot_id, error)
        raise HopFailed(error)

    def _kv_failed(self, attempt: Attempt, error: KVError) -> HopFailed:
        """Return the failure of a hop whose KV did not arrive. After the first time-out the export
        is fetched once more, elsewhere if possible: computing it again would add to the load."""
        if isinstance(error, KVTimeout) and self._attempts.may_fetch_again():
            self._ask.avoid(attempt.boot_id)
            return HopFailed(error)
        exporter, lost = self._attempts.prefill, isinstance(error, KVLost | KVTimeout)
        if exporter is not None:
            (self._ask.lost_kv if lost else self._ask.avoid)(exporter.boot_id)
            if isinstance(error, KVLost) and self._attempts.exporter_is_suspect:
                self._ask.blame(exporter.boot_id)
        return HopFailed(error, export_lost=True)

    async def _fail_over(self, ledger: RequestLedger, failure: HopFailed) -> None:
        """Move the request back to QUEUED with the next epoch. Raises the failure's error after
        MAX_TRIES epochs or too many node deaths, and when the retry budget is spent."""
        self._show_pending()
        if self.output.finished:
            return
        if self._attempts.shows is not None and self._attempts.decode is not None:
            self._ask.served(self._attempts.decode.boot_id)
        self._trace.node_deaths = self._ask.num_deaths
        if self._num_tries >= MAX_TRIES or await choice.is_guilty(self._ask, self._parts.registry):
            raise failure.error
        keeps_export = self._attempts.has_export and not failure.export_lost
        self._mark(Milestone.FAILED, failure.error.message)
        if not (self.output.num_tokens or keeps_export or is_free(failure.error)):
            self._parts.retries.spend(failure.error)  # raises the error if no retry is left
        self._parts.events.retried(
            self._request.id, ledger.epoch, self.output.num_tokens, failure.error.message
        )
        await self._leave_nodes(ledger, keeps_export)
        if self.output.finished:
            return
        given_back = isinstance(failure.error, GivenBack)  # as it was asked to: no failure
        self._num_tries -= given_back
        self._trace.retries += not given_back
        await self._next_epoch(ledger)

    def _show_pending(self) -> None:
        """Show the delivered events that nobody has read: the log gets them, so they are output."""
        for attempt, event in self._attempts.pending_events():
            if isinstance(event, TokenEvent) and attempt is self._attempts.prefill:
                self.output.show(event)
                self._attempts.has_prefilled()
            elif isinstance(event, TokenEvent) and attempt is self._attempts.decode:
                self.output.decoded(event, self._attempts.handle is not None)

    async def _leave_nodes(self, ledger: RequestLedger, keeps_export: bool) -> None:
        """Leave the failed epoch's nodes, and show the tokens that the log has got meanwhile."""
        elsewhere = self._attempts.handle is not None
        if keeps_export:
            self._attempts.drop_decode()
        else:
            self._give_up("failover")
        for event in await ledger.settle():
            self.output.decoded(event, elsewhere and not event.prompt_logprobs)

    async def _nobody_there(self, ledger: RequestLedger, error: Unavailable) -> None:
        """Wait for a suitable node. If none is expected, raises the last refusal, else `error`."""
        if ledger.state is not RequestState.QUEUED:
            await self._fail_over(ledger, HopFailed(error))
            return
        self._num_tries -= 1  # nobody has tried
        if self._attempts.has_export and choice.serve(self._ask, self._parts.registry):
            self._give_up("nobody fetches it")  # a node of another layout computes the prompt again
        elif not await choice.may_come(self._ask, self._parts.registry, self._attempts.handle):
            raise self._ask.refusal or error

    async def _next_epoch(self, ledger: RequestLedger) -> None:
        """Move back to QUEUED: former nodes are fenced, the next ones get all tokens so far."""
        self._planned = None
        await ledger.move(RequestState.QUEUED)
        # The ledger counts epochs; a request's own epoch is its copy.
        retried = self._request.retried(self.output.output_ids)
        retried = replace(retried, epoch=ledger.epoch, ended=self.output.ended)
        self._request = self._trace.joined(retried)
        self._ask.known_ids, self._ask.begun = self._request.known_ids, self.output.num_tokens > 0

    # ---- the end ----
    async def _close(self, ledger: RequestLedger | None, outcome: RequestState) -> None:
        """Leave every node and record the terminal state `outcome`."""
        trace = self._trace
        self._end_move("over")
        ended = outcome is RequestState.FINISHED and self.failure is None and not trace.text_stop
        if ended and self._ended_on_decode:
            self._attempts.finish()
        else:
            self._attempts.give_up(outcome.value)
        if ledger is not None:
            if outcome not in TRANSITIONS[ledger.state]:
                outcome = RequestState.CANCELLED  # stopped by its text between two epochs
            FAILPOINTS.hit("finishing")
            kept, tokens = self._is_an_end(outcome), str(self.output.num_tokens)
            error, text = (why.code, why.message) if (why := self.failure) else ("", "")
            end = {"error": error, "message": text, "output_tokens": tokens}
            await ledger.finish(outcome, kept=kept, **end)
        trace.outcome = outcome.value
        trace.finished_at = self._clock.monotonic()

    def _is_an_end(self, outcome: RequestState) -> bool:
        """Whether the store keeps this end, for clients that ask for the request again. Else its id
        may be used again: no token was shown, and another try may go better."""
        if self.output.num_tokens or self._aborted or self._ask.guilty:
            return True
        gone = outcome is RequestState.CANCELLED  # its client went away before the first token
        return not gone and (self.failure is None or not is_momentary(self.failure))

    @property
    def _ended_on_decode(self) -> bool:
        """Whether the decode node ended the request; else token 1, of the prefill node, did."""
        return self._attempts.decoding or self._attempts.handle is None
