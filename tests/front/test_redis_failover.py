"""A primary is killed, and slots move, while 100 streams run: all of them are told whole and once.

Real servers; routers without nodes, whose scripted tokens take the time of an engine's steps.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from baton.protocol.clock import Clock
from baton.protocol.errors import StoreUnavailable
from baton.protocol.request import Request, RequestState
from baton.runtime.redis.keys import SPREAD, slot_of
from baton.runtime.timing import Timing
from router.resumable.canonical import owner_digest, record_id
from router.store.base import LogEntry, RequestStore
from router.store.redis_links import RedisServers
from router.store.redis_store import RedisStore
from tests.front.fakes import TOKENIZER, FakeDispatcher, FakeModel, FakeRegistry
from tests.front.resumable import HeldRouter, Reader, held_router
from tests.redis_kinds import Servers, migrate, until
from tests.waiting import eventually

pytestmark = [pytest.mark.redis, pytest.mark.slow, pytest.mark.soak]

STREAMS = 100  # every second one resumable
TOKENS = 100
STEP_S = 0.2
BEFORE = 8  # events of each stream before anything happens
TIMING = Timing(heartbeat_s=0.5)
TIMEOUT_S = 2.0  # this process has the routers, the clients and the tokens
GIVE_UP_S = 120.0
ANSWER = "".join(random.Random(7).choices("abcdefghij", k=TOKENS))
LENGTH = len(TOKENIZER.encode(ANSWER, add_special_tokens=False)) + 1  # and the end of sequence
BODY: dict[str, Any] = {
    "messages": [{"role": "user", "content": "hi"}],
    "stream": True,
    "max_tokens": TOKENS + 10,
    "seed": 5,
}


class Paced(FakeDispatcher):
    """A step takes a while, as an engine's does."""

    async def _events(self, request: Request) -> AsyncIterator[Any]:
        async for event in super()._events(request):
            await asyncio.sleep(STEP_S)
            yield event


def store_over(servers: Servers) -> Callable[[str, Timing, Clock], RequestStore]:
    def make(owner: str, timing: Timing, clock: Clock) -> RequestStore:
        clients = RedisServers.of(servers.url, TIMEOUT_S, replicas=1)
        return RedisStore(clients, owner, timing, clock, TIMEOUT_S)

    return make


@asynccontextmanager
async def two_routers(servers: Servers) -> AsyncIterator[tuple[HeldRouter, HeldRouter]]:
    place = store_over(servers)
    deadline: dict[str, Any] = {"request_timeout_s": GIVE_UP_S}
    others = {"registry": FakeRegistry(FakeModel(max_model_len=1000))}
    async with (
        held_router("one", place, timing=TIMING, others=others, **deadline) as one,
        held_router("two", place, timing=TIMING, others=others, **deadline) as two,
    ):
        for router in (one, two):
            router.dispatcher.script = Paced(answer=ANSWER)
        yield one, two


@dataclass
class Stream:
    """One request's client: it asks again where it was, as docs/resumable.md tells it to."""

    name: str
    resumable: bool
    routers: tuple[HeldRouter, HeldRouter]
    reader: Reader | None = None
    text: str = ""  # of earlier connections
    last: str = ""  # the id of the last event of those
    asked: int = 0

    def begin(self) -> None:
        headers = {"x-request-id": self.name}
        if self.resumable:
            headers["x-baton-resumable"] = "120"
        http = self.routers[0].http
        path = "/v1/chat/completions"
        self.reader = Reader(http, "POST", path, json=BODY, headers=headers)

    @property
    def events(self) -> int:
        """How many events the client has seen so far."""
        assert self.reader is not None
        assert self.reader.status in (0, 200), self.reader.body
        return len(self.reader.events)

    @property
    def tokens(self) -> int:
        """How many tokens of a resumable request were shown, by the ids of its events."""
        found = re.match(r"\d+", self.position)
        return int(found[0]) if found else 0

    @property
    def position(self) -> str:
        """The id of the last event."""
        assert self.reader is not None
        return self.reader.events[-1][0] if self.reader.events else ""

    async def finish(self) -> str:
        """The whole answer, over as many connections as it takes."""
        while True:
            reader = self.reader
            assert reader is not None
            async with asyncio.timeout(GIVE_UP_S):
                await reader.task
            self.text += "".join(_text(data) for _, _, data in reader.events)
            if reader.events and reader.events[-1][2] == "[DONE]":
                return self.text
            assert self.resumable, f"a plain stream ended with status {reader.status}"
            self._ask_again(reader)

    def _ask_again(self, last: Reader) -> None:
        """On the other router. Nothing that was said may be missing there."""
        self.asked += 1
        assert last.status in (200, 503), last.body
        path = f"/v1/requests/{self.name}/stream"
        router = self.routers[self.asked % 2]
        self.last = last.events[-1][0] if last.events else self.last
        params = {"starting_after": self.last} if self.last else {}
        self.reader = Reader(router.http, "GET", path, params=params)


