"""The recipe of docs/resumable.md: the openai SDK over two routers, one of which goes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from openai import APIConnectionError, OpenAI
from openai.types.chat import ChatCompletionChunk

from examples import resuming_transport
from examples.resuming_transport import Resuming
from router.store.memory_store import MemoryTables
from tests.front.resumable import PATIENCE_S, HeldRouter, held_router
from tests.waiting import eventually

ANSWER = "abcdefghijk"


class Program:
    """What a user would write, in a thread of its own, over these routers."""

    def __init__(self, routers: Sequence[HeldRouter], silence_s: float = 10.0) -> None:
        self._urls = [str(router.http.base_url) for router in routers]
        self._silence_s = silence_s
        self.chunks: list[ChatCompletionChunk] = []
        self.task = asyncio.create_task(asyncio.to_thread(self._run))

    def _run(self) -> None:
        transport = Resuming(self._urls, silence_s=self._silence_s)
        # The SDK may type it as its own copy of httpx.
        given: Any = httpx.Client(transport=transport, trust_env=False)
        with OpenAI(base_url=f"{self._urls[0]}/v1", api_key="none", http_client=given) as client:
            stream = client.chat.completions.create(
                model="tiny",
                messages=[{"role": "user", "content": "hi"}],
                stream=True,
                stream_options={"include_usage": True},
            )
            for chunk in stream:
                self.chunks.append(chunk)

    async def at_least(self, count: int) -> None:
        async def has_some() -> bool:
            return len(self.chunks) >= count

        await eventually(has_some)

    async def done(self) -> None:
        async with asyncio.timeout(PATIENCE_S):
            await self.task

    @property
    def text(self) -> str:
        choices = [choice for chunk in self.chunks for choice in chunk.choices]
        return "".join(choice.delta.content or "" for choice in choices)


def break_connections(router: HeldRouter) -> None:
    [run] = router.runs._runs.values()  # pyright: ignore[reportPrivateUsage]
    run.told.cut()


@asynccontextmanager
async def in_mid_stream(
    silence_s: float = 10.0,
) -> AsyncIterator[tuple[HeldRouter, HeldRouter, Program]]:
    """Two routers over one store; the first has told five tokens, and holds the others."""
    tables = MemoryTables()
    async with held_router("one", tables) as one, held_router("two", tables) as two:
        one.dispatcher.held_at = 5
        program = Program([one, two], silence_s)
        await program.at_least(5)
        yield one, two, program


async def test_the_sdks_stream_survives_its_router() -> None:
    async with in_mid_stream() as (one, two, program):
        await one.die()  # its lease ends, its connections break
        break_connections(one)
        await program.done()
        assert two.dispatcher.epochs == [2]
    assert program.text == ANSWER
    chunks = program.chunks
    assert len({chunk.id for chunk in chunks}) == len({chunk.created for chunk in chunks}) == 1
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len(ANSWER) + 1


async def test_a_stopped_router_is_left() -> None:
    """Its lease ends, and its connections stay open without a word."""
    async with in_mid_stream(silence_s=0.2) as (one, two, program):
        await one.die()
        await program.done()
        assert two.dispatcher.epochs == [2]
    assert program.text == ANSWER


async def test_a_router_that_is_stopped_before_its_first_word_is_left() -> None:
    """Not even a status came, and the SDK would wait for ten minutes."""
    tables = MemoryTables()
    async with held_router("one", tables) as one, held_router("two", tables) as two:
        one.dispatcher.held_at = 0
        program = Program([one, two], silence_s=0.2)
        await one.dispatcher.holding.wait()
        await one.die()
        await program.done()
        assert two.dispatcher.epochs == [2]
    assert program.text == ANSWER


async def test_a_request_without_news_is_waited_for() -> None:
    """Both routers are well: the stream goes from one to the other, and nothing else happens."""
    async with in_mid_stream(silence_s=0.05) as (one, two, program):

        async def has_been_asked() -> bool:
            readings = [sum(each.runs.stats.readings.values()) for each in (one, two)]
            return sum(readings) > 4 and all(readings)

        await eventually(has_been_asked)
        one.dispatcher.go.set()
        await program.done()
        assert one.dispatcher.epochs == [1]
        assert two.dispatcher.epochs == []
    assert program.text == ANSWER


async def test_a_stream_that_nobody_knows_any_more_raises() -> None:
    """The other router has another store: its 404 is no end of the stream."""
    async with (
        held_router("one", MemoryTables()) as one,
        held_router("two", MemoryTables()) as two,
    ):
        one.dispatcher.held_at = 5
        program = Program([one, two])
        await program.at_least(5)
        await one.die()
        break_connections(one)
        with pytest.raises(APIConnectionError) as raised:
            await program.done()
    cause = raised.value.__cause__
    assert isinstance(cause, httpx.RemoteProtocolError)
    assert "404" in str(cause)
    assert "no such request" in str(cause)


class Scripted:
    """Routers that answer by a script, and the time in which they are asked.

    `answer`: None if they take requests and are silent. `asked`: host, when.
    """

    def __init__(self, answer: Callable[[str], httpx.Response] | None) -> None:
        self.now = 0.0
        self.asked: list[tuple[str, float]] = []
        self._answer = answer

    def handle(self, request: httpx.Request) -> httpx.Response:
        self.asked.append((request.url.host, self.now))
        if self._answer is None:
            self.now += request.extensions["timeout"]["read"]
            raise httpx.ReadTimeout("scripted")
        return self._answer(request.url.host)

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def get(self, monkeypatch: pytest.MonkeyPatch, *hosts: str) -> httpx.Response:
        monkeypatch.setattr(resuming_transport, "time", self)
        transport = Resuming([f"http://{host}" for host in hosts])
        monkeypatch.setattr(transport, "_http", httpx.MockTransport(self.handle))
        timeouts = httpx.Timeout(5.0).as_dict()
        request = httpx.Request("GET", "http://a/v1/models", extensions={"timeout": timeouts})
        return transport.handle_request(request)


def test_a_router_that_says_when_is_asked_then(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(host: str) -> httpx.Response:
        return httpx.Response(503, headers={"retry-after": "7"} if host == "b" else {})

    scripted = Scripted(answer)
    assert scripted.get(monkeypatch, "a", "b").status_code == 503
    of_a, of_b = ([now for host, now in scripted.asked if host == name] for name in "ab")
    assert of_b == pytest.approx([0, 7, 14, 21, 28, 35, 42, 49, 56])
    assert of_a[:7] == pytest.approx([0, 0.2, 0.6, 1.4, 3.0, 6.2, 11.2])
    assert of_a[-1] == pytest.approx(56.2)


def test_a_503_for_longer_than_the_grace_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    scripted = Scripted(lambda _: httpx.Response(503, headers={"retry-after": "90"}))
    assert scripted.get(monkeypatch, "a").headers["retry-after"] == "90"
    assert scripted.asked == [("a", 0)]


def test_silence_is_borne_for_the_grace_at_least(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is waited for as long as the caller says, and longer in each round."""
    scripted = Scripted(None)
    with pytest.raises(httpx.ReadTimeout):
        scripted.get(monkeypatch, "a", "b")
    assert scripted.asked == [("a", 0), ("b", 5), ("a", 10), ("b", 20), ("a", 30), ("b", 50)]
    assert scripted.now == 60
