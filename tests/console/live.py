"""A live cluster of real processes with the demo model, its console, and clients that keep it busy.

Used by the tests of the console and by tools/pictures.py.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx

from tests.system.processes import Processes, ServerProcess
from tests.waiting import end, eventually

ROOT: Final = Path(__file__).resolve().parents[2]
DEMO_MODEL: Final = ROOT / "demo_model"
MODEL: Final = "baton-demo"
KEY: Final = "operator"
NODE_FLAGS: Final = ("--num-kv-blocks", "400", "--threads", "1")
ROUTER_FLAGS: Final = (
    "--admin-port", "0", "--admin-key", KEY, "--served-model-name", MODEL,
    "--prefill-placement", "remote",
)  # fmt: skip
TIMEOUT_S: Final = 120.0
LONG_TOKENS: Final = 1200
TOKENS_BEFORE: Final = 120


@dataclass(slots=True)
class LiveConsole:
    """`api` and `admin`: http://HOST:PORT of the router's two ports."""

    router: ServerProcess
    prefill: list[ServerProcess]
    decode: list[ServerProcess]
    client: httpx.AsyncClient

    @property
    def api(self) -> str:
        return f"http://{self.router.address}"

    @property
    def admin(self) -> str:
        return f"http://{self.router.ready['admin_address']}"

    async def asked(self, path: str) -> Any:
        """What the admin port answers the operator."""
        headers = {"authorization": f"Bearer {KEY}"}
        reply = await self.client.get(f"{self.admin}{path}", headers=headers)
        reply.raise_for_status()
        return reply.json()

    async def complete(self, prompt: str, max_tokens: int) -> dict[str, Any]:
        """One answer of so many tokens."""
        reply = await self.client.post(f"{self.api}/v1/completions", json=body(prompt, max_tokens))
        reply.raise_for_status()
        return reply.json()

    async def stream(self, prompt: str, max_tokens: int) -> AsyncIterator[dict[str, Any]]:
        """The chunks of one streamed answer."""
        asked = body(prompt, max_tokens) | {"stream": True}
        async with self.client.stream("POST", f"{self.api}/v1/completions", json=asked) as reply:
            async for line in reply.aiter_lines():
                if line.startswith("data: {"):
                    yield json.loads(line.removeprefix("data: "))

    def node(self, name: str) -> ServerProcess:
        return next(each for each in (*self.prefill, *self.decode) if each.name == name)

    @asynccontextmanager
    async def busy(self, num_clients: int) -> AsyncIterator[None]:
        """Clients that ask one request after the other, until the block ends."""
        tasks = [asyncio.create_task(self._ask(number)) for number in range(num_clients)]
        try:
            yield
        finally:
            await end(*tasks)

    async def _ask(self, number: int) -> None:
        turn = 0
        while True:
            turn += 1
            prompt = f"Request {number} {turn}: " + "prefill and decode " * (10 + 9 * (turn % 5))
            await self.complete(prompt, 50 + 20 * (number % 3))


async def kill_in_mid_stream(live: LiveConsole, max_tokens: int = LONG_TOKENS) -> tuple[str, str]:
    """Stream an answer, kill the node that decodes it, read to the end: (id, the node)."""
    name, killed, num_tokens = "", "", 0
    async for chunk in live.stream("Disaggregated serving", max_tokens):
        name, num_tokens = chunk["id"], num_tokens + 1
        if num_tokens == TOKENS_BEFORE:
            (request,) = (await live.asked("/debug"))["requests"]
            killed = request["decode_node"]
            await live.node(killed).kill()
    assert killed
    return name, killed


def body(prompt: str, max_tokens: int) -> dict[str, Any]:
    return {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "temperature": 0,
    }


@asynccontextmanager
async def live_console(
    directory: Path, num_nodes: int = 2, flags: Sequence[str] = ()
) -> AsyncIterator[LiveConsole]:
    """So many prefill and as many decode nodes, and a router with an admin port. `flags`: more of
    the router's."""
    async with (
        Processes(DEMO_MODEL, directory) as processes,
        httpx.AsyncClient(trust_env=False, timeout=TIMEOUT_S) as client,
    ):
        prefill, decode = await processes.nodes(num_nodes, num_nodes, NODE_FLAGS)
        router = await processes.router(prefill, decode, (*ROUTER_FLAGS, *flags))
        live = LiveConsole(router, prefill, decode, client)

        async def serves() -> bool:
            nodes = (await live.asked("/console/data/snapshot"))["nodes"]
            return [each["state"] for each in nodes].count("serving") == 2 * num_nodes

        await eventually(serves)
        yield live
