"""A timeline in Chrome's trace format, for ui.perfetto.dev and chrome://tracing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, TypeAlias

if TYPE_CHECKING:
    from router.api.timelines import Timeline, TimelineLayers, TimelinePart, TimelineSpan

    Drawn: TypeAlias = TimelineSpan | TimelinePart | TimelineLayers

ROUTER: Final = "router"
TRANSFERS: Final = "KV transfer"
LOG: Final = "token log"
ARGUMENTS: Final = ("epoch", "tokens", "why", "chunks", "kv_bytes", "lane")


def perfetto_trace(timeline: Timeline) -> dict[str, Any]:
    """Return the timeline as complete events, times in microseconds. The router, each node, each
    node's own work, the layers that it fetched, the transfers and the log have a track. Spans that
    overlap get tracks of their own: the format can only nest the spans of one track."""
    parts = [part for span in timeline.stages for part in span.parts]
    spans: list[tuple[str, Drawn]] = [(span.node or ROUTER, span) for span in timeline.stages]
    spans += [(f"{part.node}: its work", part) for part in parts]
    spans += [(f"{part.node}: layers", layers) for part in parts for layers in part.layers]
    spans += [(TRANSFERS, span) for span in timeline.transfers]
    spans += [(f"{TRANSFERS}: its parts", each) for it in timeline.transfers for each in it.parts]
    spans += [(LOG, span) for span in (timeline.log.longest if timeline.log is not None else ())]
    names = dict.fromkeys((ROUTER, *(name for name, _ in spans)))
    events: list[dict[str, Any]] = []
    track = 0
    for name in names:
        rows = _rows([span for owner, span in spans if owner == name])
        for number, row in enumerate(rows, 1):
            track += 1
            shown = {"name": name if number == 1 else f"{name} {number}"}
            head = {"ph": "M", "pid": 1, "tid": track, "name": "thread_name", "args": shown}
            events += [head, *(_event(track, span, timeline.arrived_at) for span in row)]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _rows(spans: list[Drawn]) -> list[list[Drawn]]:
    """Return the spans in as few rows as have no overlap, each in the order of time."""
    rows: list[list[Drawn]] = []
    for span in sorted(spans, key=lambda it: (it.start_ms, it.end_ms)):
        row = next((it for it in rows if it[-1].end_ms <= span.start_ms), None)
        if row is None:
            rows.append([span])
        else:
            row.append(span)
    return rows


def _event(track: int, span: Drawn, arrived_at: float) -> dict[str, Any]:
    told = {name: getattr(span, name, None) for name in ARGUMENTS}
    start, end = (round(arrived_at * 1e6 + ms * 1e3) for ms in (span.start_ms, span.end_ms))
    return {
        "ph": "X",
        "pid": 1,
        "tid": track,
        "name": getattr(span, "stage", "") or getattr(span, "name", ""),
        "ts": start,
        "dur": end - start,
        "args": {name: value for name, value in told.items() if value},
    }
