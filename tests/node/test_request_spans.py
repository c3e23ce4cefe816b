"""The spans that a node makes of a request: its stages, its failure, its export."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.node.tracing import FETCH, MOST_EVENTS, MOST_EXPORTS, NodeTracing
from baton.protocol.events import TokenEvent
from baton.protocol.handles import KVHandle, Role
from baton.protocol.request import Request
from baton.runtime.tracing.exporter import decode_spans
from baton.runtime.tracing.spans import TraceContext, TraceSpan
from kv_transfer.exports import LEASE_OVER
from kv_transfer.protocol.base import KVReady
from tests.fakes import FakeClock, request
from tests.transfer.machines import HANDLE

PARENT = TraceContext("ab" * 16, "cd" * 8)


class Kept:
    """Keeps the spans that it gets."""

    def __init__(self) -> None:
        self.spans: list[TraceSpan] = []

    def send(self, message: bytes) -> None:
        self.spans += decode_spans(message)

    def close(self) -> None:
        self.spans.clear()


class Traced:
    """A node's tracing over a clock that a test moves."""

    def __init__(self, role: Role) -> None:
        self.clock = FakeClock()
        self.kept = Kept()
        self.node = NodeTracing(self.kept, role, "n0", self.clock)

    def took(self) -> list[tuple[str, float, str | None]]:
        """Name, seconds and error of each span."""
        return [
            (span.name, round((span.end_ns - span.start_ns) / 1e9, 3), span.error)
            for span in self.kept.spans
        ]


def asked(flags: str = "01") -> Request:
    return replace(request("r"), traceparent=PARENT.traceparent[:-2] + flags)


def event(preemptions: int = 0) -> TokenEvent:
    return TokenEvent("r", 1, 5, (5,), preemptions=preemptions)


def test_only_sampled_requests_have_spans() -> None:
    node = Traced(Role.DECODE).node
    assert node.begin(request("r"), True) is None
    assert node.begin(asked("00"), True) is None
    assert node.begin(asked(), True) is not None


def test_a_decode_node_waits_fetches_and_decodes() -> None:
    traced = Traced(Role.DECODE)
    seen = traced.node.begin(asked(), True)
    assert seen is not None
    traced.clock.advance(1)
    seen.enter(FETCH)
    traced.clock.advance(2)
    layers = (0, 1, 0, 500_000, 400, 2, 2, 500_000, 1_500_000, 240)
    seen.fetched(KVReady(5, (), 640, 2.0, lane="shm", layers=layers))
    for _ in range(3):
        traced.clock.advance(4)
        seen.saw(event(preemptions=1))
    seen.end(cancelled=False)
    assert traced.took() == [
        ("decode node", 15.0, None), ("queue", 1.0, None), ("kv fetch", 2.0, None),
        ("decode", 12.0, None),
    ]  # fmt: skip
    node, _, fetch, decode = traced.kept.spans
    assert node.context.parent_id == PARENT.span_id
    assert node.attributes["gen_ai.latency.time_in_queue"] == 1.0
    assert {span.context.parent_id for span in traced.kept.spans[1:]} == {node.context.span_id}
    assert fetch.attributes == {
        "baton.kv.tokens": 5, "baton.kv.bytes": 640, "baton.kv.lane": "shm",
        "baton.kv.adopted": False,
    }  # fmt: skip
    came = [((it.at_ns - fetch.start_ns) / 1e9, it.name, it.attributes) for it in fetch.events]
    assert came == [
        (0.5, "layers", {"baton.layers.first": 0, "baton.layers.last": 1,
                         "baton.layers.seconds": 0.5, "baton.kv.bytes": 400}),
        (1.5, "layers", {"baton.layers.first": 2, "baton.layers.last": 2,
                         "baton.layers.seconds": 1.0, "baton.kv.bytes": 240}),
    ]  # fmt: skip
    assert decode.attributes["baton.steps"] == 3
    assert decode.attributes["baton.preemptions"] == 1
    assert [each.name for each in decode.events] == ["first token"]


def test_a_prompt_that_is_computed_where_it_decodes() -> None:
    traced = Traced(Role.DECODE)
    seen = traced.node.begin(asked(), False)
    assert seen is not None
    traced.clock.advance(2)
    seen.saw(event())
    traced.clock.advance(3)
    seen.end(cancelled=True)
    assert traced.took() == [
        ("decode node", 5.0, None), ("compute", 2.0, None), ("decode", 3.0, None)
    ]  # fmt: skip
    assert traced.kept.spans[0].attributes["baton.aborted"] is True


def test_a_failure_is_the_last_stages() -> None:
    traced = Traced(Role.DECODE)
    seen = traced.node.begin(asked(), True)
    assert seen is not None
    traced.clock.advance(1)
    seen.enter(FETCH)
    traced.clock.advance(1)
    seen.error = "kv_lost"
    seen.end(cancelled=False)
    assert traced.took() == [
        ("decode node", 2.0, "kv_lost"), ("queue", 1.0, None), ("kv fetch", 1.0, "kv_lost")
    ]  # fmt: skip


def test_a_prefill_node_tells_its_chunks() -> None:
    traced = Traced(Role.PREFILL)
    seen = traced.node.begin(asked(), False)
    assert seen is not None
    traced.clock.advance(1)
    for upto in range(MOST_EVENTS + 2):
        seen.chunk(upto)
        traced.clock.advance(1)
    seen.saw(event())
    seen.end(cancelled=False)
    assert [name for name, *_ in traced.took()] == ["prefill node", "queue", "compute"]
    compute = traced.kept.spans[-1]
    assert compute.attributes == {"baton.chunks": MOST_EVENTS + 2}
    assert len(compute.events) == MOST_EVENTS


@pytest.mark.parametrize(("why", "error"), [("acknowledged", None), (LEASE_OVER, LEASE_OVER)])
def test_an_export_lasts_until_its_release(why: str, error: str | None) -> None:
    traced = Traced(Role.PREFILL)
    seen = traced.node.begin(asked(), False)
    assert seen is not None
    handle = handle_of(1)
    seen.exported(handle, 640)
    traced.clock.advance(3)
    traced.node.released(handle, why)
    traced.node.released(handle, why)  # once
    assert traced.took() == [("kv export", 3.0, error)]
    assert traced.kept.spans[0].attributes["baton.kv.released"] == why
    assert traced.kept.spans[0].context.parent_id == seen.context.span_id


def test_exports_that_nobody_releases_are_forgotten() -> None:
    traced = Traced(Role.PREFILL)
    for number in range(MOST_EXPORTS + 1):
        traced.node.offered(handle_of(number), PARENT, 1)
    traced.node.released(handle_of(0), "acknowledged")
    assert traced.took() == []
    traced.node.released(handle_of(1), "acknowledged")
    assert len(traced.took()) == 1


def handle_of(number: int) -> KVHandle:
    return replace(HANDLE, request_id="r", export_seq=number)
