"""NodeDirectory: where a router learns which nodes exist: the node records in Redis.

Not here: whether a node answers (router/nodes/session.py). Without Redis there is no directory and
the addresses come from the command line.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Final, Protocol

from redis.asyncio import Redis
from redis.exceptions import RedisError

from baton.protocol import wire
from baton.protocol.errors import InvalidRequest, StoreUnavailable
from baton.protocol.handles import NodeRecord
from baton.runtime.redis_keys import NODE_PATTERN

logger = logging.getLogger(__name__)
SCAN_COUNT: Final = 1000


class NodeDirectory(Protocol):
    async def records(self) -> list[NodeRecord]:
        """All nodes whose record has not expired. Raises StoreUnavailable."""
        ...


class RedisDirectory:
    def __init__(self, client: Redis, timeout_s: float) -> None:
        self._redis = client
        self._timeout_s = timeout_s
        self._unreadable: set[bytes] = set()

    async def records(self) -> list[NodeRecord]:
        try:
            async with asyncio.timeout(self._timeout_s):
                keys, values = await self._read()
        except (RedisError, OSError, TimeoutError) as error:
            raise StoreUnavailable(f"Redis: {type(error).__name__}: {error}") from error
        found: list[NodeRecord] = []
        for key, value in zip(keys, values, strict=True):
            if value is None:
                continue  # expired in between
            try:
                found.append(wire.record_from_bytes(value))
            except InvalidRequest as error:
                if key not in self._unreadable:  # once, not each heartbeat
                    logger.error("the record %s cannot be read: %s", key, error.message)
                self._unreadable.add(key)
        return found

    async def _read(self) -> tuple[list[bytes], list[Any]]:
        keys: list[bytes] = [
            key async for key in self._redis.scan_iter(match=NODE_PATTERN, count=SCAN_COUNT)
        ]
        return keys, list(await self._redis.mget(keys)) if keys else []
