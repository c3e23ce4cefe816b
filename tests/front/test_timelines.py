"""Timelines over HTTP: each tenant sees its own requests, operators see all, nobody sees a text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from baton.protocol.events import NodeSpan, NodeTimings
from router.admin.server import create_admin_app
from router.api.timelines import DEFAULT_LISTED, MOST_LISTED
from router.config import RouterConfig
from router.request.scores import NodeScore
from router.request.terms import Terms
from router.request.timeline import LogAppends, Milestone, TimelineEntry, TimelineMark, TimelineRing
from router.request.trace import RequestTrace
from router.tenants.keys import Grant
from tests.front.fakes import Front
from tests.front.test_terms import KEYS
from tests.router.fakes import FakeClock
from tests.timelines import assert_whole

RESEARCH, BOB = Grant("alice", "research"), Grant("bob", "bob")
SCORE = NodeScore("d", "decode", True, 1.0, 1, 0, 64, 0.0, None, True)


def entry(name: str, grant: Grant, took_s: float = 0.5) -> TimelineEntry:
    """A request that was handed over; 100 ms until token 1, half of them in the queue of P."""
    trace = RequestTrace(Terms(grant), admitted_at=10.01, dispatched_at=10.02)
    trace.marks = [
        TimelineMark(10.02, Milestone.PREFILLING, "p", 1),
        TimelineMark(10.03, Milestone.EXPORTED, "", 1),
        TimelineMark(10.1, Milestone.PREFILLED, "d", 1, 1),
        TimelineMark(10.15, Milestone.DECODING, "d", 1, 1),
    ]
    spans = NodeSpan("queue", 0, 50_000), NodeSpan("compute", 50_000, 70_000, 2)
    trace.visited(FakeClock(10.1), "p", NodeTimings(name, 1, 75_000, spans))
    fetch = (NodeSpan("fetch", 0, 30_000, 0, 4096, "shm"), NodeSpan("first step", 31_000, 40_000))
    trace.visited(FakeClock(10.15), "d", NodeTimings(name, 1, 41_000, fetch))
    trace.first_token_at, trace.handover_at, trace.finished_at = 10.1, 10.15, 10.0 + took_s
    trace.outcome, trace.output_tokens, trace.scores = "FINISHED", 9, (SCORE,)
    trace.prefill_node, trace.decode_node = "p", "d"
    return TimelineEntry(f"cmpl-{name}-0.ab", 10.0, 1e9, 7, "", trace)


@pytest.fixture
def front(tmp_path: Path) -> Front:
    path = tmp_path / "keys.toml"
    path.write_text(KEYS)
    ring = TimelineRing(100)
    ring.add(entry("one", RESEARCH, took_s=0.9))
    ring.add(entry("two", BOB))
    ring.add(entry("three", RESEARCH, took_s=0.3))
    config = RouterConfig(api_keys=str(path), admin_key=("sesame",))
    return Front(config=config, timelines=ring)


def admin(front: Front) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(create_admin_app(front.services))
    headers = {"authorization": "Bearer sesame"}
    return httpx.AsyncClient(transport=transport, base_url="http://admin", headers=headers)


def ids(reply: httpx.Response) -> list[str]:
    assert reply.status_code == 200, reply.text
    return [each["request_id"].removeprefix("cmpl-").removesuffix("-0.ab")
            for each in reply.json()["data"]]  # fmt: skip


async def test_a_tenant_sees_its_own_requests(front: Front) -> None:
    seen: dict[str, list[str]] = {}
    async with front.client() as client:
        assert (await client.get("/v1/requests")).status_code == 401
        assert (await client.get("/v1/requests/one/timeline")).status_code == 401
        for key in ("k1", "k2", "k3"):
            client.headers["authorization"] = f"Bearer {key}"
            seen[key] = ids(await client.get("/v1/requests"))
            for name in ("one", "two", "three"):
                for asked in (name, f"cmpl-{name}", f"cmpl-{name}-0.ab"):
                    reply = await client.get(f"/v1/requests/{asked}/timeline")
                    assert reply.status_code == (200 if name in seen[key] else 404)
    assert seen == {"k1": ["three", "one"], "k2": ["three", "one"], "k3": ["two"]}


async def test_operators_see_all_of_them(front: Front) -> None:
    async with admin(front) as client:
        assert ids(await client.get("/v1/requests")) == ["three", "two", "one"]
        slowest = await client.get("/v1/requests?slowest=true&limit=2")
        assert ids(slowest) == ["one", "two"]
        assert [each["tenant"] for each in slowest.json()["data"]] == ["research", "bob"]
        assert (await client.get("/v1/requests/two/timeline")).status_code == 200
        client.headers["authorization"] = "Bearer k1"
        assert (await client.get("/v1/requests")).status_code == 401


async def test_what_a_timeline_tells(front: Front) -> None:
    async with admin(front) as client:
        told: dict[str, Any] = (await client.get("/v1/requests/one/timeline")).json()
    spans = [(each["stage"], each["start_ms"], each["end_ms"]) for each in told["stages"]]
    assert spans == [
        ("gate", 0.0, 10.0), ("placement", 10.0, 20.0), ("prefill", 20.0, 100.0),
        ("hand-over", 100.0, 150.0), ("decode", 150.0, 900.0),
    ]  # fmt: skip
    prefill, handover, decode = told["stages"][2:]
    assert prefill["node"] == "p"
    assert prefill["parts"] == [
        {"name": "queue", "node": "p", "start_ms": 25.0, "end_ms": 75.0},
        {"name": "compute", "node": "p", "start_ms": 75.0, "end_ms": 95.0, "chunks": 2},
    ]
    assert handover["parts"] == [
        {"name": "fetch", "node": "d", "start_ms": 109.0, "end_ms": 139.0, "kv_bytes": 4096,
         "lane": "shm"},
        {"name": "first step", "node": "d", "start_ms": 140.0, "end_ms": 149.0},
    ]  # fmt: skip
    assert (prefill["tokens"], decode["tokens"]) == ([0, 1], [1, 9])
    (moved,) = told["transfers"]
    assert (moved["start_ms"], moved["end_ms"]) == (30.0, 150.0)
    assert "parts" not in moved, "nobody has subscribed"
    assert told["log"] is None
    figures = (told["total_ms"], told["ttft_ms"], told["queue_ms"], told["arrived_at"])
    assert figures == (900.0, 100.0, 70.0, 1e9)
    assert told["scores"][0]["node"] == "d"


async def test_layers_subscription_and_log(front: Front) -> None:
    """A newer node tells the layers of its fetch; a resumable request has a log."""
    found = entry("four", RESEARCH)
    marks = found.trace.marks
    marks.insert(2, TimelineMark(10.05, Milestone.SUBSCRIBED, "d", 1))
    layers = (0, 1, 0, 9_000, 3000, 2, 2, 9_000, 30_001, 1096)  # rounded up by 1 us
    work = found.trace.work[2]
    span = msgspec.structs.replace(work.span, layers=layers)
    found.trace.work[2] = msgspec.structs.replace(work, span=span)
    found.trace.log_appends = LogAppends()
    for start, end in ((10.1, 10.104), (10.2, 10.201)):
        found.trace.log_appends.add(start, end)
    assert_whole(found)
    services = front.services
    assert services.timelines is not None
    services.timelines.add(found)
    async with admin(front) as client:
        told = (await client.get("/v1/requests/four/timeline")).json()
        trace = (await client.get("/v1/requests/four/timeline?format=perfetto")).json()
    fetch = told["stages"][3]["parts"][0]
    assert fetch["layers"] == [
        {"name": "layers 0-1", "first": 0, "last": 1, "start_ms": 109.0, "end_ms": 118.0,
         "kv_bytes": 3000},
        {"name": "layer 2", "first": 2, "last": 2, "start_ms": 118.0, "end_ms": 139.0,
         "kv_bytes": 1096},
    ]  # fmt: skip
    assert told["transfers"][0]["parts"] == [
        {"name": "export", "node": "", "start_ms": 30.0, "end_ms": 50.0},
        {"name": "subscribe", "node": "", "start_ms": 50.0, "end_ms": 150.0},
    ]
    longest = [
        {"stage": "log-append", "start_ms": 100.0, "end_ms": 104.0, "epoch": 0},
        {"stage": "log-append", "start_ms": 200.0, "end_ms": 201.0, "epoch": 0},
    ]
    assert told["log"] == {
        "appends": 2, "total_ms": 5.0, "longest_ms": 4.0, "longest": longest,
    }  # fmt: skip
    events = trace["traceEvents"]
    tracks = {each["tid"]: each["args"]["name"] for each in events if each["ph"] == "M"}
    drawn = [(tracks[each["tid"]], each["name"]) for each in events if each["ph"] == "X"]
    assert drawn[-7:] == [
        ("d: layers", "layers 0-1"), ("d: layers", "layer 2"),
        ("KV transfer", "transfer"), ("KV transfer: its parts", "export"),
        ("KV transfer: its parts", "subscribe"),
        ("token log", "log-append"), ("token log", "log-append"),
    ]  # fmt: skip
    sizes = [each["args"].get("kv_bytes") for each in events if each["name"].startswith("layer")]
    assert sizes == [3000, 1096]


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("limit=0", "limit"),
        (f"limit={MOST_LISTED + 1}", "limit"),
        ("limit=x", "limit"),
        ("limit=-1", "limit"),
        ("limit=%C2%B2", "limit"),
        ("limit=" + "9" * 500, "limit"),
        ("slowest=maybe", "slowest"),
        ("colour=red", "colour"),
    ],
)
async def test_bad_queries_are_refused(front: Front, query: str, param: str) -> None:
    async with admin(front) as client:
        reply = await client.get(f"/v1/requests?{query}")
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)


async def test_an_unknown_request(front: Front) -> None:
    async with admin(front) as client:
        reply = await client.get("/v1/requests/nobody/timeline")
        assert (reply.status_code, reply.json()["error"]["param"]) == (404, "request_id")
        long = await client.get(f"/v1/requests/{'x' * 3000}/timeline")
        assert long.status_code == 404
        assert len(long.text) < 1000, "it is not repeated as a whole"


async def test_a_router_that_keeps_none() -> None:
    front = Front(config=RouterConfig(admin_key=("sesame",)))
    async with admin(front) as client:
        assert ids(await client.get("/v1/requests")) == []
        assert (await client.get("/v1/requests/one/timeline")).status_code == 404


async def test_a_list_is_short_unless_told() -> None:
    ring = TimelineRing(1000)
    for index in range(MOST_LISTED + 50):
        ring.add(entry(f"r{index}", RESEARCH))
    front = Front(config=RouterConfig(admin_key=("sesame",)), timelines=ring)
    async with admin(front) as client:
        assert len(ids(await client.get("/v1/requests"))) == DEFAULT_LISTED
        listed = ids(await client.get(f"/v1/requests?limit={MOST_LISTED}"))
    assert listed == [f"r{MOST_LISTED + 49 - index}" for index in range(MOST_LISTED)]
