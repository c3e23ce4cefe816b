"""Fixtures of the router's tests: both request stores, on one fake clock and one real Redis."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import pytest
import redis

from baton.runtime.timing import Timing
from router.store.base import RequestStore
from router.store.memory_store import MemoryStore, MemoryTables
from router.store.redis_store import RedisStore, connect
from tests.router.fakes import FakeClock

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


@pytest.fixture(params=["memory", pytest.param("redis", marks=pytest.mark.redis)])
async def make_store(request: pytest.FixtureRequest, clock: FakeClock) -> AsyncIterator[StoreMaker]:
    """make_store(owner, lease_s=5.0): stores of several routers over the same data."""
    stores: list[RequestStore] = []
    tables = MemoryTables()
    url = request.getfixturevalue("empty_redis") if request.param == "redis" else ""

    def make(owner: str, lease_s: float = 5.0) -> RequestStore:
        timing = Timing(router_lease_s=lease_s)
        store: RequestStore
        if url:
            store = RedisStore(connect(url, 2.0), owner, timing, clock, 2.0)
        else:
            store = MemoryStore(owner, timing, clock, tables)
        stores.append(store)
        return store

    yield make
    for store in stores:
        await store.stop()
