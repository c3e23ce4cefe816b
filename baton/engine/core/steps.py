"""Steps: plans each step and runs it; with `ahead`, plans the one behind it while it runs."""

from __future__ import annotations

from baton.engine.core.announcements import Announcements
from baton.engine.core.run_ahead import Flight, RunAhead, decodes_plainly
from baton.engine.core.scheduler import Scheduler
from baton.engine.state.interface import ChunkResult, Runner
from baton.engine.state.step_plan import StepPlan


class Steps:
    """`ahead`: None = never. `check`: prove that no row writes where others read."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        announcements: Announcements,
        ahead: RunAhead | None,
        check: bool,
    ) -> None:
        self._scheduler = scheduler
        self.runner = runner
        self._announcements = announcements
        self.ahead = ahead
        self._check = check
        self._next: Flight | None = None  # under way already

    def use(self, runner: Runner) -> None:
        """Of the steps from now on; while nothing runs."""
        self.runner = runner
        if self.ahead is not None:
            self.ahead.runner = runner

    @property
    def under_way(self) -> bool:
        return self._next is not None

    def wait(self) -> None:
        """Until nothing runs: whoever asks has the model and the pool's memory to himself."""
        if self._next is not None:
            self._next.wait()

    def begin(self) -> Flight:
        """The step whose results are next. If it raises, nothing is under way."""
        flight, self._next = self._next, None
        try:
            if flight is None:
                flight = self._plan_now()
            if flight.ahead and self.ahead and self._foresees(flight.plan):
                self._next = self._plan_behind(self.ahead, flight)
        except BaseException:
            if flight is not None:
                flight.wait()
            self._scheduler.fly(())
            raise
        return flight

    def end(self, flight: Flight) -> list[ChunkResult]:
        """Run it, or wait for it. If it raises, nothing is under way."""
        try:
            results = flight.results()
        except BaseException:
            self.wait()
            self._next = None
            raise
        finally:
            behind = () if self._next is None else self._next.plan.rows
            self._scheduler.fly(row.sequence for row in behind)
        return results

    def _plan_now(self) -> Flight:
        plan = self._plan()
        if self.ahead is None or not self._foresees(plan):
            on_layer = self._announcements.on_layer(plan)
            run = self.runner.run
            return Flight(plan, lambda: run(plan.chunks, on_layer) if plan.rows else [])
        flight = self.ahead.start(plan)
        self._scheduler.fly(row.sequence for row in plan.rows)
        return flight

    def _plan_behind(self, ahead: RunAhead, flight: Flight) -> Flight | None:
        with ahead.foreseen(flight.plan):
            plan = self._plan()
        return ahead.start(plan, flight) if plan.rows else None

    def _foresees(self, plan: StepPlan) -> bool:
        return self._scheduler.steady and decodes_plainly(plan)

    def _plan(self) -> StepPlan:
        plan = self._scheduler.schedule()
        self._announcements.admitted(plan)
        if self._check:
            self._scheduler.prove_private(plan)
        return plan
