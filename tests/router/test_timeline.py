"""Timelines: the stages of a request, what nodes tell of them, and the ring that keeps them."""

from __future__ import annotations

import asyncio
import json
import logging
from dataclasses import replace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from baton.protocol.events import NodeSpan, NodeTimings
from baton.protocol.messages import SubmitDecode, SubmitPrefill
from baton.protocol.request import RequestState
from router.metrics.router import RouterMetrics
from router.request.terms import Terms
from router.request.timeline import (
    MOST_APPENDS,
    LogAppends,
    Milestone,
    TimelineEntry,
    TimelineMark,
    TimelineRing,
    stages_of,
    transfers_of,
)
from router.request.trace import RequestTrace
from router.resumable.canonical import Canonical, canonical_of
from router.store.base import RequestRecord
from router.tenants.keys import Grant
from tests.router.clients import Client, cluster
from tests.router.fakes import FakeClock, FakeNode, make_request
from tests.timelines import assert_whole


def mark(at: float, milestone: Milestone, node: str = "", tokens: int = 0) -> TimelineMark:
    return TimelineMark(at, milestone, node, 1, tokens)


def made(name: str, took_s: float = 1.0, grant: Grant | None = None) -> TimelineEntry:
    trace = RequestTrace(Terms(grant or Grant("k", "t")), finished_at=5.0 + took_s)
    return TimelineEntry(name, 5.0, 1e9, 3, "", trace)


# ---- stages ----


def test_a_failover_and_a_migration_in_order() -> None:
    marks = [
        mark(1.0, Milestone.ADMITTED),
        mark(2.0, Milestone.PREFILLING, "p"),
        mark(3.0, Milestone.EXPORTED),
        mark(4.0, Milestone.SUBSCRIBED, "d"),
        mark(5.0, Milestone.FAILED),
        mark(6.0, Milestone.PREFILLING, "q"),
        mark(7.0, Milestone.PREFILLED, "e", 1),
        mark(8.0, Milestone.DECODING, "e", 1),
        mark(9.0, Milestone.MOVING, "f", 5),
        mark(10.0, Milestone.DECODING, "f", 5),
    ]
    stages = stages_of(0.5, marks, 12.0, 9)
    assert [(each.stage, each.start, each.node) for each in stages] == [
        ("gate", 0.5, ""), ("placement", 1.0, ""), ("prefill", 2.0, "p"), ("retry", 5.0, ""),
        ("prefill", 6.0, "q"), ("hand-over", 7.0, "e"), ("decode", 8.0, "e"),
        ("migration", 9.0, "f"), ("decode", 10.0, "f"),
    ]  # fmt: skip
    assert [(each.first_token, each.last_token) for each in stages[-3:]] == [(1, 5), (5, 5), (5, 9)]
    moved = [(each.start, each.end, each.node) for each in transfers_of(marks, 12.0)]
    assert moved == [(3.0, 5.0, "d"), (9.0, 10.0, "f")]


def test_a_transfer_tells_when_the_decode_node_began_to_fetch() -> None:
    marks = [
        mark(3.0, Milestone.EXPORTED),
        mark(4.0, Milestone.SUBSCRIBED, "d"),
        mark(5.0, Milestone.FAILED),
        mark(6.0, Milestone.FETCHING, "e"),
        mark(7.0, Milestone.FAILED),
        mark(8.0, Milestone.MOVING, "f"),
        mark(8.5, Milestone.SUBSCRIBED, "f"),
    ]
    assert [each.subscribed for each in transfers_of(marks, 9.0)] == [4.0, None, 8.5]


def test_the_longest_appends_are_told_one_by_one() -> None:
    log = LogAppends()
    for index in range(MOST_APPENDS + 3):
        log.add(float(index), index + 0.125 * (index % 5))
    assert (log.count, log.total_s) == (7, 0.125 * (0 + 1 + 2 + 3 + 4 + 0 + 1))
    assert log.longest_s == 0.5
    starts = [(span.start, span.end - span.start) for span in log.spans]
    assert starts[:3] == [(2.0, 0.25), (3.0, 0.375), (4.0, 0.5)], "in the order of time"
    assert len(starts) == MOST_APPENDS
    assert (LogAppends().spans, LogAppends().longest_s) == ([], 0.0)


