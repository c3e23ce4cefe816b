"""Nobody is refused while the nodes are only away for a moment: real processes, a real Redis.

The router stands still for longer than any lease or ping (SIGSTOP, as a paused virtual machine
does), or all decode nodes are replaced at the same time, with other names and ports.
"""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from baton.runtime.failpoints import VARIABLE
from tests.system.processes import Processes
from tests.system.references import Tokens, prompts
from tests.tiny_models import make_wide_model

pytestmark = [pytest.mark.redis, pytest.mark.slow, pytest.mark.long]

PAUSE_S = 20.0
START_S = 8.0  # of a node that takes the place of another
PROMPTS = prompts([120] * 6, seed=11)
NUM_TOKENS = 300
SHORT = 4  # tokens of those that come when the router wakes
NUM_AFTER = 40
FLAGS = ("--num-kv-blocks", "256", "--max-num-seqs", "32", "--drain-s", "0")


class Reader:
    """One client with its stream; `began` with its first token. It has all the time."""

    def __init__(self, address: str, prompt: Tokens, num_tokens: int = NUM_TOKENS) -> None:
        self.text = ""
        self.began = asyncio.Event()
        self.task = asyncio.create_task(self._read(f"http://{address}", prompt, num_tokens))

    async def _read(self, url: str, prompt: Tokens, num_tokens: int) -> str:
        body: dict[str, Any] = {
            "prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True,
            "stream": True,
        }  # fmt: skip
        async with (
            httpx.AsyncClient(base_url=url, timeout=None, trust_env=False) as http,
            http.stream("POST", "/v1/completions", json=body) as reply,
        ):
            assert reply.status_code == httpx.codes.OK, await reply.aread()
            async for line in reply.aiter_lines():
                if line.startswith("data: {"):
                    self.text += json.loads(line[6:])["choices"][0]["text"]
                    self.began.set()
        return self.text


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_wide_model(tmp_path_factory.mktemp("model"))


async def texts(readers: list[Reader]) -> list[str]:
    async with asyncio.timeout(200):
        return await asyncio.gather(*(reader.task for reader in readers))


async def begun(address: str) -> list[Reader]:
    readers = [Reader(address, prompt) for prompt in PROMPTS]
    async with asyncio.timeout(120):
        await asyncio.gather(*(reader.began.wait() for reader in readers))
    return readers


async def test_a_router_that_was_paused_serves_all_that_it_accepted(
    model: Path, tmp_path: Path, redis_url: str
) -> None:
    async with Processes(model, tmp_path, redis_url) as processes:
        router = await processes.router(*await processes.nodes(1, 2, FLAGS))
        expected = await texts([Reader(router.address, prompt) for prompt in PROMPTS])
        assert all(expected)
        readers = await begun(router.address)
        router.signal(signal.SIGSTOP)
        readers += [Reader(router.address, prompt) for prompt in PROMPTS * 2]  # the kernel's queue
        await asyncio.sleep(PAUSE_S)  # the fault itself
        router.signal(signal.SIGCONT)
        for _ in range(NUM_AFTER):  # while it finds its sessions dead, and dials again
            readers.append(Reader(router.address, PROMPTS[0], num_tokens=SHORT))
            await asyncio.sleep(0.01)
        told = await texts(readers)
        assert told[: 3 * len(PROMPTS)] == expected * 3
        assert all(expected[0].startswith(text) for text in told[3 * len(PROMPTS) :])


async def test_all_decode_nodes_may_be_replaced_at_once(
    model: Path, tmp_path: Path, redis_url: str
) -> None:
    """As `docker compose up --force-recreate decode` does with both replicas."""
    delay = {VARIABLE: f"loading:1:delay={START_S * 1000:.0f}"}
    async with Processes(model, tmp_path, redis_url) as processes:
        prefill, decode = await processes.nodes(1, 2, FLAGS)
        router = await processes.router(prefill, decode)
        expected = await texts([Reader(router.address, prompt) for prompt in PROMPTS])
        readers = await begun(router.address)
        for node in decode:
            node.signal(signal.SIGTERM)
        await asyncio.gather(*(node.process.wait() for node in decode))
        successors = [
            asyncio.create_task(processes.start("decode_node", name, FLAGS, delay))
            for name in ("e0", "e1")
        ]
        readers += [Reader(router.address, prompt) for prompt in PROMPTS]
        assert await texts(readers) == expected * 2
        await asyncio.gather(*successors)
