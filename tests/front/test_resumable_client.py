"""Baton's own client over several routers: it reconnects by itself, and nobody can tell."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from baton.client import AsyncClient, Client, GenerateEvent, GenerateOptions
from baton.client.reconnect import Attempts, addresses_of
from baton.protocol.errors import BatonError, Cancelled, InvalidRequest, NodeLost, Unavailable
from baton.protocol.sampling import SamplingParams
from router.store.memory_store import MemoryTables
from tests.front.resumable import PATIENCE_S, HeldRouter, held_router
from tests.waiting import eventually

ANSWER = "abcdefghijk"
PARAMS = SamplingParams(temperature=0.0, max_tokens=40)
RESUMABLE = GenerateOptions(resumable_s=20, timeout_s=PATIENCE_S, request_id="mine")


@pytest.fixture
async def routers() -> AsyncIterator[list[HeldRouter]]:
    tables = MemoryTables()
    async with held_router("one", tables) as one, held_router("two", tables) as two:
        yield [one, two]


def addresses(routers: list[HeldRouter]) -> str:
    return ",".join(router.grpc_address for router in routers)


def check_whole(events: list[GenerateEvent]) -> None:
    assert "".join(event.text for event in events) == ANSWER
    positions = [event.position for event in events for _ in event.token_ids]
    assert positions == list(range(len(ANSWER) + 1)), "a gap or a duplicate"
    assert [event.finish_reason for event in events].count("stop") == 1
    assert {event.request_id for event in events} == {"mine"}
    usage = events[-1].usage
    assert usage is not None
    assert usage.completion_tokens == len(ANSWER) + 1


async def read(client: AsyncClient, into: list[GenerateEvent]) -> None:
    async for event in client.stream("hi", PARAMS, RESUMABLE):
        into.append(event)  # noqa: PERF401  seen from outside as it grows


async def test_a_router_dies_in_mid_stream(routers: list[HeldRouter]) -> None:
    one, two = routers
    one.dispatcher.held_at = 5
    events: list[GenerateEvent] = []
    async with AsyncClient(addresses(routers)) as client:
        reading = asyncio.create_task(read(client, events))
        await eventually(lambda: _has(events, 5))
        await one.die()
        async with asyncio.timeout(PATIENCE_S):
            await reading
    check_whole(events)
    assert two.adopter.adopted == 1
    assert one.dispatcher.epochs == [1]
    assert two.dispatcher.epochs == [2]


async def _has(events: list[GenerateEvent], count: int) -> bool:
    return len(events) >= count


async def test_http_does_not_go_on_with_what_grpc_began(routers: list[HeldRouter]) -> None:
    one, _ = routers
    async with AsyncClient(one.grpc_address) as client:
        await client.generate("hi", PARAMS, RESUMABLE)
    reply = await one.http.get("/v1/requests/mine/stream")
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["param"] == "request_id"
    assert "gRPC" in error["message"]


async def test_the_blocking_client_does_the_same(routers: list[HeldRouter]) -> None:
    one, two = routers
    one.dispatcher.held_at = 5
    events: list[GenerateEvent] = []

    def blocking() -> None:
        with Client(addresses(routers)) as client:
            for event in client.stream("hi", PARAMS, RESUMABLE):
                events.append(event)  # noqa: PERF402  seen from outside as it grows

    reading = asyncio.create_task(asyncio.to_thread(blocking))
    await eventually(lambda: _has(events, 5))
    await one.die()
    async with asyncio.timeout(PATIENCE_S):
        await reading
    check_whole(events)
    assert two.dispatcher.epochs == [2]


async def test_a_router_that_lost_the_store_hands_its_reader_over(
    routers: list[HeldRouter],
) -> None:
    one, two = routers
    one.dispatcher.held_at = 5
    events: list[GenerateEvent] = []
    async with AsyncClient(addresses(routers)) as client:
        reading = asyncio.create_task(read(client, events))
        await eventually(lambda: _has(events, 5))
        await one.lapse()  # it lives, and still has its nodes
        one.dispatcher.go.set()
        async with asyncio.timeout(PATIENCE_S):
            await reading
    check_whole(events)
    assert two.adopter.adopted == 1


async def test_several_samples_go_on_where_each_was(routers: list[HeldRouter]) -> None:
    one, two = routers
    for router in routers:
        router.dispatcher.script.samples = (ANSWER, "other things")
    one.dispatcher.held_at = 4
    params = SamplingParams(temperature=0.5, seed=1, max_tokens=40, n=2)
    async with AsyncClient(addresses(routers)) as client:
        stream = client.stream("hi", params, RESUMABLE)
        events = [await anext(stream) for _ in range(8)]
        await one.die()
        events += [event async for event in stream]
    assert two.dispatcher.epochs == [2]
    for sample, text in enumerate((ANSWER, "other things")):
        own = [event for event in events if event.sample == sample]
        assert "".join(event.text for event in own) == text
        ids = [event.position for event in own for _ in event.token_ids]
        assert ids == list(range(len(ids)))


async def test_nobody_at_the_first_address(routers: list[HeldRouter]) -> None:
    one, two = routers
    await one.die()
    async with AsyncClient(addresses(routers)) as client:
        plain = await client.generate("hi", PARAMS)
        assert plain.text == ANSWER
        assert (await client.models())[0].id == "tiny"
    assert two.dispatcher.epochs == [1]


async def test_the_same_id_with_other_words_is_refused(routers: list[HeldRouter]) -> None:
    async with AsyncClient(addresses(routers)) as client:
        first = await client.generate("hi", PARAMS, RESUMABLE)
        assert await client.generate("hi", PARAMS, RESUMABLE) == first, "told again"
        with pytest.raises(InvalidRequest) as caught:
            await client.generate("ho", PARAMS, RESUMABLE)
        assert (caught.value.code, caught.value.field) == ("idempotency_key_reused", "request_id")
    assert [router.dispatcher.epochs for router in routers] == [[1], []]


async def test_an_abort_is_final(routers: list[HeldRouter]) -> None:
    one = routers[0]
    one.dispatcher.held_at = 3
    async with AsyncClient(addresses(routers)) as client:
        stream = client.stream("hi", PARAMS, RESUMABLE)
        for _ in range(3):
            await anext(stream)
        assert await client.abort("mine")
        last = await anext(stream)
        assert (last.finish_reason, last.text) == ("abort", "")
        with pytest.raises(StopAsyncIteration):
            await anext(stream)


class Now:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def attempts(now: Callable[[], float], addresses: int, grace_s: float) -> Attempts:
    return Attempts(addresses, 0, timeout_s=100.0, grace_s=grace_s, now=now)


def test_attempts_turn_around_all_addresses_before_they_wait() -> None:
    now, gone = Now(), Unavailable("gone")
    tries = attempts(now, 3, 10.0)
    waits = [tries.failed(gone, nobody=True) for _ in range(6)]
    assert waits[:2] == [0.0, 0.0]
    assert waits[2:] == [0.05, 0.1, 0.2, 0.4]
    assert tries.index == 0
    tries.saw(1)
    assert tries.steps == [0, 1]
    assert tries.failed(gone, nobody=False) == 0.0, "it was heard of: no long wait"
    now.now = 10.0
    with pytest.raises(Unavailable):
        tries.failed(gone, nobody=True)


def test_attempts_end_with_what_will_not_pass() -> None:
    for error in (InvalidRequest("no"), NodeLost("failed"), Cancelled("aborted")):
        with pytest.raises(type(error)):
            attempts(Now(), 2, 10.0).failed(error, nobody=False)
    assert attempts(Now(), 2, 10.0).failed(Cancelled("stopped"), nobody=False, said=False) == 0.0


def test_a_plain_call_asks_each_address_once_and_only_if_nobody_answered() -> None:
    gone: BatonError = Unavailable("gone")
    tries = attempts(Now(), 2, 0)
    assert tries.failed(gone, nobody=True) == 0.0
    with pytest.raises(Unavailable):
        tries.failed(gone, nobody=True)
    with pytest.raises(Unavailable):
        attempts(Now(), 2, 0).failed(gone, nobody=False)


def test_addresses() -> None:
    assert addresses_of("a:1, b:2") == ("a:1", "b:2") == addresses_of(["a:1", "b:2"])
    with pytest.raises(ValueError, match="address"):
        addresses_of(" ,")
