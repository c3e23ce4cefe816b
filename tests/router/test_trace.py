"""The log's one line per request: where its time went, by one grep for its id."""

from __future__ import annotations

import logging
import re

import pytest

from baton.protocol.errors import InvalidRequest, KVTimeout, Overloaded
from baton.protocol.events import NodeSpan, NodeTimings
from baton.protocol.messages import SubmitDecode, SubmitPrefill
from baton.protocol.request import Request
from baton.protocol.sampling import SamplingParams
from router.request.terms import Terms
from router.request.trace import RequestTrace
from router.tenants.keys import Grant
from tests.router.clients import Client, cluster
from tests.router.fakes import FakeClock, make_request

REQUEST = Request("r", tuple(range(812)), SamplingParams(seed=1), arrival=100.0)


def trace(**times: float) -> RequestTrace:
    made = RequestTrace(
        prefill_node="p", decode_node="d", cached_tokens=640, output_tokens=24, retries=1
    )
    for name, seconds in times.items():
        setattr(made, name, 100.0 + seconds)
    return made


def test_every_stage_has_its_time() -> None:
    made = trace(dispatched_at=0.0031, first_token_at=0.123, handover_at=0.131, finished_at=0.471)
    made.outcome = "finished"
    assert made.told(REQUEST, None) == (
        "finished in 471 ms: queue 3 ms, prefill 120 ms on p, hand-over 8 ms, decode 348 ms on d;"
        " 812 prompt tokens (640 cached), 24 output tokens, 1 retries"
    )


def test_a_prompt_that_was_computed_where_it_decodes() -> None:
    made = trace(dispatched_at=0.001, first_token_at=0.05, finished_at=0.2)
    made.outcome, made.local_prefill, made.prefill_node = "finished", True, None
    told = made.told(REQUEST, None)
    assert "queue 1 ms, prefill 49 ms on d, decode 150 ms on d;" in told
    assert "hand-over" not in told


def test_a_failure_says_in_which_stage_and_why() -> None:
    made = trace(dispatched_at=0.001, finished_at=5.001)
    made.outcome = "failed"
    told = made.told(REQUEST, KVTimeout("no progress for 5.0 s"))
    assert told.startswith("failed in 5001 ms: queue 1 ms, prefill 5000 ms on p;")
    assert told.endswith("1 retries; 503 kv_timeout: no progress for 5.0 s")
    refused = made.told(REQUEST, InvalidRequest("what the client sent"))
    assert refused.endswith("1 retries; 400 invalid_request"), (
        "texts of clients stay out of the log"
    )
    waited = trace(finished_at=2.0)
    waited.outcome = "cancelled"
    assert waited.told(REQUEST, None).startswith("cancelled in 2000 ms: queue 2000 ms; 812 prompt")


def test_what_was_refused_at_the_gate_names_tenant_status_and_reason() -> None:
    made = RequestTrace(Terms(Grant("alice", "research")), finished_at=100.25, outcome="failed")
    made.entered_at = 100.2
    assert made.told(REQUEST, Overloaded("its queue is full")) == (
        "failed in 250 ms: intake 200 ms, queue 50 ms; 812 prompt tokens (0 cached),"
        " 0 output tokens, 0 retries, tenant research; 429 overloaded: its queue is full"
    )


def test_the_queue_is_all_waiting_as_in_the_metric() -> None:
    made = trace(dispatched_at=0.010, first_token_at=0.100, finished_at=0.200)
    made.entered_at = 100.004
    spans = NodeSpan("queue", 0, 50_000), NodeSpan("compute", 50_000, 80_000)
    made.visited(FakeClock(100.1), "p", NodeTimings("r", 1, 80_000, spans))
    made.outcome = "finished"
    assert made.queue_s(100.0) == pytest.approx(0.056)
    assert "intake 4 ms, queue 56 ms, prefill 40 ms on p, decode" in made.told(REQUEST, None)


async def test_the_line_is_logged_once_per_request(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "router.request")
    async with cluster("p", "d") as (router, (p, d)):
        client = Client(router, make_request())
        prefill = await p.hear(SubmitPrefill)
        p.export(prefill.request)
        decode = await d.hear(SubmitDecode)
        p.tokens(prefill.request, 0, 41)
        await client.next()
        d.subscribe(decode.request)
        d.tokens(decode.request, 0, 41)
        d.finish(decode.request, 1, 42)
        await client.done()
    lines = [r.getMessage() for r in caplog.records if r.getMessage().startswith("request r: ")]
    assert len(lines) == 1
    stages = r"queue \d+ ms, prefill \d+ ms on p, hand-over \d+ ms, decode \d+ ms on d"
    assert re.search(stages, lines[0]), lines[0]
    assert "2 output tokens, 0 retries" in lines[0]
