"""The engines behind another router answer as theirs do; own counters stand beside a library's."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from bench import own_copies
from bench.router_peer_engines import FakeEngine
from router.metrics.router import RouterMetrics

CHAT = "/v1/chat/completions"


@pytest.fixture(params=[True, False], ids=["prefill", "decode"])
async def engine(request: pytest.FixtureRequest) -> AsyncIterator[tuple[httpx.AsyncClient, int]]:
    """A client of one engine, and how many tokens of three it says."""
    prefill = bool(request.param)
    server = await asyncio.get_running_loop().create_server(
        lambda: FakeEngine(prefill, 0.0), "127.0.0.1", 0
    )
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server, httpx.AsyncClient(base_url=url) as client:
        yield client, 1 if prefill else 3


async def test_an_engine_answers_whole(engine: tuple[httpx.AsyncClient, int]) -> None:
    client, tokens = engine
    assert (await client.get("/model_info")).json()["served_model_name"] == "demo"
    answer = (await client.post(CHAT, json={"max_tokens": 3})).json()
    assert answer["choices"][0]["message"]["content"] == " word" * tokens


async def test_an_engine_streams_a_token_an_event(engine: tuple[httpx.AsyncClient, int]) -> None:
    client, tokens = engine
    asked = {"max_completion_tokens": 3, "stream": True}
    events = (await client.post(CHAT, json=asked)).text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    assert [chunk["choices"][0]["delta"]["content"] for chunk in chunks] == [" word"] * tokens


def test_both_kinds_of_metrics_count_the_same() -> None:
    own, library = RouterMetrics(), own_copies.with_library()
    pages: list[dict[str, object]] = []
    for metrics in (own, library):
        own_copies.one_request(metrics, 5)
        families = text_string_to_metric_families(metrics.render().decode())
        pages.append({family.name: family for family in families})
    assert pages[1].keys() <= pages[0].keys()  # the library's have no aliases
    assert all(pages[0][name] == family for name, family in pages[1].items())
