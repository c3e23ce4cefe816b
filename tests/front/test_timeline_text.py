"""Prompts and answers beside timelines: for the key that asked, for operators only with a flag."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest

from baton.protocol.events import NodeSpan, NodeTimings
from baton.protocol.messages import SubmitDecode
from baton.protocol.request import Request
from router.admin.server import create_admin_app
from router.api.perfetto import perfetto_trace
from router.api.timelines import timeline_of
from router.config import RouterConfig
from router.request.terms import Terms
from router.request.texts import MOST_TOKENS, TextRing
from router.request.timeline import Milestone, TimelineEntry, TimelineMark, TimelineRing
from router.request.trace import RequestTrace
from router.server.app import create_app
from router.services import RouterServices
from router.tenants.keys import EVERYBODY, Grant
from tests.front.fakes import TOKENIZER, Front
from tests.front.test_timelines import KEYS, RESEARCH, entry
from tests.router.clients import Client, cluster
from tests.router.fakes import FakeClock, FakeRouter, make_request

PROMPT, ANSWER = "what is it", "a secret"
NAME = "cmpl-one-0.ab"


def ids(text: str) -> tuple[int, ...]:
    return tuple(TOKENIZER.encode(text, add_special_tokens=False))


def asked(name: str = NAME, prompt: str = PROMPT) -> Request:
    return replace(make_request(name), prompt_ids=ids(prompt))


@dataclass
class Told:
    """A router whose key k1 has asked `one`."""

    services: RouterServices

    async def text(self, key: str, *, admin: bool = False, query: str = "?text=true") -> Any:
        make = create_admin_app if admin else create_app
        transport = httpx.ASGITransport(make(self.services))
        headers = {"authorization": f"Bearer {key}"} if key else {}
        async with httpx.AsyncClient(
            transport=transport, base_url="http://t", headers=headers
        ) as client:
            reply = await client.get(f"/v1/requests/one/timeline{query}")
        if reply.status_code == 404:
            assert PROMPT not in reply.text
            return "unknown"
        assert reply.status_code == 200, reply.text
        return reply.json()["text"]


def told(grant: Grant = RESEARCH, *, keep: bool = True, **options: Any) -> Told:
    texts = TextRing(10) if keep else None
    timelines = TimelineRing(10)
    timelines.add(entry("one", grant))
    if texts is not None:
        texts.add(asked(), grant, [ids(ANSWER)])
    config = RouterConfig(admin_key=("sesame",), **options)
    front = Front(config=config, timelines=timelines)
    front.dispatcher.texts = texts
    return Told(front.services)


@pytest.fixture
def keys(tmp_path: Path) -> str:
    path = tmp_path / "keys.toml"
    path.write_text(KEYS)
    return str(path)


WHOLE = {"prompt": PROMPT, "answers": [ANSWER], "cut": False}


async def test_only_the_key_that_asked_sees_a_text(keys: str) -> None:
    router = told(api_keys=keys, timeline_text=True)
    assert await router.text("k1") == WHOLE
    assert await router.text("k1", query="") is None, "only if asked for"
    assert await router.text("k2") is None, "another key of the same tenant"
    assert await router.text("k3") == "unknown", "another tenant"
    assert await router.text("sesame", admin=True) is None, "an operator without the flag"


async def test_operators_see_it_with_their_flag(keys: str) -> None:
    router = told(api_keys=keys, console_show_text=True)
    assert await router.text("sesame", admin=True) == WHOLE
    assert await router.text("k1") == WHOLE
    assert await router.text("k2") is None


async def test_keys_of_the_command_line_are_told_apart() -> None:
    options: dict[str, Any] = {
        "api_key": ("one", "two"), "timeline_text": True, "share_prefix_cache": True,
    }  # fmt: skip
    grant = RouterConfig(admin_key=("sesame",), **options).key_ring().match(b"one")
    assert grant is not None
    router = told(grant, **options)
    assert await router.text("one") == WHOLE
    assert await router.text("two") == "unknown"


async def test_without_keys_nobody_can_show_that_it_was_his() -> None:
    assert await told(EVERYBODY, timeline_text=True).text("") is None


async def test_nothing_is_kept_unless_asked_for(keys: str) -> None:
    router = told(keep=False, api_keys=keys)
    assert await router.text("k1") is None
    assert not RouterConfig().keeps_text
    assert RouterConfig(timeline_text=True).keeps_text
    assert RouterConfig(console_show_text=True).keeps_text


@pytest.mark.parametrize("query", ["?text=maybe", "?format=svg", "?colour=red"])
async def test_a_bad_query_is_named(keys: str, query: str) -> None:
    transport = httpx.ASGITransport(create_app(told(api_keys=keys).services))
    headers = {"authorization": "Bearer k1"}
    async with httpx.AsyncClient(
        transport=transport, base_url="http://t", headers=headers
    ) as client:
        reply = await client.get(f"/v1/requests/one/timeline{query}")
    named = query[1:].partition("=")[0]
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, named)


# ---- what is kept -----------------------------------------------------------------------------


def test_the_oldest_texts_go_first_by_number_and_by_bytes() -> None:
    ring = TextRing(2)
    for name in "abc":
        ring.add(asked(name), RESEARCH, [ids(ANSWER)])
    assert [ring.find(name, None) is not None for name in "abc"] == [False, True, True]
    each = ring.num_bytes // 2
    small = TextRing(9, most_bytes=2 * each)
    for name in "abc":
        small.add(asked(name), RESEARCH, [ids(ANSWER)])
    assert (small.find("a", None), small.num_bytes) == (None, 2 * each)
    small.add(asked("c"), RESEARCH, [])  # asked for again
    kept = small.find("c", None)
    assert kept is not None
    assert kept.answers == ()
    assert small.num_bytes == each + kept.num_bytes
    none = TextRing(0)
    none.add(asked("a"), RESEARCH, [])
    assert (none.find("a", None), none.num_bytes) == (None, 0)


def test_a_long_text_is_cut() -> None:
    ring = TextRing(9)
    long = replace(make_request("a"), prompt_ids=(7,) * (MOST_TOKENS + 1))
    ring.add(long, RESEARCH, [[1] * (MOST_TOKENS - 1), [2, 3]])
    kept = ring.find("a", None)
    assert kept is not None
    assert (len(kept.prompt), [len(each) for each in kept.answers]) == (
        MOST_TOKENS, [MOST_TOKENS - 1, 1],
    )  # fmt: skip
    assert kept.cut


@asynccontextmanager
async def operator(router: FakeRouter) -> AsyncIterator[httpx.AsyncClient]:
    """The admin port of a router that keeps texts from now on."""
    dispatcher: Any = router.dispatcher
    registry: Any = router.registry
    dispatcher._parts = replace(dispatcher._parts, texts=TextRing(9))
    config = RouterConfig(admin_key=("sesame",), console_show_text=True)
    front = Front(dispatcher=dispatcher, registry=registry, config=config)
    services = replace(front.services, timelines=dispatcher._parts.timelines)
    transport = httpx.ASGITransport(create_admin_app(services))
    headers = {"authorization": "Bearer sesame"}
    async with httpx.AsyncClient(
        transport=transport, base_url="http://t", headers=headers
    ) as client:
        yield client


async def test_a_request_under_way_has_its_timeline_so_far_and_no_text() -> None:
    async with cluster("d") as (router, (node,)), operator(router) as http:
        client = Client(router, asked("cmpl-live-0.ab"), Terms(RESEARCH))
        decode = await node.hear(SubmitDecode)
        address = "/v1/requests/live/timeline?text=true"
        told = (await http.get(address)).json()
        assert (told["outcome"], told["error"], told["output_tokens"]) == ("running", None, 0)
        stages = [each["stage"] for each in told["stages"]]
        assert stages == ["intake", "gate", "placement", "prefill"]
        assert told["stages"][-1]["end_ms"] == told["total_ms"] > 0
        assert told["text"] is None
        assert (await http.get(address)).json()["total_ms"] > told["total_ms"]
        node.finish(decode.request, 0, *ids(ANSWER))
        await client.done()
        told = (await http.get(address)).json()
        assert (told["outcome"], told["output_tokens"]) == ("finished", len(ids(ANSWER)))
        assert told["text"] == WHOLE
        assert PROMPT not in (await http.get(address.partition("?")[0])).text


# ---- for Perfetto -----------------------------------------------------------------------------


def test_a_trace_for_perfetto_has_no_overlap_on_a_track() -> None:
    trace = RequestTrace(Terms(RESEARCH), admitted_at=10.01, dispatched_at=10.02)
    trace.marks = [
        TimelineMark(10.02, Milestone.PREFILLING, "n", 1),
        TimelineMark(10.1, Milestone.PREFILLED, "n", 1, 1),
        TimelineMark(10.15, Milestone.DECODING, "n", 1, 1),
    ]
    # Both roles on one node: it waits for its fetch while it still computes.
    spans = (NodeSpan("queue", 0, 50_000), NodeSpan("compute", 50_000, 70_000, 2))
    trace.visited(FakeClock(10.1), "n", NodeTimings("one", 1, 75_000, spans))
    fetch = (NodeSpan("queue", 0, 40_000), NodeSpan("fetch", 40_000, 90_000, 0, 4096, "shm"))
    trace.visited(FakeClock(10.15), "n", NodeTimings("one", 1, 100_000, fetch))
    trace.finished_at, trace.outcome = 10.9, "FINISHED"
    made = perfetto_trace(timeline_of(TimelineEntry(NAME, 10.0, 1e9, 7, "", trace)))
    events = made["traceEvents"]
    tracks = {each["args"]["name"]: each["tid"] for each in events if each["ph"] == "M"}
    assert list(tracks) == ["router", "n", "n: its work", "n: its work 2"]
    drawn = [each for each in events if each["ph"] == "X"]
    assert len(drawn) == 5 + 4
    for track in tracks.values():
        mine = sorted((e["ts"], e["ts"] + e["dur"]) for e in drawn if e["tid"] == track)
        assert mine
        assert all(one[1] <= other[0] for one, other in pairwise(mine))
    (fetched,) = [each for each in drawn if each["name"] == "fetch"]
    assert fetched["args"] == {"kv_bytes": 4096, "lane": "shm"}
    assert max(each["ts"] + each["dur"] for each in drawn) == 1e9 * 1e6 + 900_000


async def test_a_trace_for_perfetto_is_served(keys: str) -> None:
    router = told(api_keys=keys)
    transport = httpx.ASGITransport(create_app(router.services))
    headers = {"authorization": "Bearer k1"}
    async with httpx.AsyncClient(
        transport=transport, base_url="http://t", headers=headers
    ) as client:
        reply = await client.get("/v1/requests/one/timeline?format=perfetto")
        names = {each["name"] for each in reply.json()["traceEvents"]}
    assert {"gate", "prefill", "transfer", "fetch", "thread_name"} <= names
