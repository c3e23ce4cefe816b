"""Dispatcher: all requests under way on this router.

Each request passes the gate and is then a Journey (router/request/dispatch.py). Front doors, the
admin server and the migrator talk to the Dispatcher. The life: made -> run() -> stop().
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial

from baton.protocol.errors import BatonError, Cancelled, Unavailable
from baton.protocol.events import TokenEvent
from baton.protocol.request import Request, RequestState
from router.nodes.migration import Candidate, MigrationStats
from router.nodes.policy import Route
from router.request import choice
from router.request.dispatch import MOVE_S, Journey
from router.request.dispatch_parts import DispatchParts
from router.request.gate.admission import Bounds, Ticket
from router.request.gate.gate import Gate, GateSettings
from router.request.retry_budget import RetryBudget
from router.request.texts import TextRing
from router.request.timeline import Milestone, TimelineEntry, TimelineMark
from router.request.trace import RequestTrace
from router.request.tracing import RouterTracing

logger = logging.getLogger(__name__)


class Dispatcher:
    """Runs requests: each waits at the gate, then a Journey takes it through the nodes. Knows all
    requests that run or wait on this router."""

    def __init__(self, parts: DispatchParts) -> None:
        self._parts = parts
        settings = GateSettings(Bounds(parts.max_live))
        self.gate = parts.gate or Gate(parts.clock, settings)
        self._live: dict[str, Journey] = {}

    @property
    def num_live(self) -> int:
        return len(self._live)

    async def run(
        self, request: Request, trace: RequestTrace | None = None, *, admitted: bool = False
    ) -> AsyncGenerator[TokenEvent, None]:
        """Yield the request's tokens: in order per sample, no gap, no duplicate, to the end.

        Closing the generator early aborts the request on every node. The request is then CANCELLED,
        or FINISHED if `trace.stopped_by_text()` was called. Mutates `trace`. Raises BatonError when
        the request fails. `admitted`: another router has let the request in before, so it does not
        pass the gate again.
        """
        parts, trace = self._parts, trace or RequestTrace()
        if request.deadline is None:
            request = replace(request, deadline=parts.clock.monotonic() + parts.timeout_s)
        if parts.tracing is not None:
            trace.root = parts.tracing.begin(request)
            request = trace.joined(request)
        ticket = None if admitted else await self._let_in(request, trace)
        journey = Journey(request, trace, parts)
        try:
            self._live[request.id] = journey
            journey.start(partial(self._live.pop, request.id, None))
            try:
                while (event := await journey.output.next()) is not None:
                    yield event
                if journey.failure is not None:
                    raise journey.failure
            finally:
                await journey.stop()
        finally:
            if ticket is not None:
                self.gate.leave(ticket)
            if trace.finished_at is None:  # it never began, or its end could not be recorded
                self._ended(trace, journey.failure)
            entry = self._keep(request, trace, journey.failure)
            if parts.texts is not None:
                parts.texts.add(request, trace.terms.grant, journey.output.output_ids)
            self._log_end(request, entry, journey.failure)

    @asynccontextmanager
    async def passage(self, request: Request, trace: RequestTrace) -> AsyncGenerator[None, None]:
        """A context within the gate for a call that no journey serves: nodes pool its inputs.

        Keeps its timeline and writes its line of the log. Mutates `trace`. Raises BatonError.
        """
        ticket, failure = await self._let_in(request, trace), None
        now = trace.dispatched_at = self._parts.clock.monotonic()
        trace.marks.append(TimelineMark(now, Milestone.POOLING, epoch=request.epoch))
        try:
            yield
        except BaseException as error:
            failure = error
            raise
        finally:
            self.gate.leave(ticket)
            self._ended(trace, failure)
            self._log_end(request, self._keep(request, trace, failure), failure)

    async def _let_in(self, request: Request, trace: RequestTrace) -> Ticket:
        """Let a request pass the gate. Raises BatonError if it is refused: that is its end."""
        try:
            return await self.gate.enter(request, trace)
        except BaseException as error:  # also if its client went away
            self._ended(trace, error)
            self._log_end(request, self._keep(request, trace, error), error)
            raise

    def _ended(self, trace: RequestTrace, error: BaseException | None) -> None:
        outcome = RequestState.FINISHED
        if error is not None:
            failed = isinstance(error, BatonError) and not isinstance(error, Cancelled)
            outcome = RequestState.FAILED if failed else RequestState.CANCELLED
        trace.outcome, trace.finished_at = outcome.value, self._parts.clock.monotonic()

    def _log_end(
        self, request: Request, entry: TimelineEntry, failure: BaseException | None
    ) -> None:
        """Write the request's line of the log; if it was slow, as a warning with its timeline."""
        slow = 0 < self._parts.slow_request_s < entry.total_s
        level = logging.WARNING if slow else logging.INFO
        if logger.isEnabledFor(level):
            known = failure if isinstance(failure, BatonError) else None
            told = entry.trace.told(request, known)
            logger.log(level, "request %s: %s%s", request.id, told, entry.told() if slow else "")

    def _keep(
        self, request: Request, trace: RequestTrace, error: BaseException | None
    ) -> TimelineEntry:
        """Add the timeline of a request that has ended to the ring; return it."""
        code = "" if error is None else Cancelled.code
        if isinstance(error, BatonError):
            code = error.code
        arrived_at = time.time() - (self._parts.clock.monotonic() - request.arrival)
        entry = TimelineEntry(
            request.id, request.arrival, arrived_at, len(request.prompt_ids), code, trace
        )
        self._parts.timelines.add(entry)
        if self._parts.tracing is not None:
            self._parts.tracing.finished(request, entry)
        return entry

    def abort(self, request_id: str, by_operator: bool = False) -> bool:
        """Cancel a running or waiting request by its id; return False if there is no such request.

        `by_operator`: an operator cancels it, so its client still gets the output so far.
        """
        for request, trace in (*self.live(), *self.waiting()):
            if request.id == request_id:
                trace.aborted = by_operator
        journey = self._live.get(request_id)
        if journey is not None:
            journey.abort()
        return journey is not None or self.gate.cancel(request_id)

    def preview(self, request: Request, trace: RequestTrace) -> Route:
        """Return the nodes that a request would get now. Nothing is sent, and nothing is noted.

        Raises BatonError if no node can serve it."""
        return choice.preview(choice.ask_of(request, trace), self._parts, trace)

    def live(self) -> list[tuple[Request, RequestTrace]]:
        """Return the requests that the gate has let in, in the order of their starts."""
        return [journey.seen for journey in self._live.values()]

    def waiting(self) -> list[tuple[Request, RequestTrace]]:
        """Return the requests that wait at the gate, in the order of arrival."""
        return self.gate.waiting()

    def stop_sample(self, request_id: str, sample: int) -> None:
        """End one sample at a stop string; the other samples go on.

        For the last sample the caller closes `run` instead.
        """
        journey = self._live.get(request_id)
        if journey is not None:
            journey.stop_sample(sample)

    @property
    def tracing(self) -> RouterTracing | None:
        return self._parts.tracing

    @property
    def texts(self) -> TextRing | None:
        """What the requests that ended asked and got; None: it is not kept."""
        return self._parts.texts

    @property
    def retries(self) -> RetryBudget:
        return self._parts.retries

    @property
    def migrations(self) -> MigrationStats:
        return self._parts.migrations

    def candidates(self) -> list[Candidate]:
        """Return the requests that a decode node has now, for router/nodes/migration.py."""
        found = (journey.candidate for journey in self._live.values())
        return [candidate for candidate in found if candidate is not None]

    async def migrate(self, request_id: str) -> bool:
        """Move a request to another decode node, with its KV if it decodes already.

        True: the other node has fetched the KV and gone on. False: the request is not here or
        cannot move, it went on without its KV, or the move took longer than MOVE_S.
        """
        journey = self._live.get(request_id)
        move = None if journey is None else journey.begin_move()
        if move is None:
            return False
        try:
            async with asyncio.timeout(MOVE_S):
                return await asyncio.shield(move.done)
        except TimeoutError:
            return False

    async def stop(self) -> None:
        """Refuse the waiting requests and fail those that are still under way."""
        self.gate.stop()
        why = Unavailable("the router is stopping: ask again", retry_after_s=1)
        await asyncio.gather(*(journey.stop(why) for journey in list(self._live.values())))
