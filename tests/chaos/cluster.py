"""The patient: Redis, two routers, two prefill and two decode nodes, as real processes.

Its life: started once, used by many cases; between cases `heal` wakes what is stopped, starts what
is dead, and waits until everything is idle. Each process reads its failpoints from a file and
writes the proof of each fault to another (baton/runtime/failpoints.py), so that a case arms what it
needs in a process that runs already.

Router r0 is the clients'; r1 sweeps what a dead r0 leaves behind, and goes on with what is
resumable of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import redis.asyncio as aredis
from redis.asyncio.retry import Retry
from redis.backoff import ConstantBackoff

from baton.client import AsyncClient
from baton.node.metrics_server import metrics_token
from baton.protocol import wire
from baton.protocol.errors import BatonError
from baton.protocol.handles import NodeRecord
from baton.runtime.failpoints import LOG_VARIABLE, VARIABLE
from baton.runtime.redis.keys import ONLY, node_key
from baton.runtime.socket_folder import SocketFolder
from deploy.redis_server import RedisServer
from tests.chaos.counts import Vitals, descriptors_of, is_stopped, runs, tasks_in, threads_of
from tests.chaos.hosts import Hosts
from tests.chaos.proxy import Fault, FaultProxy, Proof
from tests.chaos.streams import DEADLINE_S, Spec, Stream
from tests.system.processes import Processes, ServerProcess
from tests.waiting import end, eventually

HEAL_S = 240.0  # six processes import torch, on a busy machine
SECRET = "of-the-deployment-under-test-0123456789"  # nodes that are not on loopback want one
FIRE_S = 30.0
NAMED_PORTS = range(10_000, 32_000)
NEAR, FAR = "127.0.0.1", "127.0.0.2"  # where nodes listen, and where they are said to
PORT_FLAGS = {"session": "--port", "grpc": "--kv-port", "stream": "--kv-stream-port"}
MODULES = {"p": "prefill_node", "d": "decode_node", "r": "router"}
ROLES = {"prefill": "p", "decode": "d", "router": "r"}
NODES = ("p0", "p1", "d0", "d1")
ROUTERS = ("r0", "r1")
NODE_FLAGS = (
    "--num-kv-blocks", "96", "--max-num-batched-tokens", "32", "--max-num-seqs", "16",
    "--metrics-port", "0", "--drain-s", "0",
)  # fmt: skip
# The store may take its time: on a crowded machine a pause of Redis is not the fault under test.
ROUTER_FLAGS = (
    "--port", "0", "--grpc-port", "0", "--drain-s", "0", "--shutdown-s", "1",
    "--store-timeout-s", "3",
)  # fmt: skip


@dataclass(frozen=True)
class Layout:
    """What a cluster is made of; cases with the same layout share one.

    `proxied`: everything that reaches a node, and Redis, goes through a FaultProxy. Nodes announce
    themselves as 127.0.0.2, where proxies listen on the same ports. `hosts`: each node has a host
    of its own (hosts.py).
    """

    node_flags: tuple[str, ...] = ()
    router_flags: tuple[str, ...] = ()
    lanes: str = "stream,grpc"
    nodes: tuple[str, ...] = NODES
    routers: tuple[str, ...] = ROUTERS
    proxied: bool = False
    hosts: bool = False


PLAIN = Layout()


def free_ports(count: int) -> list[int]:
    """Ports that nobody uses now, on either address; below those that Linux gives to whoever asks
    for any port, so that no other process gets one of them meanwhile."""
    ports: list[int] = []
    for port in random.sample(NAMED_PORTS, len(NAMED_PORTS)):
        if len(ports) == count:
            break
        with contextlib.suppress(OSError), socket.create_server(("0.0.0.0", port)):
            ports.append(port)
    return ports


@dataclass
class Cluster:
    """`directory`: logs and failpoint files. Use as an async context manager."""

    model: Path
    directory: Path
    redis: RedisServer
    layout: Layout = PLAIN
    servers: dict[str, ServerProcess] = field(default_factory=dict[str, ServerProcess])
    redis_up: bool = True
    count: int = 0
    proxies: dict[tuple[str, str], FaultProxy] = field(
        default_factory=dict[tuple[str, str], FaultProxy]
    )
    # What each process held after its first case: by then everything is made that it keeps.
    held: dict[int, Vitals] = field(default_factory=dict[int, Vitals])
    hosts: Hosts | None = None
    # What goes on beside a case until everything is healed.
    beside: set[asyncio.Task[None]] = field(default_factory=set[asyncio.Task[None]])
    _redis_pid: int = 0  # of a Redis that is stopped
    _sockets: SocketFolder = field(default_factory=lambda: SocketFolder("baton-chaos-sockets-"))

    async def __aenter__(self) -> Cluster:
        self.directory.mkdir(parents=True, exist_ok=True)
        url = self.redis.url
        if self.layout.proxied:
            await self._start_proxies()
            url = f"unix://{self._redis_proxy}"
        if self.layout.hosts:
            self.hosts = Hosts(self.layout.nodes)
            self.hosts.up()
        self._processes = Processes(self.model, self.directory, url)
        # Asked again where Redis was killed since: its connections are dead.
        self.store = aredis.Redis.from_url(self.redis.url, retry=Retry(ConstantBackoff(0.1), 30))
        await self.store.flushall()
        self.clients: dict[str, AsyncClient] = {}  # of each router
        self._http = httpx.AsyncClient(trust_env=False, timeout=10.0)
        try:
            await self.heal()
        except BaseException:
            await self.__aexit__(*sys.exc_info())
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await end(*self.beside)
        self.wake_redis()
        self.wake_all()
        for client in self.clients.values():
            await client.close()
        await self._http.aclose()
        await self.store.aclose()
        await self._processes.__aexit__(kind, error, trace)
        for proxy in self.proxies.values():
            await proxy.__aexit__(kind, error, trace)
        if self.hosts is not None:
            self.hosts.down()
        self._sockets.remove()

    # ---- proxies ----

    @property
    def _redis_proxy(self) -> Path:
        return self._sockets.path / "redis.sock"

    async def _start_proxies(self) -> None:
        """One for each port of each node, named (node, kind), and ("redis", "store")."""
        target = Path(self.redis.url.removeprefix("unix://"))
        self.proxies["redis", "store"] = FaultProxy(self._redis_proxy, target)
        for name in self.layout.nodes:
            for kind, port in zip(PORT_FLAGS, free_ports(len(PORT_FLAGS)), strict=True):
                self.proxies[name, kind] = FaultProxy((FAR, port), (NEAR, port))
        for proxy in self.proxies.values():
            await proxy.__aenter__()

    def _proxied_flags(self, name: str) -> tuple[str, ...]:
        flags = ["--advertise-host", FAR, "--kv-unix-dir", str(self._sockets.path)]
        for kind, flag in PORT_FLAGS.items():
            place = self.proxies[name, kind].here
            assert isinstance(place, tuple), "nodes are reached by TCP"
            flags += [flag, str(place[1])]
        return tuple(flags)

    # ---- processes ----

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.layout.nodes, *self.layout.routers)

    def nodes_of(self, letter: str) -> tuple[str, ...]:
        """Of a role, by its letter (ROLES)."""
        return tuple(name for name in self.layout.nodes if name[0] == letter)

    def alive(self, name: str) -> bool:
        server = self.servers.get(name)
        return server is not None and server.process.returncode is None

    def pid(self, name: str) -> int:
        return self.servers[name].process.pid

    async def vitals(self, name: str) -> Vitals:
        """What a process that lives holds now."""
        pid = self.pid(name)
        descriptors, threads = descriptors_of(pid), threads_of(pid)
        return Vitals(pid, descriptors, threads, tasks_in(await self.scrape(name)))

    async def kill(self, name: str) -> str:
        """kill -9 of a process or of "redis"; returns the proof."""
        if name == "redis":
            pid = await self.redis_pid()
            self.redis.kill()
            self.redis_up = False
            assert not runs(pid), "Redis outlived kill -9"
            return f"redis pid {pid} gone"
        server = self.servers[name]
        await server.kill()
        return f"{name} pid {server.process.pid} status -9"

    async def redis_pid(self) -> int:
        return int((await self.store.info("server"))["process_id"])

    async def end_redis(self) -> None:
        """SIGTERM: it writes down what it has, and goes."""
        pid = await self.redis_pid()
        self.redis_up = False
        os.kill(pid, signal.SIGTERM)

        async def gone() -> bool:
            return not runs(pid)  # its reader has waited for it

        await eventually(gone)
        self.redis.kill()

    def start_redis(self) -> None:
        self.redis.start()
        self.redis_up = True

    async def stop_redis(self) -> str:
        """SIGSTOP; returns the proof. Nothing of the store works before `wake_redis`."""
        self._redis_pid = await self.redis_pid()
        os.kill(self._redis_pid, signal.SIGSTOP)

        async def look() -> bool:
            return is_stopped(self._redis_pid)

        await eventually(look)
        return "redis state T"

    def wake_redis(self) -> None:
        if self._redis_pid:
            os.kill(self._redis_pid, signal.SIGCONT)
            self._redis_pid = 0

    def stop(self, name: str) -> None:
        self.servers[name].signal(signal.SIGSTOP)

    def wake(self, name: str) -> None:
        if self.alive(name):
            self.servers[name].signal(signal.SIGCONT)

    def wake_all(self) -> None:
        for name in self.names:
            self.wake(name)

    async def stopped(self, name: str) -> str:
        """Waits until the kernel says that the process is stopped; returns the proof."""

        async def look() -> bool:
            return is_stopped(self.pid(name))

        await eventually(look)
        return f"{name} state T"

    # ---- failpoints ----

    def _plan(self, name: str) -> Path:
        return self.directory / f"{name}.plan"

    def _proof(self, name: str) -> Path:
        return self.directory / f"{name}.fired"

    def arm(self, names: Sequence[str], text: str) -> None:
        """From now on, in these processes. Counting begins anew."""
        for name in self.names:
            self._proof(name).unlink(missing_ok=True)
        for name in names:
            _replace(self._plan(name), text)

    def disarm(self) -> None:
        for name in self.names:
            _replace(self._plan(name), "")

    async def fired(self, timeout_s: float = FIRE_S) -> tuple[str, str]:
        """The first process whose failpoint has fired, and its own words about it."""

        async def look() -> tuple[str, str] | None:
            for name in self.names:
                proof = self._proof(name)
                if proof.exists() and (line := proof.read_text().strip()):  # made, then written
                    return name, line
            return None

        found = await eventually(look, timeout_s)
        assert found is not None
        return found

    # ---- requests ----

    @property
    def client(self) -> AsyncClient:
        return self.clients["r0"]

    def begin(
        self,
        spec: Spec,
        label: str = "x",
        deadline_s: float = DEADLINE_S,
        *,
        resumable: bool = False,
    ) -> Stream:
        """A request under an id of its own; a resumable one knows every router."""
        self.count += 1
        request_id = f"{label}-{self.count:05d}"
        stream = Stream(spec, request_id, deadline_s=deadline_s, resumable=resumable)
        return stream.start_at(self.addresses) if resumable else stream.start(self.client)

    def ask_again(self, stream: Stream) -> Stream:
        """A resumable request that has ended, from its start, of the last router."""
        again = Stream(stream.spec, stream.request_id, deadline_s=stream.deadline_s, resumable=True)
        if stream.http is not None:
            return again.start_http(self.urls[-1:], streamed=stream.http.streamed)
        return again.start_at(self.addresses[-1:])

    @property
    def addresses(self) -> list[str]:
        """Of the routers, for gRPC."""
        return [str(self.servers[name].ready["grpc_address"]) for name in self.layout.routers]

    @property
    def urls(self) -> list[str]:
        """Of the routers, for HTTP."""
        return [f"http://{self.servers[name].address}" for name in self.layout.routers]

    async def request_fields(self, request_id: str) -> dict[str, str]:
        """The request's record in Redis; empty when there is none, or no Redis."""
        if not self.redis_up:
            return {}
        raw: dict[bytes, bytes] = await self._ask(self.store.hgetall(ONLY.request_key(request_id)))
        return {key.decode().removeprefix("f:"): value.decode() for key, value in raw.items()}

    async def recorded(self, request_id: str, role: str) -> str:
        """The node of that role in its record, once it is there: routers tell within a moment."""

        async def look() -> str:
            return (await self.request_fields(request_id)).get(role, "")

        return await eventually(look)

    async def log_rows(self, request_id: str) -> list[dict[str, str]]:
        rows: list[Any] = await self._ask(self.store.xrange(ONLY.log_key(request_id)))
        return [{k.decode(): v.decode() for k, v in row.items()} for _, row in rows]

    async def records(self) -> dict[str, NodeRecord]:
        alive = [name for name in self.layout.nodes if self.alive(name)]
        keys = [node_key(name) for name in alive]
        values: list[bytes | None] = await self._ask(self.store.mget(keys)) if alive else []
        found = [wire.record_from_bytes(value) for value in values if value is not None]
        return {record.node_id: record for record in found}

    async def leases(self) -> int:
        return int(await self._ask(self.store.zcard(ONLY.leases)))

    async def _ask(self, reply: Any) -> Any:
        """redis-py types its answers as awaitable or not, text or bytes; here they are bytes."""
        return await reply

    async def scrape(self, name: str) -> str:
        """A process' /metrics."""
        ready = self.servers[name].ready
        if name in ROUTERS:
            return (await self._http.get(f"http://{ready['address']}/metrics")).text
        host = NEAR if self.hosts is None else self.hosts.address(name)
        url = f"http://{host}:{ready['metrics_port']}/metrics"
        headers = {"Authorization": f"Bearer {metrics_token(SECRET)}"}
        return (await self._http.get(url, headers=headers)).text

    async def metric(self, name: str, metric: str) -> float:
        """One value of a process' /metrics; 0 for a sample that is not there yet."""
        text = await self.scrape(name)
        bare, _, labels = metric.partition("{")
        for line in text.splitlines():
            sample, _, value = line.rpartition(" ")
            if sample.partition("{")[0] == bare and labels.rstrip("}") in sample:
                return float(value)
        return 0.0

    # ---- between cases ----

    async def heal(self) -> None:
        """Everything runs, nothing is armed, everybody knows everybody."""
        self.disarm()
        self.wake_redis()
        self.wake_all()
        if self.hosts is not None:
            self.hosts.heal()
        for proxy in self.proxies.values():
            await proxy.set(Fault.NONE)
            proxy.proof = Proof()
        if not self.redis_up:
            self.start_redis()
        async with asyncio.timeout(HEAL_S):
            dead = [name for name in self.names if not self.alive(name)]
            for name, server in zip(
                dead, await asyncio.gather(*(self._start(name) for name in dead)), strict=True
            ):
                self.servers[name] = server
            for name in dead:
                if name in ROUTERS:
                    await self._connect(name)
            await eventually(self._whole, HEAL_S)
        await end(*self.beside)
        self.beside.clear()

    async def _connect(self, name: str) -> None:
        """To a router, perhaps at another port than its predecessor's."""
        if name in self.clients:
            await self.clients[name].close()
        self.clients[name] = AsyncClient(str(self.servers[name].ready["grpc_address"]))

    async def succeed(self, name: str) -> None:
        """A process in the place of one that has ended, at its addresses, known to everybody."""
        ready = self.servers[name].ready
        flags: list[str] = []
        if name in ROUTERS:
            for flag, key in (("--port", "address"), ("--grpc-port", "grpc_address")):
                flags += [flag, str(ready[key]).rpartition(":")[2]]
        self.servers[name] = await self._start(name, flags)
        await eventually(self._whole, HEAL_S)

    async def _start(self, name: str, more: Sequence[str] = ()) -> ServerProcess:
        """`more`: flags beyond those of its layout."""
        environ = {
            VARIABLE: f"@{self._plan(name)}",
            LOG_VARIABLE: str(self._proof(name)),
        }
        if self.layout.hosts:
            environ["BATON_SECRET"] = SECRET
        prefix: tuple[str, ...] = ()
        if name in ROUTERS:
            flags = (*ROUTER_FLAGS, "--router-id", name, *self.layout.router_flags)
        else:
            flags = (*NODE_FLAGS, "--kv-lanes", self.layout.lanes, *self.layout.node_flags)
            if self.layout.proxied:
                flags = (*flags, *self._proxied_flags(name))
            if self.hosts is not None:
                flags += ("--host", self.hosts.address(name), "--insecure")
                flags += ("--kv-unix-dir", str(self._sockets.path))
                prefix = self.hosts.enter(name)
        flags = (*flags, *more)
        server = await self._processes.start(MODULES[name[0]], name, flags, environ, prefix)
        if (self.layout.proxied or self.layout.hosts) and name not in ROUTERS:
            # Peers prefer the Unix socket of a node on their host; without it they take TCP.
            boot = str(server.ready["boot_id"])
            for path in self._sockets.path.glob("*.sock"):
                if boot.startswith(path.stem):
                    path.unlink()
        return server

    async def _whole(self) -> bool:
        """Every node is there as it runs now, and every router knows all of them."""
        boots = {name: self.servers[name].ready["boot_id"] for name in self.layout.nodes}
        told = {name: record.boot_id for name, record in (await self.records()).items()}
        try:
            known = [await self.clients[name].server_info() for name in self.layout.routers]
        except BatonError:
            return False
        names = [{node.node_id for node in info.nodes if not node.draining} for info in known]
        return told == boots and all(each == set(boots) for each in names)


def _replace(path: Path, text: str) -> None:
    """A reader sees the old text or the new one."""
    fresh = path.with_suffix(".new")
    fresh.write_text(text)
    fresh.replace(path)
