"""Shared by the front door's tests."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import redis

from router.store.memory_store import MemoryTables
from tests.front.resumable import HeldRouter, held_router


@pytest.fixture(params=["memory", pytest.param("redis", marks=pytest.mark.redis)])
def tables(request: pytest.FixtureRequest) -> MemoryTables | str:
    """Where all routers keep their requests: a store of each kind."""
    if request.param == "memory":
        return MemoryTables()
    url: str = request.getfixturevalue("redis_url")
    with redis.Redis.from_url(url) as client:
        client.flushall()
    return url


@pytest.fixture
async def one(tables: MemoryTables | str) -> AsyncIterator[HeldRouter]:
    async with held_router("one", tables) as router:
        yield router


@pytest.fixture
async def two(tables: MemoryTables | str) -> AsyncIterator[HeldRouter]:
    async with held_router("two", tables) as router:
        yield router
