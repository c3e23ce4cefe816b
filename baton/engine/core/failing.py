"""Which requests a step must end by itself, each with the error to tell. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from baton.engine.memory.adopted_pages import TAKEN_BACK
from baton.engine.state.sequence import RequestGroup
from baton.engine.state.step_plan import StepPlan
from baton.guided.grammars import FIELD
from baton.protocol.errors import BatonError, InvalidRequest, KVStale
from baton.protocol.events import RequestFailed


def doomed(
    lapsed: Iterable[str], plan: StepPlan | None, present: Mapping[str, RequestGroup]
) -> list[RequestFailed]:
    """Requests of `present` whose adopted pages may be another's (`lapsed`), and those of `plan`
    whose output its grammar can no longer follow. Each once; who has left needs no ending."""
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