def test_appends_end_with_the_request() -> None:
    entry = made("r")  # from 5.0 to 6.0
    assert entry.appends == [], "a plain request"
    entry.trace.log_appends = log = LogAppends()
    for start, end in ((5.25, 5.5), (5.5, 6.5), (6.25, 6.5)):  # it was aborted at 6.0
        log.add(start, end)
    assert [(each.start, each.end) for each in entry.appends] == [(5.25, 5.5), (5.5, 6.0)]
    assert_whole(entry)
    assert entry.told().endswith(", 3 log appends 1500.0 ms")


def test_a_request_that_was_never_let_in_is_all_gate() -> None:
    (only,) = made("r").stages
    assert (only.stage, only.start, only.end) == ("gate", 5.0, 6.0)


# ---- what nodes tell ----

QUEUED = (NodeSpan("queue", 0, 400_000), NodeSpan("compute", 400_000, 500_000))
FETCHED = (
    NodeSpan("queue", 0, 300_000),
    NodeSpan("fetch", 350_000, 500_000),
    NodeSpan("queue", 500_000, 600_000),
    NodeSpan("first step", 600_000, 650_000),
)


def told() -> RequestTrace:
    """A hand-over from 10.0 s to 10.5 s, of a request that came to P at 9.5 s."""
    trace = RequestTrace(dispatched_at=9.5, first_token_at=10.0, handover_at=10.5)
    trace.visited(FakeClock(10.0), "p", NodeTimings("r", 1, 500_000, QUEUED))
    trace.visited(FakeClock(10.5), "d", NodeTimings("r", 1, 650_000, FETCHED))
    return trace


def test_the_parts_of_a_hand_over_begin_with_token_1() -> None:
    parts = told().handover_parts_s
    assert parts == pytest.approx({"queue": 0.15 + 0.1, "fetch": 0.15, "first step": 0.05})


def test_waiting_counts_wherever_it_delays_the_client() -> None:
    trace = told()
    assert trace.node_queue_s() == pytest.approx(0.4 + 0.25)
    assert trace.queue_s(arrival=9.0) == pytest.approx(0.5 + 0.65)
    assert trace.scheduled_at == pytest.approx(9.9), "P computed from then on"


def test_a_node_that_tells_nothing() -> None:
    trace = RequestTrace(dispatched_at=9.5, first_token_at=10.0, handover_at=10.5)
    assert trace.handover_parts_s == {}
    assert (trace.queue_s(9.0), trace.scheduled_at) == (0.5, 9.5)
    assert RequestTrace().queue_s(9.0) is None


def test_a_decode_node_that_computes_the_prompt_waits_before_token_1() -> None:
    trace = RequestTrace(dispatched_at=9.5, first_token_at=10.0, local_prefill=True)
    trace.visited(FakeClock(10.0), "d", NodeTimings("r", 1, 500_000, QUEUED))
    assert trace.queue_s(9.5) == pytest.approx(0.4)


def test_metrics_tell_the_waiting_and_the_parts() -> None:
    metrics = RouterMetrics()
    meter = metrics.begin("m", 9.0)
    meter.tokens(10.0, 1)
    meter.tokens(10.5, 1)
    trace = told()
    trace.finished_at = 10.6
    meter.end(10.6, trace, 5, "stop")
    sums = {
        sample.name: sample.value
        for family in text_string_to_metric_families(metrics.render().decode())
        for sample in family.samples
        if sample.name.endswith("_sum")
    }
    assert sums["vllm:request_queue_time_seconds_sum"] == pytest.approx(1.15)
    assert sums["vllm:request_prefill_time_seconds_sum"] == pytest.approx(0.1)
    assert sums["baton_handover_seconds_sum"] == pytest.approx(0.5)
    parts = [sums[f"baton_handover_{name}_seconds_sum"] for name in ("queue", "fetch")]
    assert parts == pytest.approx([0.25, 0.15])
    assert sums["baton_handover_first_step_seconds_sum"] == pytest.approx(0.05)


