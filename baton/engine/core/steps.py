"""Steps: plans each step and runs it; with `ahead`, plans the next one while it runs.

Life of a step:
    plan()   requests that cannot go on end, adopted pages are copied, the scheduler decides
    run()    the runner's results; those of a request count only if its pages were safe throughout
    count()  how long it took, into the statistics

Between plan() and LiveRequests.step_ended() no sequence of the step loses its blocks.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final

from baton.engine.core.announcements import Announcements
from baton.engine.core.live_requests import LiveRequests
from baton.engine.core.run_ahead import Flight, RunAhead, decodes_plainly
from baton.engine.core.scheduler import Scheduler
from baton.engine.memory.adopted_pages import AdoptedPages
from baton.engine.running.spare_cores import SpareCores
from baton.engine.state.interface import ChunkResult, Runner
from baton.engine.state.sequence import RequestGroup
from baton.engine.state.stats import EngineStats
from baton.engine.state.step_plan import StepPlan
from baton.engine.state.work import Work
from baton.protocol.clock import Clock

MOST_STEPS: Final = 32  # kept for the console
MOST_NAMES: Final = 16  # of each


@dataclass(slots=True, eq=False, repr=False)
class Steps:
    """Runs the steps. `ahead`: None = never plan ahead. `prove`: check that no row writes where
    others read. `cores`: of other nodes, for steps.
    """

    scheduler: Scheduler
    runner: Runner
    announcements: Announcements
    requests: LiveRequests
    adopted: AdoptedPages
    stats: EngineStats
    clock: Clock
    ahead: RunAhead | None = None
    prove: bool = False
    cores: SpareCores | None = None
    # Of the last steps: when each ended, its seconds, prompt tokens, all tokens, the first requests
    # and what it needed.
    recent: deque[tuple[float, float, int, int, list[str], Work]] = field(
        default_factory=lambda: deque(maxlen=MOST_STEPS), init=False
    )
    last_plan: StepPlan | None = field(default=None, init=False)  # None while it is being made
    _next: Flight | None = field(default=None, init=False)  # a step that is under way already
    # monotonic seconds: when this step's plan() began
    _started: float = field(default=0.0, init=False)
    _num_left: int = field(default=0, init=False)  # that this plan left waiting
    # when the last step that computed something ended
    _ended: float = field(default=0.0, init=False)

    def use(self, runner: Runner) -> None:
        """Use this runner for the steps from now on. Only while nothing runs."""
        self.runner = runner
        if self.ahead is not None:
            self.ahead.runner = runner

    @property
    def under_way(self) -> bool:
        return self._next is not None

    def wait(self) -> None:
        """Wait until nothing runs: then only the caller uses the model and the pool's memory."""
        if self._next is not None:
            self._next.wait()

    def plan(self) -> Flight:
        """Return the step whose results come next. If it raises, nothing is under way."""
        now, self.last_plan = self.clock.monotonic(), None
        self.stats.queue_seconds += self._num_left * (now - self._started)
        self._started = now
        self.requests.fail_doomed(self.adopted.lapsed())
        self._give_way()
        self.requests.step_begun()
        try:
            flight = self._begin()
        except BaseException:
            self.requests.step_ended()
            raise
        self.last_plan = flight.plan
        self._num_left = self.scheduler.num_waiting + self.scheduler.num_swapped
        return flight

    def run(self, flight: Flight) -> list[ChunkResult]:
        """Run the step, or wait for it; return one result per row.

        Requests of the step that cannot go on have then ended. If it raises, nothing is under way.
        """
        try:
            results = self._results(flight)
            self.requests.fail_doomed(self.adopted.lapsed(), flight.plan)
        except BaseException:
            self.requests.step_ended()
            raise
        return results

    def note_begun(self, plan: StepPlan) -> list[RequestGroup]:
        """Return the requests that have got their first token by this step, or the first one after
        they were preempted, with the times in them.
        """
        for group in plan.begun:
            now = self.clock.monotonic()
            group.computed_at = group.computed_at or now
            if group.paused_at is not None:
                group.pauses.append((group.paused_at, now))
                group.paused_at = None
        return plan.begun

    def count(self, flight: Flight) -> None:
        """Count a step that has ended, and its seconds, unless it computed nothing."""
        if not flight.plan.rows:
            return
        began = self._ended if flight.behind else self._started
        self._ended = self.clock.monotonic()
        work, rows = self.stats.utilization.under_way, flight.plan.rows
        names = [row.group.request.id for row in rows[:MOST_NAMES]]
        tokens = flight.plan.num_prefill_tokens
        self.recent.append(
            (self._ended, self._ended - began, tokens, flight.plan.num_tokens, names, work)
        )
        if (cores := self.cores) is None:
            self.stats.step_done(self._ended - began, tokens)
        else:
            share = cores.share  # that of the next step, if it is under way: nearly the same
            self.stats.step_done(self._ended - began, tokens, share)
            self.stats.num_spare_core_steps = cores.num_steps
            cores.step_s = self.stats.step_seconds * share
        self.stats.num_steps_ahead += flight.behind

    # ---- inside ----

    def _give_way(self) -> None:
        """Copy adopted pages; preempt requests whose pages are wanted back but have no room
        here.
        """
        for request_id in self.adopted.take_over(self.scheduler.headroom()):
            group = self.requests.get(request_id)
            assert group is not None, "an adoption ends with its request"
            self.wait()
            self.scheduler.give_way(group)

    def _begin(self) -> Flight:
        flight, self._next = self._next, None
        try:
            if flight is None:
                flight = self._plan_now()
            if flight.ahead and self.ahead and self._foresees(flight.plan):
                self._next = self._plan_behind(self.ahead, flight)
        except BaseException:
            if flight is not None:
                flight.wait()
            self.scheduler.fly(())
            raise
        return flight

    def _results(self, flight: Flight) -> list[ChunkResult]:
        if self.cores is not None and flight.ahead is None:
            self.cores.take(flight.plan.num_prefill_tokens, exact=flight.plan.exact)
        try:
            results = flight.results()
        except BaseException:
            self.wait()
            self._next = None
            raise
        finally:
            behind = () if self._next is None else self._next.plan.rows
            self.scheduler.fly(row.sequence for row in behind)
        return results

    def _plan_now(self) -> Flight:
        plan = self._schedule()
        if self.ahead is None or not self._foresees(plan):
            on_layer = self.announcements.on_layer(plan)
            run = self.runner.run
            return Flight(plan, lambda: run(plan.chunks, on_layer) if plan.rows else [])
        flight = self.ahead.start(plan)
        self.scheduler.fly(row.sequence for row in plan.rows)
        return flight

    def _plan_behind(self, ahead: RunAhead, flight: Flight) -> Flight | None:
        with ahead.foreseen(flight.plan):
            plan = self._schedule()
        return ahead.start(plan, flight) if plan.rows else None

    def _foresees(self, plan: StepPlan) -> bool:
        return self.scheduler.steady and decodes_plainly(plan)

    def _schedule(self) -> StepPlan:
        plan = self.scheduler.schedule()
        if plan.admitted or plan.seated:
            self._note_scheduled(plan)
        self.announcements.admitted(plan)
        if self.prove:
            self.scheduler.prove_private(plan)
        return plan

    def _note_scheduled(self, plan: StepPlan) -> None:
        now = self.clock.monotonic()
        for group in (*plan.admitted, *plan.seated):
            if group.scheduled_at is None:  # else it was preempted
                group.scheduled_at = now
