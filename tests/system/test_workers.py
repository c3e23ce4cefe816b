"""`--workers 2`: two routers on one port over one Redis, with real processes and a real engine."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from functools import partial
from pathlib import Path

import httpx
import pytest

from baton.client import AsyncClient, GenerateOptions
from baton.protocol.sampling import SamplingParams
from tests.system.processes import Processes
from tests.tiny_models import make_tiny_model
from tests.waiting import eventually

pytestmark = [pytest.mark.redis, pytest.mark.slow, pytest.mark.long]
NODE_FLAGS = ("--num-kv-blocks", "64", "--block-size", "16", "--dtype", "float32")
PATIENCE_S = 30.0
NUM_REQUESTS = 24
BODY = {"prompt": "hello", "max_tokens": 6, "temperature": 0, "ignore_eos": True}


async def ask(address: str) -> str:
    """One completion over a connection of its own: the kernel picks the worker."""
    async with httpx.AsyncClient(base_url=f"http://{address}", timeout=PATIENCE_S) as client:
        answer = await client.post("/v1/completions", json=BODY)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["text"])


async def ended_by(admin: str, address: str, name: str) -> str | None:
    """The finish reason of a long stream that `admin` is told to end after its first token."""
    body = {**BODY, "max_tokens": 400, "stream": True}
    headers = {"x-request-id": name}
    async with (
        httpx.AsyncClient(timeout=PATIENCE_S) as client,
        client.stream(
            "POST", f"http://{address}/v1/completions", json=body, headers=headers
        ) as stream,
    ):
        reason: str | None = None
        told = False
        async for line in stream.aiter_lines():
            if not line.startswith("data: {"):
                continue
            if not told:
                told = True
                ids = {"request_ids": [name]}
                url, key = f"http://{admin}/abort_requests", {"x-api-key": "o"}
                reply = await client.post(url, json=ids, headers=key)
                assert len(reply.json()["aborted"]) == 1, reply.text
            reason = json.loads(line[6:])["choices"][0]["finish_reason"] or reason
        return reason


async def answered(address: str) -> int:
    """Requests that one worker has ended well, by its own metrics."""
    async with httpx.AsyncClient(base_url=f"http://{address}") as client:
        text = (await client.get("/metrics")).text
    found = re.findall(r"^baton_request_success_total\{.*\} ([\d.]+)$", text, re.MULTILINE)
    return int(sum(map(float, found)))


def children_of(pid: int) -> set[str]:
    return set(Path(f"/proc/{pid}/task/{pid}/children").read_text().split())


async def is_ready(address: str) -> bool:
    try:
        async with httpx.AsyncClient(base_url=f"http://{address}") as client:
            return (await client.get("/ready")).status_code == 200
    except httpx.TransportError:
        return False


async def serves(health_port: int) -> bool:
    """What the supervisor says of them all."""
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{health_port}") as client:
        for path in ("/startupz", "/livez"):
            assert (await client.get(path)).status_code == 200
        return (await client.get("/readyz")).status_code == 200


async def is_up(address: str) -> bool:
    return not await is_gone(address)


async def is_gone(address: str) -> bool:
    try:
        await answered(address)
    except httpx.TransportError:
        return True
    return False


async def test_two_workers_on_one_port(tmp_path: Path, redis_url: str) -> None:
    model = make_tiny_model("llama", tmp_path / "model")
    async with Processes(model, tmp_path, redis_url) as cluster:
        prefill, decode = await cluster.nodes(1, 1, NODE_FLAGS)
        flags = ["--workers", "2", "--own-port", "0", "--admin-port", "0"]
        flags += ["--admin-key", "o", "--health-port", "0"]
        router = await cluster.router(prefill, decode, flags)
        assert len(set(router.ready["workers"])) == 2
        assert len(set(router.ready["admin_addresses"])) == 2
        for address in router.ready["workers"]:  # its sessions stand
            assert await eventually(partial(is_ready, address))

        assert await eventually(partial(serves, router.ready["health_port"]))

        texts = await asyncio.gather(*(ask(router.address) for _ in range(NUM_REQUESTS)))
        assert len(set(texts)) == 1
        counts = [await answered(address) for address in router.ready["workers"]]
        assert sum(counts) == NUM_REQUESTS
        assert all(counts), f"one worker had all of them: {counts}"

        async with AsyncClient(router.ready["grpc_address"]) as client:
            params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
            options = GenerateOptions(timeout_s=PATIENCE_S)
            assert (await client.generate("hello", params, options)).text == texts[0]
        async with AsyncClient(router.ready["grpc_address"], "o") as client:
            info = await client.server_info()  # counts over all workers: Redis'
            assert info.requests_by_state["finished"] >= NUM_REQUESTS + 1

        # Whichever worker has a request, each worker's admin server ends it.
        for index in range(6):
            admin = router.ready["admin_addresses"][index % 2]
            assert await ended_by(admin, router.address, f"long{index}") == "abort"

        # Both drain and end; so does the supervisor, with a good status.
        assert await asyncio.wait_for(router.stop(), PATIENCE_S) == 0
        for address in router.ready["workers"]:
            assert await is_gone(address)


async def test_a_worker_that_dies_is_replaced(tmp_path: Path, redis_url: str) -> None:
    model = make_tiny_model("llama", tmp_path / "model")
    async with Processes(model, tmp_path, redis_url) as cluster:
        router = await cluster.router([], [], ["--workers", "2", "--own-port", "0"])
        before = children_of(router.process.pid)
        assert len(before) == 2
        os.kill(int(min(before)), signal.SIGKILL)

        async def replaced() -> bool:
            now = children_of(router.process.pid)
            return len(now) == 2 and now != before

        assert await eventually(replaced)
        assert await eventually(partial(is_up, router.address))
        assert await asyncio.wait_for(router.stop(), PATIENCE_S) == 0


async def test_workers_end_with_a_supervisor_that_is_killed(tmp_path: Path, redis_url: str) -> None:
    model = make_tiny_model("llama", tmp_path / "model")
    async with Processes(model, tmp_path, redis_url) as cluster:
        router = await cluster.router([], [], ["--workers", "2", "--own-port", "0"])
        router.signal(signal.SIGKILL)
        for address in router.ready["workers"]:
            assert await eventually(partial(is_gone, address))
