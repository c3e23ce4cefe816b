"""Headers and body fields that set the terms of a request; receipts to the letter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.protocol.errors import InvalidRequest
from baton.protocol.events import NodeSpan, NodeTimings
from baton.protocol.request import Request
from baton.protocol.sampling import SamplingParams
from router.api.receipt import HEADER, MOST_HEADER_BYTES
from router.config import RouterConfig
from router.request.scores import NodeScore
from router.request.terms import BOUNDS, Terms, read_terms, tenant_salt
from router.tenants.keys import EVERYBODY, Grant
from tests.front.fakes import FakeDispatcher, Front
from tests.front.test_http_api import CHAT, COMPLETIONS, USER, events_of
from tests.router.fakes import FakeClock

ASK: dict[str, Any] = {"prompt": "a", "max_tokens": 40}


def terms_in(**headers: str) -> Terms:
    return read_terms(lambda name: headers.get(name.replace("-", "_"), ""))


def test_headers_become_terms() -> None:
    terms = terms_in(
        x_slo_ttft_ms="250", x_slo_tpot_ms="12.5", x_request_timeout_ms="5000",
        x_request_priority="-3", x_session_id="chat-1", x_baton_receipt="1",
        x_baton_resume="Exact",
    )  # fmt: skip
    assert terms.resume == "exact"
    assert (terms.slo.ttft_s, terms.slo.tpot_s, terms.timeout_s) == (0.25, 0.0125, 5.0)
    assert (terms.priority, terms.receipt, len(terms.session)) == (-3, True, 16)
    assert terms_in() == Terms()


@given(name=st.sampled_from(sorted(BOUNDS)), text=st.text(max_size=12))
def test_whatever_stands_in_a_header_is_a_number_within_its_bounds_or_refused(
    name: str, text: str
) -> None:
    terms, refused = Terms(), None
    try:
        terms = terms_in(**{name.replace("-", "_"): text})
    except InvalidRequest as error:
        refused = error
    if refused is not None:
        assert refused.field == name
        return
    low, high = BOUNDS[name]
    seconds = (terms.slo.ttft_s, terms.slo.tpot_s, terms.timeout_s)
    given_ms = [second * 1000 for second in seconds if second is not None]
    given_ms += [] if terms.priority is None else [terms.priority]
    assert len(given_ms) == bool(text.strip())
    assert all(low <= value <= high for value in given_ms)


@pytest.mark.parametrize(
    ("header", "value"),
    [
        ("x-slo-ttft-ms", "0"), ("x-slo-ttft-ms", "fast"), ("x-slo-ttft-ms", "nan"),
        ("x-slo-ttft-ms", "-5"), ("x-slo-ttft-ms", "1e9"), ("x-slo-tpot-ms", "3600001"),
        ("x-request-timeout-ms", "0.5"), ("x-request-priority", "1.5"),
        ("x-request-priority", "9999999999"), ("x-session-id", "x" * 257),
        ("x-baton-resume", "soon"),
    ],
)  # fmt: skip
async def test_a_header_out_of_bounds_is_named(header: str, value: str) -> None:
    front = Front()
    async with front.client(**{header: value}) as client:
        for path, body in ((COMPLETIONS, ASK), (CHAT, {"messages": USER})):
            reply = await client.post(path, json=body)
            assert reply.status_code == 400
            assert reply.json()["error"]["param"] == header
    assert front.dispatcher.requests == []


@pytest.mark.parametrize(
    ("field", "value"),
    [("user", 3), ("prompt_cache_key", "x" * 257), ("user", "x" * 257), ("baton_timing", "yes")],
)
async def test_a_body_field_out_of_bounds_is_named(field: str, value: Any) -> None:
    async with Front().client() as client:
        reply = await client.post(COMPLETIONS, json={**ASK, field: value})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, field)


async def test_terms_reach_the_dispatcher() -> None:
    front = Front()
    headers = {"x-slo-ttft-ms": "250", "x-request-priority": "4", "x-request-timeout-ms": "1500"}
    async with front.client(**headers) as client:
        await client.post(COMPLETIONS, json=ASK)
        await client.post(CHAT, json={"messages": USER, "priority": 2, "user": "u"})
    first, second = front.dispatcher.requests
    assert (first.priority, second.priority) == (4, 2), "the body's goes first"
    assert first.deadline == pytest.approx(first.arrival + 1.5)
    assert [it.terms.slo.ttft_s for it in front.dispatcher.traces] == [0.25, 0.25]
    assert [bool(it.terms.session) for it in front.dispatcher.traces] == [False, True]


async def test_how_it_resumes_is_the_clients_word_else_the_servers() -> None:
    front = Front(config=RouterConfig(resume="exact"))
    async with front.client() as client:
        await client.post(COMPLETIONS, json=ASK)
        await client.post(CHAT, json={"messages": USER}, headers={"x-baton-resume": "fast"})
    assert [request.resume for request in front.dispatcher.requests] == ["exact", "fast"]


async def test_the_servers_own_deadline_stands() -> None:
    front = Front(config=RouterConfig(request_timeout_s=2.0))
    async with front.client(**{"x-request-timeout-ms": "60000"}) as client:
        await client.post(COMPLETIONS, json=ASK)
    (request,) = front.dispatcher.requests
    assert request.deadline == pytest.approx(request.arrival + 2.0)


async def test_names_of_a_session_in_their_order() -> None:
    front = Front()
    async with front.client() as client:
        for headers, body in (
            ({"x-session-id": "s"}, {"user": "u", "prompt_cache_key": "k", "session_id": "i"}),
            ({}, {"user": "u", "prompt_cache_key": "k", "session_id": "s"}),
            ({}, {"user": "u", "prompt_cache_key": "s"}),
            ({}, {"user": "s"}),
            ({}, {"user": "other"}),
            ({}, {"user": ""}),
        ):
            await client.post(COMPLETIONS, json={**ASK, **body}, headers=headers)
    sessions = [trace.terms.session for trace in front.dispatcher.traces]
    assert sessions[0] == sessions[1] == sessions[2] == sessions[3] != sessions[4]
    assert sessions[5] == b""


def test_terms_applied_to_a_request() -> None:
    request = Request("r", (1,), SamplingParams(), priority=-7, tenant_salt="s", deadline=50.0)
    capped = Terms(Grant("k", "t", best_priority=-1, isolated=True), timeout_s=9.0)
    done = capped.applied(request)
    assert (done.priority, done.deadline, done.tenant_salt) == (-1, 9.0, tenant_salt("t", "s"))
    assert Terms(EVERYBODY).applied(request) == request
    assert tenant_salt("a", "bc") != tenant_salt("ab", "c")


# ---- keys ----

KEYS = """
[[keys]]
name = "alice"
key = "k1"
tenant = "research"
best_priority = 0

