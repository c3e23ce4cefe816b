"""A request that was refused before anything was shown is not over: asked for again under the same
name it is served, by any router. Real journeys on scripted nodes, over one store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import httpx
import pytest
from openai import OpenAI
from starlette.types import Message, Receive, Scope, Send

from baton.protocol.clock import SystemClock
from baton.protocol.messages import SubmitDecode
from baton.protocol.request import MAX_NODE_DEATHS, Request
from examples.resuming_transport import Resuming
from router.config import RouterConfig
from router.metrics.router import RouterMetrics
from router.models import Models, ServedModel
from router.request.aborts import Aborts
from router.resumable.runs import RunParts, Runs
from router.server.app import create_app
from router.server.http_guard import HttpLimits
from router.services import RouterServices
from router.store.memory_store import MemoryTables
from tests.front.fakes import CHAT_TEMPLATE, TOKENIZER, listening
from tests.front.resumable import store_of
from tests.router.clients import first_of
from tests.router.fakes import (
    FAST,
    PATIENCE_S,
    FakeNode,
    FakeRouter,
    fake_nodes,
    running_router,
)
from tests.router.test_expected_nodes import back, gone
from tests.waiting import end, eventually

PATH = "/v1/completions"
BODY = {"prompt": [10, 11, 12], "max_tokens": 4, "temperature": 0}
NAMED = {"x-baton-resumable": "30", "x-request-id": "abc"}
KEYED = {"idempotency-key": "k"}
SERVED = [41, 42]


@dataclass
class Door:
    """A router with its front door."""

    router: FakeRouter
    runs: Runs
    http: httpx.AsyncClient
    url: str
    statuses: list[int]

    async def post(self, headers: dict[str, str] = NAMED, **body: Any) -> httpx.Response:
        return await self.http.post(PATH, json={**BODY, **body}, headers=headers)

    def begin(self, headers: dict[str, str] = NAMED, **body: Any) -> asyncio.Task[httpx.Response]:
        return asyncio.create_task(self.post(headers, **body))

    async def idle(self) -> None:
        """No request is under way; who read one may not have been told yet."""

        async def look() -> bool:
            return self.runs.num_live == 0

        await eventually(look)


@asynccontextmanager
async def door(
    nodes: Sequence[FakeNode], tables: MemoryTables | str, owner: str, **changes: Any
) -> AsyncIterator[Door]:
    store = store_of(tables, owner, FAST)
    async with (
        running_router(nodes, store, **{"node_wait_s": 0.0, **changes}) as router,
        AsyncExitStack() as stack,
    ):
        clock, metrics, dispatcher = SystemClock(), RouterMetrics(), router.dispatcher
        runs = Runs(RunParts(dispatcher, router.guard, metrics, clock))
        config = RouterConfig(request_timeout_s=20.0, grpc_port=0)
        parts: dict[str, Any] = {
            "config": config,
            "dispatcher": dispatcher,
            "registry": router.registry,
            "store": router.guard,
            "models": Models(ServedModel(config, TOKENIZER, CHAT_TEMPLATE)),
            "metrics": metrics,
            "aborts": Aborts(dispatcher),
            "clock": clock,
            "runs": runs,
        }
        stack.push_async_callback(end, asyncio.create_task(router.guard.run()))
        app, statuses = create_app(RouterServices(**parts)), list[int]()

        async def noting(scope: Scope, receive: Receive, send: Send) -> None:
            async def note(message: Message) -> None:
                statuses.extend([message["status"]] if "status" in message else [])
                await send(message)

            await app(scope, receive, note)

        async with listening(noting, HttpLimits()) as port:
            url = f"http://127.0.0.1:{port}"
            async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=PATIENCE_S) as http:
                yield Door(router, runs, http, url, statuses)
            await runs.stop()


async def served(node: FakeNode, asked: asyncio.Task[httpx.Response]) -> Request:
    """The node answers, and that is what the client gets. The request as the node had it."""
    request = (await node.hear(SubmitDecode)).request
    node.finish(request, 0, *SERVED)
    reply = await asked
    assert reply.status_code == httpx.codes.OK, reply.text
    assert reply.json()["usage"]["completion_tokens"] == len(SERVED)
    return request


@pytest.mark.parametrize("headers", [NAMED, KEYED], ids=["request id", "idempotency key"])
async def test_no_node_for_a_moment_is_no_end(
    tables: MemoryTables | str, headers: dict[str, str]
) -> None:
    async with (
        fake_nodes("d1", "d2") as (d1, d2),  # a scripted node talks to one router
        door([d1], tables, "one") as one,
        door([d2], tables, "two") as two,
    ):
        for node, each in ((d1, one), (d2, two)):
            await node.stop()
            await gone(each.router)
        for each in (one, two, one):
            reply = await each.post(headers)
            assert (reply.status_code, reply.headers["retry-after"]) == (503, "1")
            assert "no decode node" in reply.text
        again = await back(d2)
        try:
            await two.router.until(two.router.registry.can_serve)
            await served(again, two.begin(headers))
            told = await one.post(headers)
            assert told.status_code == httpx.codes.OK, "from then on it is the same answer"
            assert told.json()["usage"]["completion_tokens"] == len(SERVED)
            assert len(again.heard_of(SubmitDecode)) == 1
        finally:
            await again.stop()


async def test_nor_is_a_full_node(tables: MemoryTables | str) -> None:
    async with fake_nodes("d") as (d,), door([d], tables, "one") as one:
        asked = one.begin()
        d.fail((await d.hear(SubmitDecode)).request, "overloaded", retryable=True)
        assert (await asked).status_code == httpx.codes.TOO_MANY_REQUESTS
        await one.idle()
        await served(d, one.begin())


async def test_nor_is_a_spent_retry_budget(tables: MemoryTables | str) -> None:
    async with fake_nodes("d1", "d2") as nodes, door(nodes, tables, "one") as one:
        while one.router.dispatcher.retries.take():
            pass
        asked = one.begin()
        full = await first_of(nodes, SubmitDecode)
        full.fail((await full.hear(SubmitDecode)).request, "overloaded", retryable=True)
        assert (await asked).status_code == httpx.codes.TOO_MANY_REQUESTS
        await one.idle()
        full.heard.clear()
        asked = one.begin()
        await served(await first_of(nodes, SubmitDecode), asked)


async def test_nor_is_a_deadline_that_passes_before_the_first_token(
    tables: MemoryTables | str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with fake_nodes("d") as (d,), door([d], tables, "one") as one:
        reply = await one.post({**NAMED, "x-request-timeout-ms": "100"})
        assert reply.status_code == httpx.codes.GATEWAY_TIMEOUT
        assert "refused: deadline_exceeded" in caplog.text
        assert not [each for each in caplog.records if each.levelname == "ERROR" or each.exc_info]
        await d.hear(SubmitDecode)
        await one.idle()
        await served(d, one.begin())


async def test_nor_that_nobody_reads_what_has_not_begun(tables: MemoryTables | str) -> None:
    async with fake_nodes("d") as (d,), door([d], tables, "one") as one:
        asked = one.begin()
        await d.hear(SubmitDecode)
        await end(asked)
        [run] = one.runs._runs.values()  # pyright: ignore[reportPrivateUsage]
        run.abandon()
        await one.idle()
        await served(d, one.begin())


async def test_a_follower_at_another_router_is_told_to_ask_again(
    tables: MemoryTables | str,
) -> None:
    async with (
        fake_nodes("d1", "d2") as (d1, d2),
        door([d1], tables, "one") as one,
        door([d2], tables, "two") as two,
    ):
        asked = one.begin()
        request = (await d1.hear(SubmitDecode)).request
        follower = two.begin()

        async def follows() -> bool:
            record = await two.router.store.read(request.id)
            return record is not None and record.idle_s is not None

        await eventually(follows)
        d1.fail(request, "overloaded", retryable=True)
        assert (await asked).status_code == httpx.codes.TOO_MANY_REQUESTS
        reply = await follower
        assert (reply.status_code, reply.headers["retry-after"]) == (503, "1")
        await served(d2, two.begin())


async def test_refused_bodies_take_no_room(tables: MemoryTables | str) -> None:
    """What is kept of a key is bounded; what was refused is not kept."""
    async with fake_nodes("d") as (d,), door([d], tables, "one") as one:
        await d.stop()
        await gone(one.router)
        assert (await one.post()).status_code == httpx.codes.SERVICE_UNAVAILABLE
        await one.idle()
        kept = one.runs._kept  # pyright: ignore[reportPrivateUsage]
        kept.begin("somebody else", 1)  # whoever comes next finds what is forgotten
        assert list(kept._owners) == ["somebody else"]  # pyright: ignore[reportPrivateUsage]


# ---- what is an end, and stays one ----


async def test_what_was_shown_has_one_end(tables: MemoryTables | str) -> None:
    async with fake_nodes("d") as (d,), door([d], tables, "one") as one:
        asked = one.begin()
        d.tokens((await d.hear(SubmitDecode)).request, 0, 41)
        await d.stop()
        first = await asked
        assert first.status_code == httpx.codes.SERVICE_UNAVAILABLE
        await one.idle()
        again = await one.post()
        assert (again.status_code, again.json()) == (first.status_code, first.json())


async def test_a_request_that_kills_nodes_is_not_tried_again(tables: MemoryTables | str) -> None:
    names = [f"d{index}" for index in range(MAX_NODE_DEATHS + 1)]
    timing = replace(FAST, connect_s=0.3)
    async with fake_nodes(*names) as nodes, door(nodes, tables, "one", timing=timing) as one:
        asked = one.begin()
        left = list(nodes)
        for _ in range(MAX_NODE_DEATHS):
            node = await first_of(left, SubmitDecode)
            left.remove(node)
            await node.stop()
        assert (await asked).status_code == httpx.codes.SERVICE_UNAVAILABLE
        await one.idle()
        assert (await one.post()).status_code == httpx.codes.SERVICE_UNAVAILABLE
        assert not left[0].heard_of(SubmitDecode)


async def test_a_clients_own_fault_is_told_again(tables: MemoryTables | str) -> None:
    async with fake_nodes("d") as (d,), door([d], tables, "one") as one:
        asked = one.begin()
        d.fail((await d.hear(SubmitDecode)).request, "invalid_request", retryable=False)
        assert (await asked).status_code == httpx.codes.BAD_REQUEST
        await one.idle()
        assert (await one.post()).status_code == httpx.codes.BAD_REQUEST
        assert len(d.heard_of(SubmitDecode)) == 1


async def test_what_somebody_ended_stays_ended(tables: MemoryTables | str) -> None:
    async with fake_nodes("d") as (d,), door([d], tables, "one") as one:
        asked = one.begin()
        request = (await d.hear(SubmitDecode)).request
        assert one.router.dispatcher.abort(request.id, by_operator=True)
        for reply in (await asked, await one.post()):
            assert reply.json()["choices"][0]["finish_reason"] == "abort"
        assert len(d.heard_of(SubmitDecode)) == 1


# ---- clients ----


async def test_programs_that_ask_again_are_served() -> None:
    """The openai SDK with its own retries and an idempotency key, and the recipe's transport."""
    async with fake_nodes("d") as (d,), door([d], MemoryTables(), "one") as one:
        await d.stop()
        await gone(one.router)

        def ask(transport: httpx.BaseTransport | None, headers: dict[str, str]) -> int:
            given: Any = httpx.Client(transport=transport, trust_env=False)
            with OpenAI(
                base_url=f"{one.url}/v1", api_key="none", http_client=given, max_retries=9
            ) as client:
                answer = client.completions.create(
                    model="tiny", prompt=[10, 11, 12], max_tokens=4, extra_headers=headers
                )
            return 0 if answer.usage is None else answer.usage.completion_tokens

        programs = [
            asyncio.create_task(asyncio.to_thread(ask, None, KEYED)),
            asyncio.create_task(asyncio.to_thread(ask, Resuming([one.url]), {})),
        ]

        async def both_refused() -> bool:
            return one.statuses.count(httpx.codes.SERVICE_UNAVAILABLE) >= len(programs)

        await eventually(both_refused)
        again = await back(d)
        try:
            for _ in programs:
                again.finish((await again.hear(SubmitDecode)).request, 0, *SERVED)
            assert await asyncio.gather(*programs) == [len(SERVED)] * 2
        finally:
            await again.stop()
