"""Fixtures of the router's tests: the request stores, on one fake clock and real servers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import pytest
import redis

from baton.runtime.timing import Timing
from router.store.base import RequestStore
from router.store.memory_store import MemoryStore, MemoryTables
from router.store.redis_links import RedisServers
from router.store.redis_store import RedisStore
from tests.redis_kinds import (
    Servers,
    cluster,
    encrypted,
    redis_binary,
    service,
    single,
    valkey_binary,
)
from tests.router.fakes import PATIENCE_S, FakeClock

StoreMaker = Callable[..., RequestStore]


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def empty_redis(redis_url: str) -> str:
    """The session's Redis server, emptied."""
    with redis.Redis.from_url(redis_url) as client:
        client.flushall()
    return redis_url


@dataclass(frozen=True)
class Kind:
    """One kind of Redis: how its servers are started, and of which program."""

    start: Callable[[Path, Path], AbstractContextManager[Servers]]
    binary: Callable[[], Path] = redis_binary
    replicas: int = 0


KINDS = {
    "redis": Kind(single),
    "valkey": Kind(single, valkey_binary),
    "sentinel": Kind(service, replicas=1),
    "cluster": Kind(cluster, replicas=1),
    "tls": Kind(encrypted),
    "valkey-sentinel": Kind(service, valkey_binary, 1),
    "valkey-cluster": Kind(cluster, valkey_binary, 1),
}
QUICK = ("redis", "valkey")
STORES = [
    "memory",
    *(pytest.param(name, marks=pytest.mark.redis) for name in QUICK),
    *(
        pytest.param(name, marks=[pytest.mark.redis, pytest.mark.long])
        for name in KINDS
        if name not in QUICK
    ),
]


@pytest.fixture(scope="module", params=STORES)
def store_kind(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Kind, Servers] | None]:
    """Running servers of one kind; None: the store in memory."""
    kind = KINDS.get(request.param)
    if kind is None:
        yield None
    else:
        with kind.start(kind.binary(), tmp_path_factory.mktemp(request.param)) as servers:
            yield kind, servers


@pytest.fixture
async def make_store(
    store_kind: tuple[Kind, Servers] | None, clock: FakeClock
) -> AsyncIterator[StoreMaker]:
    """make_store(owner, lease_s=5.0): stores of several routers over the same data."""
    stores: list[RequestStore] = []
    tables = MemoryTables()
    if store_kind is not None:
        store_kind[1].flush()

    def make(owner: str, lease_s: float = 5.0) -> RequestStore:
        timing = Timing(router_lease_s=lease_s)
        store: RequestStore
        if store_kind is not None:
            kind, servers = store_kind
            clients = RedisServers.of(servers.url, PATIENCE_S, kind.replicas)
            store = RedisStore(clients, owner, timing, clock, PATIENCE_S)
        else:
            store = MemoryStore(owner, timing, clock, tables)
        stores.append(store)
        return store

    yield make
    for store in stores:
        await store.stop()
