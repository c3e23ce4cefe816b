"""The recipe of docs/resumable.md: the openai SDK over two routers, one of which dies."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
from openai import OpenAI
from openai.types.chat import ChatCompletionChunk

from examples.resuming_transport import Resuming
from router.store.memory_store import MemoryTables
from tests.front.resumable import PATIENCE_S, held_router
from tests.waiting import eventually

ANSWER = "abcdefghijk"


async def test_the_sdks_stream_survives_its_router() -> None:
    tables = MemoryTables()
    chunks: list[ChatCompletionChunk] = []

    def program(urls: list[str]) -> None:
        http = httpx.Client(transport=Resuming(urls), trust_env=False)
        given: Any = http  # the SDK may type it as its own copy of httpx
        with OpenAI(base_url=f"{urls[0]}/v1", api_key="none", http_client=given) as client:
            stream = client.chat.completions.create(
                model="tiny",
                messages=[{"role": "user", "content": "hi"}],
                stream=True,
                stream_options={"include_usage": True},
            )
            for chunk in stream:
                chunks.append(chunk)  # noqa: PERF402  seen from outside as it grows

    async def has_some() -> bool:
        return len(chunks) >= 5

    async with held_router("one", tables) as one, held_router("two", tables) as two:
        one.dispatcher.held_at = 5
        urls = [str(router.http.base_url) for router in (one, two)]
        running = asyncio.create_task(asyncio.to_thread(program, urls))
        await eventually(has_some)
        await one.die()  # its lease ends, its connections break
        [run] = one.runs._runs.values()  # pyright: ignore[reportPrivateUsage]
        run.told.cut()
        async with asyncio.timeout(PATIENCE_S):
            await running
        assert two.dispatcher.epochs == [2]
    texts = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
    assert "".join(texts) == ANSWER
    assert len({chunk.id for chunk in chunks}) == len({chunk.created for chunk in chunks}) == 1
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len(ANSWER) + 1