def _text(data: str) -> str:
    if data == "[DONE]":
        return ""
    chunk = json.loads(data)
    assert "error" not in chunk, chunk
    return "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])


async def during(
    servers: Servers, trouble: Callable[[list[Stream]], Awaitable[None]]
) -> HeldRouter:
    """Run the streams; `trouble` happens in their middle. Every answer is checked.

    Returns the router that they were sent to."""
    async with two_routers(servers) as (one, two):
        streams = [Stream(f"s{i}", i % 2 == 1, (one, two)) for i in range(STREAMS)]
        for stream in streams:
            stream.begin()
        await eventually(lambda: _all_show(streams, BEFORE))
        await trouble(streams)
        late = [Stream("late", False, (one, two)), Stream("late-again", True, (one, two))]
        await eventually(lambda: _is_back(one))
        for stream in late:
            stream.begin()
        streams += late
        answers = await asyncio.gather(*(stream.finish() for stream in streams))
        wrong = [it.name for it, text in zip(streams, answers, strict=True) if text != ANSWER]
        assert not wrong, "one sequence, without gap, duplicate or contradiction"
        for stream in streams:
            if stream.resumable:
                await eventually(lambda name=stream.name: _is_whole(two, name))
        return one


async def _all_show(streams: list[Stream], count: int) -> bool:
    return all(stream.events >= count for stream in streams)


async def _is_back(router: HeldRouter) -> bool:
    return not router.guard.stats.away


async def _is_whole(router: HeldRouter, name: str) -> bool:
    """The log of a resumable request is complete, and it has one end."""
    id_ = record_id(owner_digest([]), name)
    record = await router.store.read(id_)
    if record is None or record.state is not RequestState.FINISHED:
        return False
    entries = await router.store.read_log(id_)
    return sum(len(entry.token_ids) for entry in entries) == LENGTH


async def logged_before(servers: Servers, streams: list[Stream], shown: list[int]) -> None:
    """Every token that was shown of a resumable request is in the log of the new primary."""
    store = store_over(servers)("reader", TIMING, _Clock())
    for stream, count in zip(streams, shown, strict=True):
        if stream.resumable:
            id_ = record_id(owner_digest([]), stream.name)
            entries = await eventually(lambda id_=id_: _log_of(store, id_))
            assert sum(len(entry.token_ids) for entry in entries) >= count
    await store.stop()


async def _log_of(store: RequestStore, id_: str) -> list[LogEntry]:
    """The log; nothing while the new primary is not known yet."""
    try:
        return await store.read_log(id_)
    except StoreUnavailable:
        return []


class _Clock:
    def monotonic(self) -> float:
        return asyncio.get_running_loop().time()


async def test_a_primary_killed_under_sentinels(sentinels: Servers) -> None:
    primary, replica = sentinels.data

    async def kill(streams: list[Stream]) -> None:
        shown = [stream.tokens for stream in streams]
        primary.kill()
        await asyncio.to_thread(until, lambda: replica.info("role") == "master", "a promotion")
        await logged_before(sentinels, streams, shown)

    one = await during(sentinels, kill)
    assert one.guard.stats.outages >= 1, "the kill was noticed"


async def test_a_primary_killed_and_slots_moved_in_a_cluster(cluster_nodes: Servers) -> None:
    first, second, third = cluster_nodes.data[:3]

    async def kill(streams: list[Stream]) -> None:
        for group in SPREAD[:3]:  # the first primary's
            await asyncio.to_thread(migrate, slot_of(group.tag), first, second, cluster_nodes)
        shown = [stream.tokens for stream in streams]
        third.kill()
        alive = cluster_nodes.data[5]
        await asyncio.to_thread(until, lambda: alive.info("role") == "master", "a promotion")
        await logged_before(cluster_nodes, streams, shown)

    one = await during(cluster_nodes, kill)
    assert one.guard.stats.outages >= 1, "the kill was noticed"