async def handed_over(client: Client, p: FakeNode, d: FakeNode, tells: bool) -> None:
    """Play one request's two nodes; both tell their times, if `tells`."""
    prefill = (await p.hear(SubmitPrefill)).request
    p.export(prefill)
    decode = (await d.hear(SubmitDecode)).request
    d.subscribe(decode)
    if tells:
        p.say(timings=(NodeTimings(prefill.id, prefill.epoch, 3, (NodeSpan("compute", 0, 2),)),))
    p.tokens(prefill, 0, 41)
    await client.next()
    if tells:
        spans = (NodeSpan("fetch", 0, 2, kv_bytes=64, lane="shm"), NodeSpan("first step", 2, 3))
        d.say(timings=(NodeTimings(decode.id, decode.epoch, 3, spans),))
    d.tokens(decode, 0, 41)
    d.finish(decode, 1, 42)


@pytest.mark.parametrize("tells", [True, False])
async def test_a_request_through_two_nodes(tells: bool) -> None:
    async with cluster("p", "d") as (router, (p, d)):
        client = Client(router, make_request())
        await handed_over(client, p, d, tells)
        assert await client.done() == [41, 42]
    trace = client.trace
    found = TimelineEntry("r", 0.0, 0.0, 10, "", trace)
    assert_whole(found)
    names = [each.stage for each in found.stages]
    assert names == ["intake", "gate", "placement", "prefill", "hand-over", "decode"]
    inside = [[each.span.name for each in work] for _, work in found.work]
    told = [[], [], [], ["compute"], ["fetch", "first step"], []]
    assert inside == (told if tells else [[]] * 6)


async def test_times_of_an_older_epoch_are_dropped() -> None:
    async with cluster("p", "d") as (router, (p, d)):
        client = Client(router, make_request())
        prefill = (await p.hear(SubmitPrefill)).request
        old = NodeTimings(prefill.id, prefill.epoch + 1, 3, (NodeSpan("compute", 0, 2),))
        p.say(timings=(old,))
        p.export(prefill)
        decode = (await d.hear(SubmitDecode)).request
        p.tokens(prefill, 0, 41)
        d.tokens(decode, 0, 41)
        d.finish(decode, 1, 42)
        await client.done()
    assert client.trace.work == []


async def test_what_another_router_had_let_in_does_not_pass_the_gate_again() -> None:
    """As resumable requests, when their router has died."""
    trace = RequestTrace()
    async with cluster("p", "d") as (router, (p, _)):

        async def read() -> None:
            async for _ in router.dispatcher.run(make_request(), trace, admitted=True):
                pass

        reading = asyncio.create_task(read())
        prefill = (await p.hear(SubmitPrefill)).request
        p.finish(prefill, 0, 41)
        await reading
    names = [each.stage for each in TimelineEntry("r", 0.0, 0.0, 10, "", trace).stages]
    assert names[:2] == ["gate", "prefill"]


async def test_a_slow_request_is_a_warning_with_its_timeline(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "router.request")
    lines: dict[bool, logging.LogRecord] = {}
    for slow in (True, False):
        caplog.clear()
        limit_s = 1e-9 if slow else 1e9
        async with cluster("p", "d", slow_request_s=limit_s) as (router, (p, d)):
            client = Client(router, make_request())
            await handed_over(client, p, d, tells=True)
            await client.done()
        (lines[slow],) = (
            record for record in caplog.records if record.getMessage().startswith("request r: ")
        )
    assert (lines[True].levelno, lines[False].levelno) == (logging.WARNING, logging.INFO)
    text = lines[True].getMessage()
    assert "; timeline: intake 0.0 to " in text
    assert " on p [p: compute " in text
    assert " on d [d: fetch " in text
    assert "timeline" not in lines[False].getMessage()


