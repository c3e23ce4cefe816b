"""A write that is to be safe is done when a replica has it; real servers, one of them stopped."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from baton.protocol.clock import SystemClock
from baton.protocol.errors import StoreUnavailable
from baton.runtime.redis.keys import ONLY
from router.store.base import LogEntry, WriteStatus
from router.store.redis_links import RedisServers
from router.store.redis_store import RedisStore, online_replicas
from tests.redis_kinds import Server, redis_binary, running, until
from tests.router.fakes import FAST, PATIENCE_S
from tests.waiting import eventually

pytestmark = pytest.mark.redis
SHORT_S = 0.5


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[Server, Server]]:
    """A primary and its replica."""
    primary = Server(redis_binary(), tmp_path / "primary")
    follow = ["--replicaof", "127.0.0.1", str(primary.port)]
    replica = Server(redis_binary(), tmp_path / "replica", follow)
    with running([primary, replica]):
        until(lambda: online_replicas(primary.ask("INFO", "replication")), "a replica that follows")
        yield primary, replica


@asynccontextmanager
async def store_over(
    primary: Server, replicas: int, timeout_s: float = PATIENCE_S
) -> AsyncIterator[RedisStore]:
    servers = RedisServers.of(f"redis://127.0.0.1:{primary.port}/0", timeout_s, replicas)
    store = RedisStore(servers, "router", FAST, SystemClock(), timeout_s)
    await store.start()
    yield store
    await store.stop()


def entry(position: int) -> LogEntry:
    return LogEntry("r", 1, position, (position,))


async def test_a_safe_write_waits_for_the_replica(pair: tuple[Server, Server]) -> None:
    primary, replica = pair
    async with store_over(primary, 1) as store:
        assert await store.claim("r", {"resumable": "1"}) is not None
        assert await store.append([entry(0)], safe=True) == [WriteStatus.OK]
        assert replica.ask("XLEN", ONLY.log_key("r")) == 1, "answered, so it is there"
        assert replica.ask("HGET", ONLY.request_key("r"), "owner") == b"router"


async def test_without_its_answer_a_safe_write_is_not_done(pair: tuple[Server, Server]) -> None:
    primary, replica = pair
    async with store_over(primary, 1, SHORT_S) as store:
        assert await store.claim("r", {"resumable": "1"}) is not None
        replica.signal(signal.SIGSTOP)
        assert await store.append([entry(0)]) == [WriteStatus.OK], "a plain one does not wait"
        with pytest.raises(StoreUnavailable, match="0 of 1 replicas"):
            await store.append([entry(1)], safe=True)
        replica.signal(signal.SIGCONT)

        async def again() -> bool:
            try:
                return await store.append([entry(1)], safe=True) == [WriteStatus.OK]
            except StoreUnavailable:
                return False

        await eventually(again, PATIENCE_S)
        assert [it.token_ids for it in await store.read_log("r")] == [(0,), (1,)], "once"
        assert replica.ask("XLEN", ONLY.log_key("r")) == 2


async def test_nothing_waits_for_a_replica_that_is_gone(pair: tuple[Server, Server]) -> None:
    primary, replica = pair
    async with store_over(primary, 2) as store:
        assert await store.claim("r", {"resumable": "1"}) is not None, "there are no two"
        replica.kill()
        until(lambda: primary.info("connected_slaves") == 0, "a primary that knows it")
        assert await store.beat(["r"]) == []
        assert await store.append([entry(0)], safe=True) == [WriteStatus.OK]


def test_a_replica_that_still_gets_its_first_copy_is_not_counted() -> None:
    rows = {
        "role": "master", "connected_slaves": 2, "slave0": {"state": "online", "lag": 9},
        "slave1": {"state": "wait_bgsave", "lag": 0}, "slave_priority": 100,
    }  # fmt: skip
    assert online_replicas(rows) == 1
