"""EngineThread: the only bridge between asyncio (or any other thread) and the engine's own thread.

Its life: start() -> calls and steps in turn -> stop(). Between two steps it runs every call that
has come in. Without work, or when the engine is stalled, it waits on its inbox (an event, never
polling). A step that raises fails the requests of that step, and the engine goes on. Every failure
is reported or logged.

In a data-parallel group (parallel/lockstep.py) the other ranks wait for this thread while a wave is
on. Without a step to make, it then makes rounds, and runs calls between them.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Final, TypeVar

import torch

from baton.engine.core.engine import Engine
from baton.engine.state.sequence import RequestGroup
from baton.protocol.errors import BatonError, InternalError, Unavailable
from baton.protocol.events import BlockEvent, RequestFailed, TokenEvent
from baton.protocol.handles import NodeLoad

log = logging.getLogger(__name__)

T = TypeVar("T")
LEAVE_S: Final = 10.0  # until the other ranks of a group stop, too


@dataclass(frozen=True, slots=True)
class StepReport:
    """The results of one step. `on_step` gets it on the engine thread.

    `begun`: the requests that got their first token here, or the first one after a pause; their
    times do not change any more, pauses are only added.
    """

    events: list[TokenEvent]
    failed: list[RequestFailed]
    block_events: list[BlockEvent]
    load: NodeLoad
    short_of_room: bool = False  # see Engine
    begun: list[RequestGroup] = field(default_factory=list[RequestGroup])


@dataclass(frozen=True, slots=True)
class _EngineCall:
    """Work for the engine thread.

    `refuse` is called if the work never runs, and raises in the waiting caller; None if none waits.
    """

    run: Callable[[Engine], object]
    refuse: Callable[[], None] | None = None


class EngineThread:
    """Runs `engine` on one thread.

    After start() other threads use the engine only through this object. They may read values that
    never change in the engine, or are replaced as a whole (config, info).

    `on_step` runs on the engine thread after each step and must not block; it may use the engine.
    """

    def __init__(
        self,
        engine: Engine,
        on_step: Callable[[StepReport], None],
        name: str = "engine",
    ) -> None:
        self.engine = engine
        self._lockstep = engine.active.lockstep
        self._on_step = on_step
        self._condition = threading.Condition()
        self._inbox: deque[_EngineCall] = deque()
        self._stopping = False
        self._held = False
        # A daemon thread, so that a process that ends without stop() does not wait for the model.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        if self._lockstep is not None:
            self._lockstep.start(self._notify)
        self._thread.start()

    @property
    def held(self) -> bool:
        """Whether hold() has suspended steps. Calls still run."""
        return self._held

    def hold(self, held: bool) -> None:
        """Suspend steps after the current one (True), or resume them (False). From any thread."""
        with self._condition:
            self._held = held
            self._condition.notify()

    def stop(self) -> None:
        """End the thread after the current step, and wait for it.

        Calls still in the inbox raise Unavailable. It blocks for up to one step, and in a
        data-parallel group until all ranks stop, at most LEAVE_S; from asyncio use
        `asyncio.to_thread(thread.stop)`. Calling it twice is safe.
        """
        with self._condition:
            self._stopping = True
            self._condition.notify()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self._close_inbox()

    def post(self, function: Callable[[Engine], object]) -> None:
        """Run `function` on the engine thread between steps; return at once. From any thread.

        What `function` raises is logged. After stop() nothing happens.
        """
        with self._condition:
            if not self._stopping:
                self._inbox.append(_EngineCall(function))
                self._condition.notify()

    async def call(
        self,
        function: Callable[[Engine], T],
        undo: Callable[[Engine, T], object] | None = None,
    ) -> T:
        """Run `function` on the engine thread between steps and return its result, or raise its
        error.

        If the caller is cancelled, either `function` never runs, or it has run and `undo(engine,
        result)` is posted. So a caller that reserves blocks passes a function that gives them back.
        Raises Unavailable when the thread is stopped.
        """
        future: Future[T] = Future()
        self._submit(function, future)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            if not future.cancel() and undo is not None:
                future.add_done_callback(lambda done: self._undo(done, undo))
            raise

    def _submit(self, function: Callable[[Engine], T], future: Future[T]) -> None:
        def run(engine: Engine) -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = function(engine)
            except BaseException as error:  # noqa: BLE001 - it is the caller's to handle
                future.set_exception(error)
            else:
                future.set_result(result)

        def refuse() -> None:
            if future.set_running_or_notify_cancel():
                future.set_exception(Unavailable("the engine is stopped"))

        with self._condition:
            if not self._stopping:
                self._inbox.append(_EngineCall(run, refuse))
                self._condition.notify()
                return
        refuse()

    def _undo(self, done: Future[T], undo: Callable[[Engine, T], object]) -> None:
        if done.exception() is None:
            self.post(lambda engine: undo(engine, done.result()))

    def _notify(self) -> None:
        with self._condition:
            self._condition.notify()

    # ---- on the engine thread ----

    def _run(self) -> None:
        # A new thread has OpenMP's own number of threads until it asks torch for torch's.
        torch.get_num_threads()
        try:
            while (calls := self._next_calls()) is not None:
                self._serve(calls)
                # A stalled engine steps again after calls alone: they may have freed blocks.
                if self.engine.has_work and not self._held and (calls or self._may_step()):
                    self._step()
                    self._rest()
                elif self._in_wave:
                    self._take_part()
            self._leave()
        finally:
            self._close_inbox()

    def _next_calls(self) -> list[_EngineCall] | None:
        """Return the calls that have come in; wait for one if nothing is to do. None = stop."""
        cores = self.engine.steps.cores
        with self._condition:
            while not (self._inbox or self._stopping or self._may_step() or self._in_wave):
                if cores is not None:
                    cores.rest(resting=True)
                self._condition.wait()
            if cores is not None:
                cores.rest(resting=self._stopping)
            if self._stopping:
                return None
            calls = list(self._inbox)
            self._inbox.clear()
        return calls

    def _serve(self, calls: list[_EngineCall]) -> None:
        for call in calls:
            try:
                call.run(self.engine)
            except Exception:
                log.exception("a call on the engine thread failed")

    def _may_step(self) -> bool:
        return self.engine.has_work and not (self.engine.stalled or self._held)

    @property
    def _in_wave(self) -> bool:
        return self._lockstep is not None and self._lockstep.wanted

    @torch.inference_mode()
    def _take_part(self) -> None:
        """Make a round without rows: other ranks wait for it."""
        assert self._lockstep is not None, "who is in a wave has it"
        try:
            self._lockstep.take_part()
        except Exception:
            log.exception("a round without rows failed")
        if not self._in_wave:
            self._rest()

    def _leave(self) -> None:
        """Make rounds until all ranks of the group leave."""
        lockstep = self._lockstep
        if lockstep is None:
            return
        lockstep.leave()
        while not lockstep.ended:
            with self._condition:
                if not self._condition.wait_for(lambda: self._in_wave, LEAVE_S):
                    log.warning("this rank ends before the others of its group")
                    return
            self._take_part()

    def _rest(self) -> None:
        """Call `when_idle` if the engine has no work left, and no rank of its group has."""
        if self.engine.has_work or self._in_wave or self.engine.when_idle is None:
            return
        if self.engine.steps.cores is not None:  # limits are those of the own ones
            self.engine.steps.cores.give_back()
        try:
            self.engine.when_idle()
        except Exception:
            log.exception("what an idle engine does failed")

    def _step(self) -> None:
        events: list[TokenEvent] = []
        failed: list[RequestFailed] = []
        begun: list[RequestGroup] = []
        try:
            events = self.engine.step()
            begun = self.engine.begun
        except Exception as error:
            log.exception("an engine step failed")
            failed = self._fail_step(error)
        failed += self.engine.take_failed()
        report = StepReport(
            events,
            failed,
            self.engine.take_block_events(),
            self.engine.current_load(),
            self.engine.short_of_room,
            begun,
        )
        try:
            self._on_step(report)
        except Exception:
            log.exception("the receiver of engine steps failed")
            self._end_unreported(report)

    def _end_unreported(self, report: StepReport) -> None:
        """Abort the requests whose tokens could not be reported, and report that they failed."""
        unreported = {(event.request_id, event.epoch) for event in report.events}
        for request_id, _ in unreported:
            self.engine.abort(request_id)
        ended = [_ended(*of_request, "a step's results were lost") for of_request in unreported]
        load = self.engine.current_load()
        try:
            self._on_step(replace(report, events=[], failed=report.failed + ended, load=load))
        except Exception:
            log.exception("the receiver of engine steps failed again")

    def _fail_step(self, error: Exception) -> list[RequestFailed]:
        # Details of an internal error go to the log; clients get a general message.
        known = error if isinstance(error, BatonError) else InternalError("an engine step failed")
        failed = self.engine.fail_step()
        return [_ended(request.id, request.epoch, known.message) for request in failed]

    def _close_inbox(self) -> None:
        with self._condition:
            self._stopping = True
            calls = list(self._inbox)
            self._inbox.clear()
        for call in calls:
            if call.refuse is not None:
                call.refuse()


def _ended(request_id: str, epoch: int, why: str) -> RequestFailed:
    code, retryable = InternalError.code, InternalError.retryable
    return RequestFailed(request_id, epoch, code, why, retryable)