[[keys]]
name = "carol"
key = "k2"
tenant = "research"

[[keys]]
name = "bob"
key = "k3"
"""


@pytest.fixture
def keyed(tmp_path: Path) -> Front:
    path = tmp_path / "keys.toml"
    path.write_text(KEYS)
    config = RouterConfig(api_key=("open",), api_keys=str(path), request_timeout_s=20.0)
    return Front(config=config)


async def test_a_keys_grant_comes_with_its_requests(keyed: Front) -> None:
    async with keyed.client() as client:
        assert (await client.post(COMPLETIONS, json=ASK)).status_code == 401
        for key, salt in (
            ("k1", ""),
            ("k2", ""),
            ("k3", ""),
            ("open", ""),
            ("k3", "mine"),
            ("open", tenant_salt("research", "")),
        ):
            body = {**ASK, "priority": -5} | ({"cache_salt": salt} if salt else {})
            headers = {"authorization": f"Bearer {key}"}
            assert (await client.post(COMPLETIONS, json=body, headers=headers)).status_code == 200
    grants = [trace.terms.grant.name for trace in keyed.dispatcher.traces]
    assert grants == ["alice", "carol", "bob", "", "bob", ""]
    priorities = [request.priority for request in keyed.dispatcher.requests]
    assert priorities == [0, -5, -5, -5, -5, -5]
    salts = [request.tenant_salt for request in keyed.dispatcher.requests]
    assert salts[0] == salts[1] == tenant_salt("research", "")
    assert len(set(salts)) == 5, "a tenant's caches are its own, whatever salt others choose"


# ---- receipts ----


class ToldDispatcher(FakeDispatcher):
    """Notes what a real one would."""

    def run(self, request: Request, trace: Any) -> Any:
        trace.admitted_at = trace.dispatched_at = request.arrival + 0.01
        trace.first_token_at = request.arrival + 0.05
        trace.handover_at, trace.finished_at = request.arrival + 0.06, request.arrival + 0.25
        trace.output_tokens, trace.retries = 5, 1
        spans = (
            NodeSpan("queue", 0, 12_000),  # of these, 10 ms before token 1
            NodeSpan("fetch", 12_000, 17_000, kv_bytes=8, lane="shm"),
            NodeSpan("first step", 17_000, 20_000),
        )
        timings = NodeTimings(request.id, request.epoch, 20_000, spans)
        trace.visited(FakeClock(trace.handover_at), "decode-0", timings)
        if trace.terms.receipt:
            trace.scores = (
                NodeScore("decode-0", "decode", True, 1.0, 1, 0, 64, 0.0, None, True),
            ) * 1
        return super().run(request, trace)


RECEIPT = {
    "admission_ms": 10.0, "queue_ms": 10.0, "prefill_ms": 40.0, "transfer_ms": 10.0,
    "handover_queue_ms": 2.0, "handover_fetch_ms": 5.0, "handover_first_step_ms": 3.0,
    "node_queue_ms": 2.0, "ttft_ms": 50.0, "decode_ms": 200.0, "tpot_ms": 50.0, "total_ms": 250.0,
    "prompt_tokens": 1,
    "cached_tokens": 2, "output_tokens": 5, "placement": "remote", "prefill_node": "prefill-0",
    "decode_node": "decode-0", "retries": 1, "migrations": 0, "priority": 0,
    "scores": [{"node": "decode-0", "role": "decode", "chosen": True, "cost": 1.0, "queued": 1,
                "cached_tokens": 0, "free_blocks": 64, "session": 0.0, "expected_ms": None,
                "meets_slo": True}],
}  # fmt: skip


def without_id(receipt: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in receipt.items() if name != "request_id"}


async def test_a_receipt_in_body_and_header() -> None:
    front = Front(dispatcher=ToldDispatcher())
    async with front.client() as client:
        by_header = await client.post(
            COMPLETIONS, json=ASK, headers={HEADER: "1", "x-slo-ttft-ms": "40",
                                            "x-slo-tpot-ms": "50.1"}
        )  # fmt: skip
        by_body = await client.post(COMPLETIONS, json={**ASK, "baton_timing": True})
        plain = await client.post(COMPLETIONS, json=ASK)
    content = by_body.json()
    assert without_id(content["baton_timing"]) == RECEIPT
    assert content["baton_timing"]["request_id"].startswith(content["id"])
    assert content["choices"][0]["text"] == "hello world"
    assert json.loads(by_body.headers[HEADER]) == content["baton_timing"]
    slo = {"slo_ttft_met": False, "slo_tpot_met": True}
    assert without_id(by_header.json()["baton_timing"]) == {**RECEIPT, **slo}
    assert "baton_timing" not in plain.json()
    assert HEADER not in plain.headers


async def test_a_receipt_of_a_chat_and_of_several_prompts() -> None:
    front = Front(dispatcher=ToldDispatcher())
    async with front.client(**{HEADER: "1"}) as client:
        chat = await client.post(CHAT, json={"messages": USER})
        several = await client.post(COMPLETIONS, json={**ASK, "prompt": ["a", "b"]})
    assert chat.json()["baton_timing"]["ttft_ms"] == 50.0
    told = several.json()["baton_timing"]
    assert [without_id(receipt) for receipt in told] == [RECEIPT, RECEIPT]
    assert json.loads(several.headers[HEADER]) == told


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("usage", [False, True])
async def test_a_receipt_at_a_streams_end(path: str, usage: bool) -> None:
    front = Front(dispatcher=ToldDispatcher())
    body: dict[str, Any] = {**ASK, "messages": USER, "stream": True}
    if usage:
        body["stream_options"] = {"include_usage": True}
    async with front.client(**{HEADER: "1"}) as client:
        reply = await client.post(path, json=body)
    *events, done = events_of(reply.content)
    assert done == "[DONE]"
    told = [event for event in events if "baton_timing" in event]
    assert len(told) == 1
    assert told[0] is events[-2 if usage else -1]
    assert told[0]["choices"] == []
    assert told[0]["id"] == events[0]["id"]
    assert told[0]["baton_timing"]["decode_node"] == "decode-0"
    assert HEADER not in reply.headers


async def test_a_long_receipt_does_not_burst_the_header() -> None:
    front = Front(dispatcher=ToldDispatcher())
    body = {**ASK, "prompt": ["a"] * 8, "baton_timing": True}
    async with front.client() as client:
        reply = await client.post(COMPLETIONS, json=body)
        many = await client.post(COMPLETIONS, json={**body, "prompt": ["a"] * 40})
    shortened = json.loads(reply.headers[HEADER])
    assert len(reply.headers[HEADER]) <= MOST_HEADER_BYTES
    assert [receipt["scores"] for receipt in shortened] == [[]] * 8
    assert [len(it["scores"]) for it in reply.json()["baton_timing"]] == [1] * 8
    assert orjson.loads(many.headers[HEADER]) == "in the body"
    assert len(many.json()["baton_timing"]) == 40


async def test_an_operator_may_keep_receipts_back() -> None:
    front = Front(dispatcher=ToldDispatcher(), config=RouterConfig(receipts=False))
    async with front.client(**{HEADER: "1"}) as client:
        reply = await client.post(COMPLETIONS, json={**ASK, "baton_timing": True})
    assert "baton_timing" not in reply.json()
    assert HEADER not in reply.headers
