"""Ending requests of other routers by name, through a real Redis; and without one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from baton.protocol.request import Request
from baton.runtime.redis.connections import connect
from router.request import aborts
from router.request.aborts import Aborts
from router.request.request_ids import names
from router.request.trace import RequestTrace
from tests.front.fakes import MODEL, Front
from tests.router.fakes import PATIENCE_S, make_request


class Requests:
    """Of one router: some run, some wait."""

    def __init__(self, *live: str, waiting: tuple[str, ...] = ()) -> None:
        self.ids, self.waits = list(live), list(waiting)
        self.ended: list[tuple[str, bool]] = []

    def live(self) -> list[tuple[Request, RequestTrace]]:
        return [(replace(make_request(id_)), RequestTrace()) for id_ in self.ids]

    def waiting(self) -> list[tuple[Request, RequestTrace]]:
        return [(make_request(id_), RequestTrace()) for id_ in self.waits]

    def abort(self, request_id: str, by_operator: bool = False) -> bool:
        self.ended.append((request_id, by_operator))
        return True


@contextlib.asynccontextmanager
async def routers(url: str, *requests: Requests) -> AsyncIterator[list[Aborts]]:
    clients = [connect(url, 0.5) for _ in requests]
    made = [Aborts(own, client) for own, client in zip(requests, clients, strict=True)]
    tasks = [asyncio.create_task(each.run()) for each in made]
    try:
        async with asyncio.timeout(PATIENCE_S):
            for each in made:
                await each.listening.wait()
        yield made
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for client in clients:
            await client.aclose()


@pytest.mark.redis
async def test_whichever_router_is_asked(empty_redis: str) -> None:
    first = Requests("cmpl-a-0.1")
    second = Requests("cmpl-b-0.2", waiting=("cmpl-c-0.3",))
    third = Requests("cmpl-b-0.4")
    async with routers(empty_redis, first, second, third) as (asked, *_):
        found = await asked.everywhere(["b", "c", "nobody"], by_operator=True)
        assert sorted(found) == ["cmpl-b-0.2", "cmpl-b-0.4", "cmpl-c-0.3"]
        assert (first.ended, third.ended) == ([], [("cmpl-b-0.4", True)])
        assert second.ended == [("cmpl-b-0.2", True), ("cmpl-c-0.3", True)]
        # A client names one request, by its whole id.
        assert await asked.everywhere(["b"]) == []
        assert await asked.everywhere(["cmpl-b-0.4"]) == ["cmpl-b-0.4"]
        assert third.ended[-1] == ("cmpl-b-0.4", False)
        assert await asked.everywhere(["cmpl-a-0.1"]) == ["cmpl-a-0.1"]
        assert first.ended == [("cmpl-a-0.1", False)]
        everyone = await asked.everything()
        assert sorted(everyone) == ["cmpl-a-0.1", "cmpl-b-0.2", "cmpl-b-0.4", "cmpl-c-0.3"]
        assert third.ended[-1] == ("cmpl-b-0.4", True)


@pytest.mark.redis
async def test_a_router_that_has_stopped_is_not_waited_for(
    empty_redis: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aborts, "ANSWER_S", 2 * PATIENCE_S)
    own, other = Requests("x"), Requests("y")
    async with routers(empty_redis, own, other) as (asked, _), routers(empty_redis, Requests()):
        pass
    async with routers(empty_redis, own) as (asked,):
        async with asyncio.timeout(PATIENCE_S):
            assert await asked.everywhere(["y"]) == []


def test_a_request_is_meant_by_each_of_its_names() -> None:
    for prefix in ("cmpl-", "chatcmpl-", "resp_", "msg_", "gen-"):
        for name in ("abc", "a-b_c", "_", "-"):
            engine = f"{prefix}{name}-0.1a2b"
            for asked in (name, prefix + name, engine):
                assert names(asked, engine), (asked, engine)
            for other in ("", prefix, "0.1a2b", f"{name}x", f"x{name}", f"cmp-{name}"):
                assert not names(other, engine), (other, engine)
    for asked in ("n", "cmpl-n", "chatcmpl-n", "resp_n", "msg_n", "req-n"):
        assert names(asked, "req-n-0.abcd")


@pytest.mark.parametrize(
    ("path", "said"), [("/v1/responses", {"input": "a"}), ("/v1/messages", {"max_tokens": 9})]
)
async def test_replies_of_other_dialects_hold_the_exchanges_id(
    path: str, said: dict[str, Any]
) -> None:
    front = Front()
    body = {"model": MODEL, "messages": [{"role": "user", "content": "a"}], **said}
    async with front.client(**{"anthropic-version": "2023-06-01", "x-request-id": "mine"}) as it:
        reply = await it.post(path, json=body)
    assert reply.status_code == 200, reply.text
    assert reply.json()["id"] in ("resp_mine", "msg_mine")
    assert names("mine", front.dispatcher.requests[0].id)


async def test_without_redis_there_is_this_router() -> None:
    own = Requests("x", "y")
    alone = Aborts(own)
    await alone.run()
    assert await alone.everywhere(["x", "z"]) == ["x"]


async def test_while_redis_is_away_this_router_is_asked_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    client = connect("redis://127.0.0.1:1", 0.5)
    own = Requests("x")
    alone = Aborts(own, client)
    running = asyncio.create_task(alone.run())
    async with asyncio.timeout(PATIENCE_S):
        assert await alone.everywhere(["x", "z"]) == ["x"]
    assert "only this router was asked" in caplog.text
    assert not alone.listening.is_set()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await client.aclose()
