"""Shared by the front door's tests."""

from __future__ import annotations

import pytest
import redis

from router.store.memory_store import MemoryTables


@pytest.fixture(params=["memory", pytest.param("redis", marks=pytest.mark.redis)])
def tables(request: pytest.FixtureRequest) -> MemoryTables | str:
    """Where all routers keep their requests: a store of each kind."""
    if request.param == "memory":
        return MemoryTables()
    url: str = request.getfixturevalue("redis_url")
    with redis.Redis.from_url(url) as client:
        client.flushall()
    return url
