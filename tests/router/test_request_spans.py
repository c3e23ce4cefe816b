"""The router's spans of a request, made of its timeline; what is sent to the child, and when."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from baton.protocol.request import Request
from baton.runtime.tracing.spans import TraceContext, TraceSpan
from router.request.timeline import LogAppends, Milestone, TimelineEntry, TimelineMark
from router.request.trace import RequestTrace
from router.request.tracing import RouterTracing, spans_in
from tests.router.fakes import make_request

PARENT = f"00-{'ab' * 16}-{'cd' * 8}-01"
M = Milestone


class Sink:
    """Keeps what it gets."""

    def __init__(self) -> None:
        self.messages: list[bytes] = []
        self.closed = 0

    def send(self, message: bytes) -> None:
        self.messages.append(message)

    def close(self) -> None:
        self.closed += 1

    @property
    def spans(self) -> list[TraceSpan]:
        return [span for message in self.messages for span in spans_in(message)]


def tracing(sink: Sink, ratio: float = 1.0) -> RouterTracing:
    return RouterTracing(sink, lambda _: "llama", ratio)


def asked(traceparent: str = PARENT, name: str = "chatcmpl-x-0.1", epoch: int = 1) -> Request:
    return replace(make_request(name), traceparent=traceparent, epoch=epoch)


def finished(
    *marks: TimelineMark, error: str = "", epoch: int = 1, **changes: Any
) -> list[TraceSpan]:
    """The spans of a request that came at 10 s (wall clock: 1000 s) and ended at 11 s."""
    sink = Sink()
    made = tracing(sink)
    outcome = "failed" if error else "finished"
    trace = RequestTrace(
        admitted_at=10.0, finished_at=11.0, marks=list(marks), outcome=outcome, **changes
    )
    request = asked(epoch=epoch)
    trace.root = made.begin(request)

    async def end() -> None:
        made.finished(request, TimelineEntry(request.id, 10.0, 1000.0, 7, error, trace))
        made.flush()

    asyncio.run(end())
    return sink.spans


def mark(at: float, milestone: Milestone, epoch: int = 1, **more: Any) -> TimelineMark:
    return TimelineMark(at, milestone, epoch=epoch, **more)


def named(spans: list[TraceSpan], name: str) -> list[TraceSpan]:
    return [span for span in spans if span.name == name]


def test_a_failed_epoch_is_an_attempt_with_an_error() -> None:
    spans = finished(
        mark(10.1, M.PREFILLING, node="p"),
        mark(10.2, M.EXPORTED, node="d1"),
        mark(10.3, M.PREFILLED, tokens=1),
        mark(10.4, M.DECODING, tokens=1, node="d1"),
        mark(10.6, M.FAILED, tokens=5, why="node d1 was lost"),
        mark(10.7, M.PREFILLING, epoch=2, tokens=5, node="d2"),
        mark(10.8, M.DECODING, epoch=2, tokens=5, node="d2"),
        output_tokens=9,
    )
    root = spans[0]
    assert root.name == "chat llama"
    assert root.server
    assert root.context.parent_id == "cd" * 8
    assert root.error is None
    first, second = named(spans, "attempt")
    assert (first.error, second.error) == ("node d1 was lost", None)
    assert (first.start_ns, first.end_ns) == (1000_100_000_000, 1000_600_000_000)
    assert (second.start_ns, second.end_ns) == (1000_700_000_000, 1001_000_000_000)
    assert first.context == root.context.epoch(1)
    assert second.context == root.context.epoch(2)
    [retry] = named(spans, "retry")
    assert retry.context.parent_id == root.context.span_id
    decodes = named(spans, "decode")
    above = [first.context.span_id, second.context.span_id]
    assert [span.context.parent_id for span in decodes] == above
    assert [span.attributes["baton.tokens"] for span in decodes] == [4, 4]


def test_a_resumable_request_tells_its_appends_and_a_transfer_its_subscription() -> None:
    log = LogAppends()
    log.add(10.5, 10.75)
    spans = finished(
        mark(10.1, M.PREFILLING, node="p"),
        mark(10.2, M.EXPORTED, node="d"),
        mark(10.3, M.SUBSCRIBED, node="d"),
        mark(10.4, M.DECODING, node="d"),
        log_appends=log,
    )
    root, [append] = spans[0], named(spans, "log-append")
    assert append.context.parent_id == root.context.span_id
    assert (append.start_ns, append.end_ns) == (1000_500_000_000, 1000_750_000_000)
    told = {name: value for name, value in root.attributes.items() if "log" in name}
    assert told == {
        "baton.log.appends": 1, "baton.log.seconds": 0.25, "baton.log.longest_seconds": 0.25
    }  # fmt: skip
    [transfer] = named(spans, "kv transfer")
    assert [(it.name, it.at_ns) for it in transfer.events] == [("subscribed", 1000_300_000_000)]


def test_an_attempt_may_begin_with_a_migration() -> None:
    spans = finished(
        mark(10.1, M.PREFILLING, node="p"),
        mark(10.2, M.DECODING, node="d1"),
        mark(10.5, M.MOVING, node="d1"),
        mark(10.6, M.DECODING, epoch=2, node="d2"),
    )
    first, second = named(spans, "attempt")
    assert (first.error, second.error) == (None, None)
    assert first.end_ns == second.start_ns == 1000_500_000_000


def test_a_request_that_fails_for_good() -> None:
    spans = finished(mark(10.1, M.PREFILLING), error="invalid_request")
    assert spans[0].error == "invalid_request"
    assert [span.error for span in named(spans, "attempt")] == ["invalid_request"]


def test_a_refused_request_has_a_root_and_its_wait() -> None:
    spans = finished(error="overloaded")
    assert [span.name for span in spans] == ["chat llama", "gate", "placement"]


@pytest.mark.parametrize(
    ("traceparent", "sampled"),
    [
        (PARENT, True),
        (PARENT[:-2] + "00", False),
        (PARENT[:-2] + "03", True),
        ("", False),
        ("nonsense", False),
        (f"00-{'0' * 32}-{'cd' * 8}-01", False),
        (f"ff-{'ab' * 16}-{'cd' * 8}-01", False),
    ],
)
def test_who_is_traced(traceparent: str, sampled: bool) -> None:
    root = tracing(Sink(), ratio=0.0).begin(asked(traceparent))
    assert root.sampled is sampled
    parent = TraceContext.parse(traceparent)
    assert (parent is None) == (root.trace_id != "ab" * 16)
    assert root.parent_id == ("" if parent is None else "cd" * 8)


def test_each_router_makes_the_same_ids_of_a_request() -> None:
    once, again = tracing(Sink()).begin(asked()), tracing(Sink()).begin(asked())
    assert once == again
    others = [asked(""), asked(name="chatcmpl-y-0.1"), asked(PARENT.replace("cd", "ce"))]
    others.append(replace(asked(), params=replace(asked().params, seed=7)))
    spans = {tracing(Sink()).begin(each).span_id for each in (asked(), *others)}
    assert len(spans) == 5


def test_the_share_of_traces_that_is_sampled() -> None:
    names = [f"cmpl-{number}-0.1" for number in range(1000)]
    for ratio, least, most in ((0.0, 0, 0), (0.2, 150, 250), (1.0, 1000, 1000)):
        made = tracing(Sink(), ratio)
        sampled = sum(made.begin(asked("", name)).sampled for name in names)
        assert least <= sampled <= most


def test_a_request_that_goes_on_at_another_router_is_one_trace() -> None:
    marks = [mark(10.1, M.PREFILLING, node="p"), mark(10.4, M.DECODING, tokens=1, node="d")]
    before = finished(*marks, left=True)
    assert {span.name for span in before} == {"gate", "placement", "prefill", "decode"}
    after = finished(mark(10.6, M.PREFILLING, epoch=2, node="p"), epoch=2)
    lost, last = named(after, "attempt")
    assert (lost.error, last.error) == ("its router is gone or gave it up", None)
    assert [lost.context.span_id, last.context.span_id] == [
        after[0].context.epoch(epoch).span_id for epoch in (1, 2)
    ]
    known = {span.context.span_id for span in after}
    assert {span.context.parent_id for span in before} <= known
    assert not known & {span.context.span_id for span in before}


def test_nodes_get_the_span_of_their_epoch() -> None:
    made = tracing(Sink())
    trace = RequestTrace()
    request = asked(name="r")
    assert trace.joined(request) is request  # traces are off
    trace.root = made.begin(request)
    seen = [trace.joined(replace(request, epoch=epoch)).traceparent for epoch in (1, 2)]
    assert seen == [trace.root.epoch(epoch).traceparent for epoch in (1, 2)]
    assert {header[:36] for header in seen} == {PARENT[:36]}
    assert len({*seen, PARENT, trace.root.traceparent}) == 4


async def test_requests_are_sent_in_batches() -> None:
    sink = Sink()
    made = tracing(sink)
    trace = RequestTrace(finished_at=11.0, outcome="finished")
    request = make_request("cmpl-x-0.1")
    entry = TimelineEntry(request.id, 10.0, 1000.0, 7, "", trace)
    made.finished(request, entry)  # without a root
    trace.root = made.begin(asked(PARENT[:-2] + "00"))
    made.finished(request, entry)  # not sampled
    made.close()
    assert not sink.messages
    trace.root = made.begin(asked())
    for _ in range(65):
        made.finished(request, entry)
    assert len(sink.messages) == 1
    made.close()
    assert len(sink.messages) == 2
    assert len(named(sink.spans, "text_completion llama")) == 65
    assert sink.closed == 2