def adopted(*marks: TimelineMark) -> TimelineEntry:
    """A request that came at 1.0, and that this router took over at 5.0 with 7 tokens."""
    trace = RequestTrace(adopted_at=5.0, finished_at=8.0, marks=list(marks), output_tokens=7)
    return TimelineEntry("r", 1.0, 1e9, 3, "", trace)


def test_the_time_at_the_router_before_is_a_stage_with_its_tokens() -> None:
    entry = adopted(
        TimelineMark(6.0, Milestone.PREFILLING, "p", 2, 7),
        TimelineMark(7.0, Milestone.DECODING, "d", 2, 8),
    )
    entry.trace.output_tokens = 10
    assert_whole(entry)
    found = [(it.stage, it.start, it.first_token, it.last_token) for it in entry.stages]
    assert found == [
        ("elsewhere", 1.0, 0, 7), ("placement", 5.0, 7, 7), ("prefill", 6.0, 7, 8),
        ("decode", 7.0, 8, 10),
    ]  # fmt: skip
    assert entry.trace.queue_s(entry.arrival) is None, "it was never sent to a node"
    entry.trace.dispatched_at = 6.0
    assert entry.trace.queue_s(entry.arrival) == 1.0, "what it waited on this router"


def test_an_adopted_request_that_ends_before_it_has_a_node() -> None:
    entry = adopted()
    assert_whole(entry)
    assert [(each.stage, each.last_token) for each in entry.stages] == [
        ("elsewhere", 7), ("placement", 7),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("now", "knows", "arrival"),
    [
        (5020.0, True, 20.0),  # it came 30 s ago
        (4985.0, True, 43.0),  # that router's clock is ahead: the store has had it for 7 s
        (5020.0, False, 43.0),  # its router told no arrival
    ],
)
def test_a_take_over_keeps_the_first_routers_arrival(
    monkeypatch: pytest.MonkeyPatch, now: float, knows: bool, arrival: float
) -> None:
    monkeypatch.setattr("time.time", lambda: 5000.0)
    asked = replace(make_request(), arrival=990.0, deadline=1100.0)
    canonical = Canonical("/v1/completions", "n", "owner", 0, 5.0, b"{}", asked)
    fields = canonical.fields(FakeClock(1000.0), "prompt")
    if not knows:
        content = json.loads(fields["canonical"])
        del content["arrived_at"]
        fields["canonical"] = json.dumps(content)
    record = RequestRecord("r", RequestState.QUEUED, 2, "", fields=fields, age_s=7.0)
    monkeypatch.setattr("time.time", lambda: now)
    found = canonical_of(record, FakeClock(50.0))
    assert found is not None
    assert (found.request.arrival, found.request.deadline) == (arrival, 50.0 + 100.0 - 7.0)


def test_the_end_is_the_last_byte_of_the_answer() -> None:
    marks = [mark(2.0, Milestone.PREFILLING, "p"), mark(3.0, Milestone.EXPORTED, "d")]
    trace = RequestTrace(entered_at=1.0, admitted_at=1.5, finished_at=4.0, marks=marks)
    entry = TimelineEntry("r", 0.5, 1e9, 3, "", trace)
    spans = NodeSpan("compute", 0, 10_000)
    trace.visited(FakeClock(3.5), "p", NodeTimings("r", 1, 20_000, (spans,)))
    assert (entry.end, [each.stage for each in entry.stages][-1]) == (4.0, "prefill")
    trace.answered_at = 4.75
    assert_whole(entry)
    assert entry.total_s == 4.25
    assert [(each.stage, each.start) for each in entry.stages] == [
        ("intake", 0.5), ("gate", 1.0), ("placement", 1.5), ("prefill", 2.0), ("reply", 4.0),
    ]  # fmt: skip
    assert [(each.start, each.end) for each in entry.transfers] == [(3.0, 4.0)]
    assert [len(work) for _, work in entry.work] == [0, 0, 0, 1, 0]


