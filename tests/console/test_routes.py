"""The console's routes: who may ask for what, what a snapshot holds, who watches the stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from starlette.applications import Starlette

from baton.protocol.errors import BatonError, Overloaded
from baton.protocol.events import Controlled, KVFlow
from baton.protocol.handles import NodeLoad
from baton.protocol.messages import ControlNode, SubmitPrefill
from router.admin.server import create_admin_app
from router.api.http.web_errors import on_baton_error
from router.config import RouterConfig
from router.console import stream
from router.console.deltas import after
from router.console.nodes import NodeInspection
from router.console.pages import POLICY, ConsolePages
from router.console.rates import percentiles
from router.console.stream import MOST_WATCHERS, UNREAD, StateFeed
from router.console.views import ConsoleDelta, ConsoleSnapshot, LatencyPercentiles
from router.nodes.flows import MOST_FLOWS, FlowBook
from router.request.timeline import TimelineRing
from router.server.app import create_app
from router.server.http_guard import HttpLimits
from router.services import RouterServices
from tests.front.fakes import Front, listening
from tests.router.clients import Client, cluster
from tests.router.fakes import FakeClock, FakeNode, FakeRouter, make_request
from tests.waiting import eventually

KEY = "sesame"
SECRET_IDS = tuple(range(10, 20))  # of make_request's prompt


@dataclass
class Console:
    """A router with scripted nodes, and its console."""

    router: FakeRouter
    nodes: list[FakeNode]
    services: RouterServices
    feed: StateFeed

    def client(self, key: str | None = KEY) -> httpx.AsyncClient:
        app = create_admin_app(self.services, feed=self.feed, public=create_app(self.services))
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        return httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://admin", headers=headers
        )

    async def snapshot(self) -> Any:
        async with self.client() as client:
            return (await client.get("/console/data/snapshot")).json()


@asynccontextmanager
async def console(*names: str) -> AsyncIterator[Console]:
    async with cluster(*names) as (router, nodes):
        registry: Any = router.registry
        dispatcher: Any = router.dispatcher
        config = RouterConfig(api_key=("tenants",), admin_key=(KEY,), router_id="r-1")
        front = Front(dispatcher=dispatcher, registry=registry, config=config, store=router.guard)
        services = replace(
            front.services,
            events=router.events,
            timelines=dispatcher._parts.timelines,
        )
        yield Console(router, nodes, services, StateFeed(services))


async def test_data_needs_an_operators_key_and_pages_none() -> None:
    async with console("p", "d") as here:
        for key in (None, "tenants", "x"):
            async with here.client(key) as client:
                for path in ("snapshot", "stream", "nodes/d", "anything"):
                    assert (await client.get(f"/console/data/{path}")).status_code == 401, path
                assert (await client.post("/console/data/break", json={})).status_code == 401
                page = await client.get("/console/no-such-file.js")
                assert page.status_code == 404
        async with here.client() as client:
            assert (await client.get("/console/data/anything")).status_code == 404
            assert (await client.post("/console/data/snapshot")).status_code == 405
        told = [it for it in here.router.events.newest(99) if it.kind == "refused-key"]
        assert len(told) == 15
        assert not any("tenants" in each.text or KEY in each.text for each in told)


async def test_pages_have_a_strict_policy_and_an_etag(tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text("<!doctype html><title>console</title>")
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "a.js").write_text("export const a = 1;")
    app = Starlette(routes=ConsolePages(tmp_path).routes())
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://admin") as client:
        for path in ("/console", "/console/", "/console/index.html"):
            page = await client.get(path)
            assert (page.status_code, page.text[:9]) == (200, "<!doctype")
        script = await client.get("/console/lib/a.js")
        assert script.headers["content-type"].startswith("text/javascript")
        assert script.headers["content-security-policy"] == POLICY
        assert "unsafe" not in POLICY
        assert script.headers["x-content-type-options"] == "nosniff"
        same = await client.get(
            "/console/lib/a.js", headers={"if-none-match": script.headers["etag"]}
        )
        assert same.status_code == 304
        for path in ("/console/../secrets", "/console/%2e%2e/%2e%2e/etc/passwd", "/console/lib"):
            assert (await client.get(path)).status_code == 404


async def test_the_public_app_is_behind_its_own_keys() -> None:
    async with console("p", "d") as here:
        for key, status in (("tenants", 200), (KEY, 401), (None, 401)):
            async with here.client(key) as client:
                assert (await client.get("/console/api/v1/models")).status_code == status
                assert (await client.post("/console/api/drain", json={})).status_code in (404, 401)
        async with here.client("tenants") as client:
            assert (await client.get("/console/api/console/data/snapshot")).status_code == 404
            assert (await client.get("/console/api/health")).status_code == 200


async def test_a_snapshot_tells_what_is_under_way_without_its_content() -> None:
    async with console("p", "d") as here:
        p, d = here.nodes
        client = Client(here.router, make_request())
        await p.hear(SubmitPrefill)
        d.say(load=NodeLoad(running=3, free_blocks=60, total_blocks=64, mbu=0.5, draining=True))
        await here.router.until(lambda: here.router.events.newest(1)[0].kind == "drain")
        raw = await here.snapshot()
        found = msgspec.convert(raw, ConsoleSnapshot)
        by_id = {each.id: each for each in found.nodes}
        assert (by_id["p"].role, by_id["p"].state, by_id["p"].mbu) == ("prefill", "serving", None)
        card = by_id["d"]
        assert (card.state, card.running, card.kv_used, card.kv_total) == ("draining", 3, 4, 64)
        assert (card.mbu, card.instance) == (0.5, "boot-d")
        (live,) = found.requests.live
        assert (live.request_id, live.stage, live.prompt_tokens) == ("r", "prefill", 10)
        assert (live.prefill_node, live.output_tokens, found.requests.num_live) == ("p", 0, 1)
        assert (found.totals.running, found.store.ok, found.router.id) == (1, True, "r-1")
        assert found.router.needs_api_key
        assert found.router.models == ("tiny",)
        assert str(list(SECRET_IDS))[1:-1] not in str(raw)
        assert raw["nodes"][0]["kv_cached"] == 0
        client.task.cancel()
        await asyncio.gather(client.task, return_exceptions=True)
        await p.stop()
        await here.router.until(lambda: len(here.router.registry.records()) == 1)
        lost = {each["id"]: each for each in (await here.snapshot())["nodes"]}["p"]
        assert (lost["state"], bool(lost["text"])) == ("lost", True)


def frames(data: bytes) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for block in data.decode().split("\n\n")[:-1]:
        event, told = block.split("\n")
        kind = ConsoleSnapshot if event == "event: snapshot" else ConsoleDelta
        found.append((event, msgspec.json.decode(told.removeprefix("data: "), type=kind)))
    return found


async def test_all_watchers_hear_the_same_deltas() -> None:
    async with console("p", "d") as here:
        _, d = here.nodes
        async with aclosing(here.feed.watch()) as one, aclosing(here.feed.watch()) as two:
            ((kind, told),) = frames(await anext(one))
            assert kind == "event: snapshot"
            assert frames(await anext(two))[0][1] == told
            d.say(load=NodeLoad(running=3, free_blocks=60, total_blocks=64, draining=True))
            await here.router.until(lambda: here.router.events.newest(1)[0].kind == "drain")
            await here.feed.tick()
            data = await anext(one)
            assert await anext(two) is data  # encoded once
            ((kind, delta),) = frames(data)
            assert (kind, delta.seq) == ("event: delta", told.seq + 1)
            assert [(each.id, each.state) for each in delta.nodes] == [("d", "draining")]
            assert [each.kind for each in delta.events] == ["drain"]
            now = after(told, delta)
            assert {it.id: it for it in now.nodes}["d"].running == 3
            async with aclosing(here.feed.watch()) as late:
                ((kind, begun),) = frames(await anext(late))
                assert (kind, begun.seq, begun.nodes) == ("event: snapshot", now.seq, now.nodes)
        assert here.feed.num_watchers == 0


async def test_a_watcher_that_does_not_read_is_dropped_and_others_go_on() -> None:
    async with (
        console("d") as here,
        aclosing(here.feed.watch()) as slow,
        aclosing(here.feed.watch()) as quick,
    ):
        await anext(slow)
        await anext(quick)
        for _ in range(UNREAD):
            await here.feed.tick()
            await anext(quick)
        assert here.feed.num_watchers == 2
        await here.feed.tick()
        assert here.feed.num_watchers == 1
        assert [each async for each in slow] == []  # ended, and its memory is free
        await anext(quick)


async def test_watchers_are_bounded() -> None:
    async with console("d") as here:
        every = [here.feed.watch() for _ in range(MOST_WATCHERS + 1)]
        for each in every[:-1]:
            await anext(each)
        with pytest.raises(Overloaded):
            await anext(every[-1])
        async with here.client() as client:
            assert (await client.get("/console/data/stream")).status_code == 429
        for each in every:
            await each.aclose()
        assert here.feed.num_watchers == 0


async def test_the_stream_over_http_ends_with_its_client() -> None:
    async with console("p", "d") as here:
        app = create_admin_app(here.services, feed=here.feed)
        async with (
            listening(app, HttpLimits()) as port,
            httpx.AsyncClient(headers={"authorization": f"Bearer {KEY}"}) as client,
        ):
            url = f"http://127.0.0.1:{port}/console/data/stream"
            async with client.stream("GET", url) as reply:
                assert reply.headers["content-type"].startswith("text/event-stream")
                lines = reply.aiter_lines()
                assert await anext(lines) == "event: snapshot"
                await anext(lines)
                await anext(lines)
                await here.feed.tick()
                assert await anext(lines) == "event: delta"
                assert here.feed.num_watchers == 1

            async def nobody_watches() -> bool:
                return here.feed.num_watchers == 0

            await eventually(nobody_watches)


def test_percentiles_are_of_the_window() -> None:
    bounds = (0.1, 0.2, 0.4)
    assert percentiles(bounds, [5, 5, 5, 5], [5, 5, 5, 5]) == LatencyPercentiles()
    found = percentiles(bounds, [5, 0, 0, 0], [5, 100, 0, 0])
    assert found == LatencyPercentiles(150.0, 195.0, 199.0)
    assert percentiles(bounds, [], [0, 0, 0, 2]).p50 == 400.0


async def test_rates_count_what_ended_and_what_runs() -> None:
    async with console("p", "d") as here:
        feed, by = here.feed, here.services.metrics.instruments
        first = feed._rates.totals(100.0)
        assert first.requests_per_s == first.output_tokens_per_s == 0.0
        by.success.labels("tiny", "stop").inc(20)
        by.failure.labels("tiny", "node_lost").inc(10)
        by.failure.labels("tiny", "abort").inc(10)
        by.generation_tokens.labels("tiny").inc(80)
        by.first_token.labels("tiny").observe(0.03)
        found = feed._rates.totals(110.0)
        assert (found.requests_per_s, found.failed_per_s) == (4.0, 1.0)
        assert found.output_tokens_per_s == 8.0
        assert found.ttft_ms.p50 is not None
        assert found.tpot_ms.p50 is None


async def test_a_feed_that_rests_wakes_for_a_watcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "INTERVAL_S", 0.001)
    monkeypatch.setattr(stream, "REST_S", 1e6)
    async with console("p", "d") as here:

        async def has_looked() -> bool:
            return bool(here.feed._rates._samples)

        feeding = asyncio.create_task(here.feed.run())
        await eventually(has_looked)  # from now on it rests
        watcher = here.feed.watch()
        frames = [await anext(watcher) for _ in range(3)]
        assert [b"snapshot" in each for each in frames] == [True, False, False]
        await watcher.aclose()
        feeding.cancel()


def test_the_ring_of_a_router_without_timelines_is_empty() -> None:
    front = Front(config=RouterConfig(admin_key=(KEY,)))
    assert list(StateFeed(front.services)._ring.newest()) == list(TimelineRing(0).newest()) == []


async def test_a_node_is_asked_for_its_detail() -> None:
    async with console("p", "d") as here:
        p, d = here.nodes
        async with here.client() as client:
            asked = asyncio.create_task(client.get("/console/data/nodes/d"))
            order = await d.hear(ControlNode)
            assert order.action == "inspect"
            d.say(controlled=(Controlled(order.number, detail=b'{"steps":[1,2]}'),))
            reply = await asked
            assert reply.json() == {"id": "d", "role": "decode", "steps": [1, 2]}
            assert reply.headers["cache-control"] == "no-store"
            unknown = await client.get("/console/data/nodes/nobody")
            assert unknown.status_code == 404
            asked = asyncio.create_task(client.get("/console/data/nodes/p"))
            await p.hear(ControlNode)
            await p.stop()
            assert (await asked).status_code == 504
    async with console("d") as here:
        app = Starlette(
            routes=NodeInspection(here.services.registry, ask_s=0.01).routes(),
            exception_handlers={BatonError: on_baton_error},
        )
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://admin") as client:
            silent = await client.get("/console/data/nodes/d")
            assert (silent.status_code, silent.json()["error"]["code"]) == (
                504,
                "deadline_exceeded",
            )


async def test_flows_are_told_by_the_fetching_node() -> None:
    async with console("p", "d") as here:
        _, d = here.nodes
        flow = KVFlow("boot-p", "shm", num_bytes=5000, transfers=2, ms_p50=3.0, ms_p99=9.0)
        d.say(flows=(flow, KVFlow("boot-x", "grpc", faults=1)), load=NodeLoad(draining=True))
        await here.router.until(lambda: here.router.events.newest(1)[0].kind == "drain")
        found = (await here.snapshot())["flows"]
        first, second = found
        assert (first["from"], first["to"], first["lane"]) == ("p", "d", "shm")
        assert 0 < first["bytes_per_s"] <= 5000
        assert (first["ms_p50"], first["ms_p99"], first["faults"]) == (3.0, 9.0, 0)
        assert (second["from"], second["faults"], second["ms_p50"]) == ("boot-x", 1, None)


def test_flows_end_when_they_are_told_no_more() -> None:
    clock = FakeClock()
    book = FlowBook(clock)
    book.note([KVFlow("b", "shm", 100, 1)])
    assert [each.bytes_per_s for each in book.rates()] == [100]
    clock.advance(2.0)
    book.note([KVFlow("b", "shm", 500, 3)])
    (rate,) = book.rates()
    assert (rate.transfers_per_s, rate.bytes_per_s) == (1.0, round(500 / 3))
    for _ in range(8):
        clock.advance(1.0)
        book.note([KVFlow("b", "shm", 500, 3)])  # the same counters: nothing moves
    assert list(book.rates()) == []
    book.note([KVFlow(f"b{number}", "shm", 1, 1) for number in range(1000)])
    assert len(list(book.rates())) == MOST_FLOWS
