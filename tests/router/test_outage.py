"""A Redis that is killed, stopped, full, read-only, out of disk, slow: requests go on and come in.

Every fault is a real one of a real server, proves that it happened (the server's own word, or the
calls that were skipped), and is healed; then the store has everything, in order.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import AsyncGenerator, Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import redis as blocking
from redis.exceptions import ResponseError

from baton.protocol import wire
from baton.protocol.clock import SystemClock
from baton.protocol.messages import SubmitDecode
from baton.protocol.request import Request, RequestState
from baton.runtime.redis.connections import connect
from baton.runtime.redis.keys import node_key
from deploy.redis_server import RedisServer, find_redis_binary
from router.nodes.directory import RedisDirectory
from router.store.base import LogEntry
from router.store.redis_links import RedisServers
from router.store.redis_store import RedisStore
from tests.router.clients import Client
from tests.router.fakes import FAST, FakeNode, FakeRouter, fake_nodes, make_request, running_router
from tests.waiting import end, eventually

pytestmark = pytest.mark.redis
TIMEOUT_S = 5.0  # of a call; what is no outage shall not be taken for one on a busy machine
SHORT_S = 1.0  # where a silence is to be noticed
SLOW_MS = 2500


class Victim:
    """The server under test, and a hand to hurt it with."""

    def __init__(self, server: RedisServer, directory: Path) -> None:
        self.server = server
        self.directory = directory
        self.pid = 0

    def ask(self, *words: Any) -> Any:
        with blocking.Redis.from_url(self.server.url, socket_timeout=2.0) as client:
            return client.execute_command(*words)

    def refusal(self) -> str:
        """What it says to a write."""
        with pytest.raises(ResponseError) as caught:
            self.ask("SET", "probe", "x")
        return str(caught.value)

    def signal(self, number: signal.Signals) -> None:
        if not self.pid:
            with blocking.Redis.from_url(self.server.url) as client:
                info: Any = client.info("server")
            self.pid = int(info["process_id"])
        os.kill(self.pid, number)

    def memory(self, limit: int) -> None:
        self.ask("CONFIG", "SET", "maxmemory", limit)


@dataclass(frozen=True)
class Fault:
    name: str
    strike: Callable[[Victim], object]
    heal: Callable[[Victim], object]
    timeout_s: float = TIMEOUT_S


def stop(victim: Victim) -> None:
    victim.signal(signal.SIGSTOP)
    assert os.waitid(os.P_PID, victim.pid, os.WSTOPPED | os.WNOWAIT) is not None, "it is stopped"


def fill(victim: Victim) -> None:
    victim.memory(1)
    assert "maxmemory" in victim.refusal()


def follow_nobody(victim: Victim) -> None:
    victim.ask("REPLICAOF", "127.0.0.1", "1")
    assert "read only" in victim.refusal().lower()


def lose_disk(victim: Victim) -> None:
    """Snapshots fail: the server refuses to write what it could not keep."""
    victim.ask("CONFIG", "SET", "appendonly", "no")
    victim.ask("CONFIG", "SET", "save", "3600 1")
    shutil.rmtree(victim.directory)
    victim.ask("BGSAVE")

    def failed() -> bool:
        with blocking.Redis.from_url(victim.server.url) as client:
            info: Any = client.info("persistence")
        return not info["rdb_bgsave_in_progress"] and info["rdb_last_bgsave_status"] == "err"

    while not failed():  # each look is a round trip
        pass
    with pytest.raises(ResponseError, match="MISCONF"):
        victim.ask("PING")  # a health check by PING would call it dead
    assert "MISCONF" in victim.refusal()


FAULTS = (
    Fault("kill -9", lambda v: v.server.kill(), lambda v: v.server.start()),
    Fault("stopped", stop, lambda v: v.signal(signal.SIGCONT), SHORT_S),
    Fault("full", fill, lambda v: v.memory(0)),
    Fault("read-only", follow_nobody, lambda v: v.ask("REPLICAOF", "NO", "ONE")),
    Fault("misconf", lose_disk, lambda v: v.ask("CONFIG", "SET", "save", "")),
    Fault("slow", lambda v: v.ask("CLIENT", "PAUSE", SLOW_MS, "ALL"), lambda _: None, SHORT_S),
)


@contextlib.contextmanager
def victim_in(directory: Path) -> Generator[Victim, None, None]:
    binary = find_redis_binary()
    assert binary is not None, "the mark says so"
    data = directory / "data"
    data.mkdir()
    with RedisServer(binary, data) as server:
        yield Victim(server, data)


@dataclass
class Scene:
    """A router with its store in the victim, one decode node, a heartbeat."""

    router: FakeRouter
    node: FakeNode
    positions: dict[str, int]

    async def begin(self, request_id: str) -> tuple[Client, Request]:
        client = Client(self.router, make_request(request_id))
        request = (await self.node.hear(SubmitDecode)).request
        assert request.id == request_id
        self.positions[request_id] = 0
        return client, request

    async def token(self, client: Client, request: Request) -> None:
        """One more, and the client sees it."""
        position = self.positions[request.id]
        self.node.tokens(request, position, 40 + position)
        self.positions[request.id] += 1
        assert (await client.next()).position == position

    async def end(self, client: Client, request: Request) -> None:
        position = self.positions[request.id]
        self.node.finish(request, position, 40 + position)
        assert await client.done() == list(range(40, 41 + position))

    async def whole(self, request_id: str) -> bool:
        """Finished in the store, with every token that was shown, in order."""
        record = await self.router.store.read(request_id)
        assert record is not None
        log = await self.router.store.read_log(request_id)
        tokens = [token for entry in log for token in entry.token_ids]
        assert tokens == list(range(40, 41 + self.positions[request_id]))
        assert record.fields["output_tokens"] == str(len(tokens))
        return record.state is RequestState.FINISHED


@contextlib.asynccontextmanager
async def scene(victim: Victim, timeout_s: float = TIMEOUT_S) -> AsyncGenerator[Scene, None]:
    clock = SystemClock()
    store = RedisStore(
        RedisServers.of(victim.server.url, timeout_s), "router", FAST, clock, timeout_s
    )
    async with (
        connect(victim.server.url, timeout_s) as client,
        fake_nodes("d") as (node,),
        running_router([node], store, directory=RedisDirectory(client, timeout_s)) as router,
    ):
        tasks = [asyncio.create_task(it.run()) for it in (router.guard, router.registry)]
        try:
            yield Scene(router, node, {})
        finally:
            await end(*tasks)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
async def test_requests_go_on_and_come_in_and_the_log_is_whole_afterwards(
    fault: Fault, tmp_path: Path
) -> None:
    with victim_in(tmp_path) as victim:
        async with scene(victim, fault.timeout_s) as s:
            guard, node = s.router.guard, s.node
            before, asked = await s.begin("before")
            ending, asked_to_end = await s.begin("ends-meanwhile")
            await s.token(before, asked)
            fault.strike(victim)
            await s.token(before, asked)
            await eventually(lambda: _answer(guard.stats.away))  # the fault has happened
            await s.token(before, asked)  # it may have sent the other token before that
            guard.flush()
            during, asked_anew = await s.begin("comes-meanwhile")
            await s.token(during, asked_anew)
            await s.end(ending, asked_to_end)
            assert (node.sessions, len(s.router.registry.snapshots())) == (1, 1), "no node is dead"
            fault.heal(victim)
            await eventually(lambda: _answer(not guard.stats.away))
            await eventually(lambda: _answer(guard.catch_up.stats.requests >= 3))
            assert guard.stats.outages == 1
            for client, request in ((before, asked), (during, asked_anew)):
                await s.token(client, request)  # written through again
                await s.end(client, request)
            for request_id in ("before", "comes-meanwhile", "ends-meanwhile"):
                assert await s.whole(request_id)
            assert guard.catch_up.stats.tokens >= 2, "appended late"
            assert (guard.stats.refused, guard.catch_up.stats.dropped) == (0, 0)


async def _answer(value: bool) -> bool:
    return value


@pytest.fixture
def small_disk(tmp_path: Path) -> Generator[Path, None, None]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("no right to mount a disk of its own")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True, capture_output=True)


async def test_a_disk_that_is_full_under_the_append_only_file(small_disk: Path) -> None:
    filler = small_disk / "filler"

    def no_space_left(victim: Victim) -> None:
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as stream:
            while stream.write(b"\0" * 4096):
                pass

        def refuses() -> bool:
            try:
                victim.ask("SET", "probe", "x" * 4096)  # the first ones may fit, or find out
            except ResponseError as error:
                return "MISCONF" in str(error)
            return False

        while not refuses():
            pass

    fault = Fault("disk full", no_space_left, lambda _: filler.unlink())
    await test_requests_go_on_and_come_in_and_the_log_is_whole_afterwards(fault, small_disk)


async def test_a_connection_that_the_server_ends_is_no_outage(tmp_path: Path) -> None:
    with victim_in(tmp_path) as victim:
        async with scene(victim) as s:
            client, request = await s.begin("r")
            for _ in range(5):
                killed = victim.ask("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
                assert killed >= 1
                await s.token(client, request)
                assert len(await s.router.logged("r")) == s.positions["r"]
            await s.end(client, request)
            assert await s.whole("r")
            assert s.router.guard.stats.outages == 0


@pytest.mark.parametrize(
    "words",
    [
        "LOADING Redis is loading the dataset in memory",
        "MISCONF Errors writing to the AOF file: No space left on device",
        "OOM command not allowed when used memory > 'maxmemory'",
        "READONLY You can't write against a read only replica",
        "MASTERDOWN Link with MASTER is down",
        "NOREPLICAS Not enough good replicas to write",
        "BUSY Redis is busy running a script",
        "CLUSTERDOWN The cluster is down",
        "NOAUTH Authentication required",
        "NOPERM this user has no permissions",
        "NOSCRIPT No matching script",
        "ERR unknown command",
    ],
)
async def test_every_refusal_means_no_log_and_never_a_dead_node(words: str) -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while await reader.readline():
                if reader.at_eof():
                    break
                writer.write(f"-{words}\r\n".encode())
        writer.close()

    # One reply per line is more than one per command: a client that reads a second one sees an
    # answer to nothing, which must be no worse.
    server = await asyncio.start_server(refuse, "127.0.0.1", 0)
    url = f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    store = RedisStore(RedisServers.of(url, TIMEOUT_S), "router", FAST, SystemClock(), TIMEOUT_S)
    async with (
        connect(url, TIMEOUT_S) as client,
        fake_nodes("d") as (node,),
        running_router([node], store, directory=RedisDirectory(client, TIMEOUT_S)) as router,
    ):
        await router.guard.beat()
        assert router.guard.stats.away
        await router.registry.refresh()
        reader = Client(router, make_request("r"))
        request = (await node.hear(SubmitDecode)).request
        node.finish(request, 0, 41)
        assert await reader.done() == [41]
        assert len(router.registry.snapshots()) == 1
    server.close()


async def test_records_that_cannot_be_renewed_make_no_node_unknown(tmp_path: Path) -> None:
    """On a read-only Redis node records run out: that says nothing of the nodes, up or not."""
    with victim_in(tmp_path) as victim:
        client = connect(victim.server.url, TIMEOUT_S)
        store = RedisStore(RedisServers([client]), "router", FAST, SystemClock(), TIMEOUT_S)
        async with (
            fake_nodes("d1", "d2") as (d1, d2),
            running_router([], store, directory=RedisDirectory(client, TIMEOUT_S)) as router,
        ):
            registry, guard = router.registry, router.guard
            for node in (d1, d2):
                key, value = node_key(node.record.node_id), wire.record_to_bytes(node.record)
                victim.ask("SET", key, value)
            await registry.refresh()
            await router.until(lambda: len(registry.records()) == 2)
            victim.ask("DEL", *(node_key(node.record.node_id) for node in (d1, d2)))
            follow_nobody(victim)
            await guard.beat()
            assert guard.stats.away
            d1.cut()  # its session breaks in the middle of it, and comes back
            await router.until(lambda: len(registry.records()) == 1)
            await registry.refresh()
            assert len(registry.statuses()) == 2, "no record, but nobody could have written one"
            await router.until(lambda: len(registry.records()) == 2)
            assert d1.sessions == 2


async def test_the_backlog_is_bounded(tmp_path: Path) -> None:
    with victim_in(tmp_path) as victim:
        async with scene(victim) as s:
            guard = s.router.guard
            guard.catch_up._max_tokens = 2  # pyright: ignore[reportPrivateUsage]
            client, request = await s.begin("r")
            fill(victim)
            for _ in range(4):
                await s.token(client, request)
                guard.flush()
            await eventually(lambda: _answer(guard.stats.away))
            victim.memory(0)
            await eventually(lambda: _answer(guard.catch_up.stats.requests == 1))
            assert guard.catch_up.stats.dropped == 2
            await s.end(client, request)
            log = await s.router.store.read_log("r")
            assert [t for entry in log for t in entry.token_ids] == [40, 41], "no gap in the log"
            record = await s.router.store.read("r")
            assert record is not None
            assert record.state is RequestState.FINISHED


async def test_a_request_swept_by_another_router_stays_unlogged(tmp_path: Path) -> None:
    """Its late tokens are fenced: nothing of an old epoch is ever added."""
    with victim_in(tmp_path) as victim:
        async with scene(victim) as s:
            guard = s.router.guard
            client, request = await s.begin("r")
            await s.token(client, request)
            assert await s.router.logged("r") == [40]
            fill(victim)
            await s.token(client, request)
            await eventually(lambda: _answer(guard.stats.away))
            victim.memory(0)
            # As a sweep by another router does it.
            victim.ask("HSET", "{pd}:req:r", "owner", "", "epoch", 2, "state", "cancelled")
            await eventually(lambda: _answer(guard.stats.refused == 1))
            await s.token(client, request)
            await s.end(client, request)
            log = await s.router.store.read_log("r")
            assert [t for entry in log for t in entry.token_ids] == [40]
            stale = LogEntry("r", epoch=1, position=1, token_ids=(9,))
            assert [status.value for status in await s.router.store.append([stale])] == ["fenced"]