@pytest.mark.parametrize(("heard", "part"), [(3.25, (3.0, 3.2)), (3.01, (3.0, 3.0))])
def test_a_preemption_begins_before_the_router_hears_of_the_token(
    heard: float, part: tuple[float, float]
) -> None:
    """From 2.9 s on, on the node; or it had ended by the time that the router heard of anything."""
    marks = [
        mark(1.0, Milestone.PREFILLING, "p"),
        mark(2.0, Milestone.PREFILLED, "d", 1),
        mark(3.0, Milestone.DECODING, "d", 1),
    ]
    trace = RequestTrace(entered_at=1.0, admitted_at=1.0, finished_at=4.0, marks=marks)
    trace.output_tokens = 3
    preempted = NodeSpan("preempted", 0, 300_000)
    trace.visited(FakeClock(heard), "d", NodeTimings("r", 1, 350_000, (preempted,)))
    entry = TimelineEntry("r", 0.5, 1e9, 3, "", trace)
    assert_whole(entry)
    ((stage, (found,)),) = [(stage, work) for stage, work in entry.work if work]
    assert (stage.stage, stage.start) == ("decode", 3.0)
    assert (found.start, found.end) == pytest.approx(part)


# ---- the ring ----


def test_the_oldest_goes_first() -> None:
    ring = TimelineRing(3)
    for name in "abcd":
        ring.add(made(name))
    assert [each.request_id for each in ring.newest()] == ["d", "c", "b"]
    ring.add(made("b"))  # asked for again
    ring.add(made("e"))
    assert [each.request_id for each in ring.newest()] == ["e", "b", "d"]


def test_a_refused_request_of_the_same_name_leaves_the_timeline() -> None:
    ring = TimelineRing(9)
    first, refused = made("a", 2.0), replace(made("a"), error="invalid_request")
    refused.trace.output_tokens = 0
    ring.add(first)
    ring.add(refused)
    assert list(ring.newest()) == [first]
    refused = replace(refused, request_id="b")
    ring.add(refused)
    assert list(ring.newest()) == [refused, first]


def test_a_ring_that_keeps_none() -> None:
    ring = TimelineRing(0)
    ring.add(made("a"))
    assert list(ring.newest()) == []


def test_the_slowest_first() -> None:
    ring = TimelineRing(9)
    for name, took_s in (("a", 2.0), ("b", 3.0), ("c", 1.0)):
        ring.add(made(name, took_s))
    assert [each.request_id for each in ring.slowest()] == ["b", "a", "c"]


def test_a_request_is_found_by_each_of_its_names() -> None:
    ring = TimelineRing(9)
    ring.add(made("chatcmpl-mine-0.1"))
    ring.add(made("chatcmpl-mine-0.2"))
    for name in ("chatcmpl-mine-0.2", "chatcmpl-mine", "mine"):
        found = ring.find(name)
        assert found is not None
        assert found.request_id == "chatcmpl-mine-0.2", "the newest of that name"
    assert ring.find("chatcmpl-mine-0.1") is not None
    assert ring.find("min") is None


def test_a_domain_hides_the_others() -> None:
    ring = TimelineRing(9)
    mine, other = Grant("a", "mine"), Grant("b", "other")
    ring.add(made("cmpl-x-0.1", 3.0, mine))
    ring.add(made("cmpl-x-0.2", 1.0, other))
    found = ring.find("x", mine.domain)
    assert found is not None
    assert found.request_id == "cmpl-x-0.1"
    assert [each.request_id for each in ring.slowest(other.domain)] == ["cmpl-x-0.2"]
    assert ring.find("cmpl-x-0.1", other.domain) is None
