"""kill -9 of a router in mid-stream, with real processes and a real Redis: another one goes on.

fp32: what the client reads, over both routers, must be the undisturbed stream event for event.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis.asyncio as aredis

from baton.protocol import wire
from baton.runtime.redis.keys import NODE_PATTERN, ONLY
from tests.front.resumable import Reader
from tests.system.processes import Processes, ServerProcess, fields_of, is_idle
from tests.system.references import prompts
from tests.tiny_models import make_wide_model
from tests.waiting import WAIT_S, eventually

pytestmark = [pytest.mark.redis, pytest.mark.slow]

PROMPT = prompts([200], seed=5)[0]
FLAGS = ("--num-kv-blocks", "96", "--max-num-seqs", "8")
BODY: dict[str, Any] = {
    "prompt": list(PROMPT),
    "stream": True,
    "temperature": 0.9,
    "seed": 3,
    "n": 2,
    "max_tokens": 150,
    "ignore_eos": True,
    "logprobs": 1,
    "return_token_ids": True,
    "stream_options": {"include_usage": True},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_wide_model(tmp_path_factory.mktemp("model"))


@dataclass
class Deployment:
    routers: list[ServerProcess]
    http: httpx.AsyncClient
    redis: aredis.Redis

    def ask(self, router: int, name: str) -> Reader:
        url = f"http://{self.routers[router].address}/v1/completions"
        headers = {"x-baton-resumable": "60", "x-request-id": name}
        return Reader(self.http, "POST", url, json=BODY, headers=headers)

    def again(self, router: int, name: str, after: str) -> Reader:
        url = f"http://{self.routers[router].address}/v1/requests/{name}/stream"
        return Reader(self.http, "GET", url, headers={"last-event-id": after})

    async def record(self, name: str) -> dict[str, str]:
        return await fields_of(self.redis, f"{{pd}}:req:req-{name}-*")

    async def idle(self) -> bool:
        """No node holds anything, and no lease is left."""
        keys = [key async for key in self.redis.scan_iter(NODE_PATTERN)]
        values = await self.redis.mget(keys)
        records = [wire.record_from_bytes(value) for value in values if isinstance(value, bytes)]
        return await self.redis.zcard(ONLY.leases) == 0 and all(map(is_idle, records))

    async def can_serve(self) -> bool:
        urls = [f"http://{router.address}/ready" for router in self.routers]
        return all([(await self.http.get(url)).status_code == 200 for url in urls])


@asynccontextmanager
async def deployment(model: Path, directory: Path, redis_url: str) -> AsyncIterator[Deployment]:
    client = aredis.Redis.from_url(redis_url)
    await client.flushall()
    try:
        async with (
            Processes(model, directory, redis_url) as processes,
            httpx.AsyncClient(trust_env=False, timeout=WAIT_S) as http,
        ):
            prefill, decode = await processes.nodes(1, 1, FLAGS)
            # Side by side: each has its own sessions with both nodes.
            starts = [processes.router(prefill, decode) for _ in range(2)]
            running = Deployment(list(await asyncio.gather(*starts)), http, client)
            await eventually(running.can_serve)
            yield running
    finally:
        await client.aclose()


def _normal(data: str, name: str) -> Any:
    """What two requests for the same have in common: all but their names and times.

    Log-probabilities are told apart: a prefill of known tokens rounds otherwise than their decoding
    did.
    """
    if data == "[DONE]":
        return data
    chunk = json.loads(data)
    assert chunk.pop("id") == f"cmpl-{name}"
    assert chunk.pop("created") > 0
    if chunk["usage"] is not None:
        chunk["usage"].pop("prompt_tokens_details")  # the second one found its prompt cached
    for choice in chunk["choices"]:
        choice.pop("logprobs")
    return chunk


def _logprobs(events: list[tuple[str, str, str]], index: int) -> list[float]:
    """Those of one choice's tokens."""
    chunks = [json.loads(data) for _, _, data in events if data != "[DONE]"]
    told = [c["logprobs"] for chunk in chunks for c in chunk["choices"] if c["index"] == index]
    return [value for each in told if each is not None for value in each["token_logprobs"]]


def _by_choice(events: list[tuple[str, str, str]], name: str) -> dict[int, list[Any]]:
    """Each choice's chunks in order; -1: the tail. Choices take turns as nodes compute them."""
    found: dict[int, list[Any]] = {}
    for _, _, data in events:
        chunk = _normal(data, name)
        choices = [] if data == "[DONE]" else chunk["choices"]
        found.setdefault(choices[0]["index"] if choices else -1, []).append(chunk)
    return found


@pytest.mark.long
async def test_a_router_killed_in_mid_stream(model: Path, tmp_path: Path, redis_url: str) -> None:
    async with deployment(model, tmp_path, redis_url) as d:
        plain = await d.ask(1, "undisturbed").done()
        first = d.ask(0, "killed")
        await first.at_least(40)
        assert (await d.record("killed"))["epoch"] == "1"
        await d.routers[0].kill()
        await first.done()
        assert first.cut
        assert len(first.events) < len(plain), "the kill came too late to prove anything"

        whole, cut = first.events, True
        while cut:  # also by a router whose store did not answer in time: the client asks again
            more = d.again(1, "killed", whole[-1][0])
            whole, cut = whole + await more.done(), more.cut
            assert more.status == 200

        assert len({id_ for id_, _, _ in whole}) == len(whole), "no event came twice"
        assert _by_choice(whole, "killed") == _by_choice(plain, "undisturbed")
        for choice in range(BODY["n"]):
            found, wanted = _logprobs(whole, choice), _logprobs(plain, choice)
            assert found == pytest.approx(wanted, abs=1e-3)
            assert len(found) == BODY["max_tokens"]
        assert whole[-1][2] == "[DONE]"
        usage = json.loads(whole[-2][2])["usage"]
        assert usage["completion_tokens"] == BODY["n"] * BODY["max_tokens"]
        record = await d.record("killed")
        assert (record["state"], record["epoch"], record["tries"]) == ("finished", "2", "1")
        assert int(record["n0"]) + int(record["n1"]) == usage["completion_tokens"]
        replay = d.again(1, "killed", "")
        assert await replay.done() == whole, "once more, from the log alone"
        await eventually(d.idle)


@pytest.mark.long
async def test_two_readers_of_a_request_whose_router_leaves_in_order(
    model: Path, tmp_path: Path, redis_url: str
) -> None:
    """SIGTERM: the router gives its request up, the other one has it at once."""
    async with deployment(model, tmp_path, redis_url) as d:
        first = d.ask(0, "moved")
        await first.at_least(20)
        other = d.again(1, "moved", "")  # follows it while the first router runs it
        await other.at_least(20)
        d.routers[0].process.terminate()
        d.routers[0].process.terminate()
        await first.done()
        seen = await other.done()
        assert seen[-1][2] == "[DONE]"
        assert first.events == seen[: len(first.events)]
        assert (await d.record("moved"))["state"] == "finished"
        await eventually(d.idle)
