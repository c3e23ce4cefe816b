"""LiveRequests: the requests of one engine, each from add() to its last event.

    add()       -> present; events that need no computing wait here for the next step
    finished()  -> its last event is part of a step's events
    abort()     -> no further event
    fail...()   -> ends with an error: RequestFailed from take_failed(), or fail_step()'s result
    take_out()  -> goes on in another engine

While a step is planned and run, the sequences of a request that ends early keep their blocks;
step_ended() frees them. Which request computes what is in scheduler.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from baton.engine.core.scheduler import Scheduler
from baton.engine.memory.adopted_pages import TAKEN_BACK
from baton.engine.state.sequence import RequestGroup, SequenceState
from baton.engine.state.stats import EngineStats
from baton.engine.state.step_plan import StepPlan
from baton.guided.spec import FIELD
from baton.protocol.errors import BatonError, InvalidRequest, KVStale
from baton.protocol.events import RequestFailed, TokenEvent
from baton.protocol.request import Request


class LiveRequests:
    """The table of requests. It frees blocks through `scheduler` and counts into `stats`."""

    def __init__(self, scheduler: Scheduler, stats: EngineStats) -> None:
        self._scheduler = scheduler
        self._stats = stats
        self._by_id: dict[str, RequestGroup] = {}
        self._events: list[TokenEvent] = []  # events without computing, which the next step reports
        self._failed: list[RequestFailed] = []  # failures not yet taken
        self._dropped: list[RequestGroup] = []  # requests that ended early while a step runs
        self._stepping = False

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._by_id

    def get(self, request_id: str) -> RequestGroup | None:
        return self._by_id.get(request_id)

    def leader(self, request_id: str) -> SequenceState:
        """Return the first sequence of a request. Raises KeyError if it is not here."""
        return self._by_id[request_id].leader

    def use_adapter(self, id_: str) -> bool:
        """Whether a request uses this adapter."""
        return any(group.request.adapter == id_ for group in self._by_id.values())

    # ---- in and out ----

    def add(self, group: RequestGroup, events: Sequence[TokenEvent]) -> None:
        """Add a request; the next step reports `events`. If these end all its samples, it has
        finished.
        """
        self._stats.num_requests += 1
        self._events.extend(events)
        if group.sequences:
            self._by_id[group.request.id] = group
        else:
            self._stats.num_finished += 1

    def report(self, events: Iterable[TokenEvent]) -> None:
        """Let the next step report these events as well."""
        self._events.extend(events)

    def finished(self, group: RequestGroup) -> None:
        """Forget a request whose last event has been made; its blocks are free already."""
        del self._by_id[group.request.id]
        self._stats.num_finished += 1

    def take_out(self, group: RequestGroup) -> None:
        """Remove a request that goes on elsewhere. Between steps only."""
        self._forget_events(group.request.id)
        del self._by_id[group.request.id]
        self._scheduler.remove(group)

    def abort(self, request_id: str) -> bool:
        """End a request without a further event; False if it is not here."""
        reported = self._forget_events(request_id)
        group = self._by_id.pop(request_id, None)
        if group is None:
            return reported
        self._stats.num_aborted += 1
        self._drop(group)
        return True

    # ---- failures ----

    def fail_doomed(self, lapsed: Iterable[str], plan: StepPlan | None = None) -> None:
        """End the requests that cannot go on: see doomed(). Their results of a step under way do
        not count.
        """
        for failed in doomed(lapsed, plan, self._by_id):
            self._forget_events(failed.request_id)
            self._drop(self._by_id.pop(failed.request_id))
            self._stats.num_failed += 1
            self._failed.append(failed)

    def fail_step(self, plan: StepPlan | None) -> list[Request]:
        """End the requests of the `plan` of a step that raised (None: all) and return them."""
        all_groups = self._by_id.values() if plan is None else (row.group for row in plan.rows)
        failed = [group for group in dict.fromkeys(all_groups) if not group.dropped]
        present = set(self._scheduler.groups())
        for group in failed:
            self._forget_events(group.request.id)
            self._by_id.pop(group.request.id, None)
            if group in present:
                self._scheduler.remove(group)
        self._stats.num_failed += len(failed)
        return [group.request for group in failed]

    def take_failed(self) -> list[RequestFailed]:
        """Return the requests that fail_doomed() has ended since the last call."""
        failed, self._failed = self._failed, []
        return failed

    # ---- steps ----

    def step_begun(self) -> None:
        """Let requests that end early keep their blocks from now on."""
        self._stepping = True

    def step_ended(self) -> None:
        """Free the blocks of requests that ended early during the step. Idempotent."""
        self._stepping = False
        dropped, self._dropped = self._dropped, []
        for group in dropped:
            self._scheduler.remove(group)

    @property
    def have_events(self) -> bool:
        """Whether the next step has something to report without computing."""
        return bool(self._events)

    def take_events(self) -> list[TokenEvent]:
        """Return, and forget, the events that a step reports without computing."""
        events, self._events = self._events, []
        return events

    # ---- inside ----

    def _drop(self, group: RequestGroup) -> None:
        group.dropped = True
        if self._stepping:
            self._dropped.append(group)
        else:
            self._scheduler.remove(group)

    def _forget_events(self, request_id: str) -> bool:
        """Drop the waiting events of a request; return whether there were any."""
        kept = [event for event in self._events if event.request_id != request_id]
        found, self._events = len(kept) < len(self._events), kept
        return found


def doomed(
    lapsed: Iterable[str], plan: StepPlan | None, present: Mapping[str, RequestGroup]
) -> list[RequestFailed]:
    """Return the requests of `present` that must end with an error, each once. Pure.

    Those are `lapsed`, whose adopted pages may belong to another request by now, and those of
    `plan` whose grammar can no longer follow their output.
    """
    errors: dict[str, BatonError] = {request_id: KVStale(TAKEN_BACK) for request_id in lapsed}
    for row in () if plan is None else plan.rows:
        guide = row.chunk.guide
        if guide is not None and guide.failure:
            error = InvalidRequest(f"guided: {guide.failure}", field=FIELD)
            errors.setdefault(row.group.request.id, error)
    return [
        RequestFailed(
            request_id, present[request_id].request.epoch, error.code, error.message,
            error.retryable, error.field,
        )
        for request_id, error in errors.items()
        if request_id in present
    ]  # fmt: skip
