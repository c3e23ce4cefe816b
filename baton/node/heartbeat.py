"""Heartbeat: each interval the node refreshes its load and tells its routers and Redis.

Redis is optional twice: a node without `--redis-url` is given to routers by address, and a Redis
that is away costs one log line; the record comes back with the first beat that reaches it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Protocol

import redis.asyncio
from redis.exceptions import RedisError

from baton import redis_keys, wire
from baton.handles import NodeRecord
from baton.redis_connections import heed_cancellation
from baton.timing import Timing

log = logging.getLogger(__name__)


class Registry(Protocol):
    """Where node records live."""

    async def announce(self, record: NodeRecord) -> None:
        """Store the record for `node_record_s`. Never raises for a store that is away."""
        ...

    async def withdraw(self, node_id: str) -> None: ...

    async def close(self) -> None: ...


class RedisRegistry:
    """`SET {pd}:node:<id> record PX`; every call ends within one heartbeat."""

    def __init__(self, url: str, timing: Timing) -> None:
        self._timing = timing
        self._away = False
        client = redis.asyncio.Redis.from_url(
            url,
            socket_timeout=timing.heartbeat_s,
            socket_connect_timeout=timing.heartbeat_s,
        )
        self._redis = heed_cancellation(client)

    async def announce(self, record: NodeRecord) -> None:
        lifetime_ms = int(self._timing.node_record_s * 1000)
        key, value = redis_keys.node_key(record.node_id), wire.record_to_bytes(record)
        await self._try(lambda: self._redis.set(key, value, px=lifetime_ms))

    async def withdraw(self, node_id: str) -> None:
        await self._try(lambda: self._redis.delete(redis_keys.node_key(node_id)))

    async def close(self) -> None:
        await self._redis.aclose()

    async def _try(self, command: Callable[[], Awaitable[object]]) -> None:
        try:
            async with asyncio.timeout(self._timing.heartbeat_s):
                await command()
        except (RedisError, OSError, TimeoutError) as error:
            if not self._away:
                log.warning("Redis is away, this node goes on without it: %s", error)
            self._away = True
            return
        if self._away:
            log.info("Redis is back")
        self._away = False


class Heartbeat:
    """Runs `beat` each interval until stopped. The life: start() -> beats -> stop()."""

    def __init__(self, beat: Callable[[], Awaitable[None]], interval_s: float) -> None:
        self._beat = beat
        self._interval_s = interval_s
        self._stopping = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run(), name="heartbeat")

    async def stop(self) -> None:
        """Let the beat under way end. Twice is safe."""
        self._stopping.set()
        if self._task is not None:
            await asyncio.wait([self._task])

    async def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                await self._beat()
            except Exception:
                # The next beat may succeed, and a node that goes silent would be given up.
                log.exception("a heartbeat failed")
            try:
                async with asyncio.timeout(self._interval_s):
                    await self._stopping.wait()
            except TimeoutError:
                continue
