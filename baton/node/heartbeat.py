"""Heartbeat: each interval the node refreshes its load and reports it to its routers and Redis.

A node works without Redis: without `--redis-url`, routers are given its address. If Redis is away,
one line is logged; the record comes back with the first heartbeat that reaches Redis.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable
from typing import Any, Final, Protocol

from redis.exceptions import RedisError

from baton.protocol import wire
from baton.protocol.errors import ConfigError, InvalidRequest
from baton.protocol.handles import NodeRecord
from baton.runtime.redis import keys as redis_keys
from baton.runtime.redis.connections import connect
from baton.runtime.timing import Timing

log = logging.getLogger(__name__)
SPARE_LOOKS: Final = 2  # heartbeats beyond a record's lifetime after which its node is alive


class Registry(Protocol):
    """The store of node records, by the nodes' names."""

    async def claim(self, record: NodeRecord) -> None:
        """Announce the node for the first time. Raises ConfigError if another live node has this
        name.
        """
        ...

    async def announce(self, record: NodeRecord) -> None:
        """Store the record for `node_record_s`. Does not raise if the store is away."""
        ...

    async def withdraw(self, record: NodeRecord) -> None: ...

    async def close(self) -> None: ...


class RedisRegistry:
    """Keeps records in Redis: `SET {pd}:node:<id> record PX`; every call ends within one heartbeat.

    A record of another boot under this name is neither overwritten nor deleted, except by `claim`.
    """

    def __init__(self, url: str, timing: Timing) -> None:
        self._timing = timing
        self._away = False
        self._displaced = False
        self._redis = connect(url, timing.heartbeat_s)

    async def claim(self, record: NodeRecord) -> None:
        """See Registry. Waits until the record of a node that has just died expires.

        It does not wait if the old record has this node's own address.
        """
        timing, where = self._timing, ""
        for _ in range(math.ceil(timing.node_record_s / timing.heartbeat_s) + SPARE_LOOKS):
            other = await self._other(record)
            dead = other is not None and other.address == record.address
            if (other is None or dead) and await self._set(record, first=not dead):
                return
            where = "" if other is None else f", at {other.address}"
            await asyncio.sleep(timing.heartbeat_s)
        raise ConfigError(
            f"the node id {record.node_id} is another node's, which lives{where}: each needs a"
            " --node-id of its own",
            field="node_id",
        )

    async def announce(self, record: NodeRecord) -> None:
        other = await self._other(record)
        if other is None:
            await self._set(record)
        elif not self._displaced:
            log.error("node id %s is taken by the node at %s", record.node_id, other.address)
        self._displaced = other is not None

    async def withdraw(self, record: NodeRecord) -> None:
        if await self._other(record) is None:
            await self._try(lambda: self._redis.delete(redis_keys.node_key(record.node_id)))

    async def close(self) -> None:
        await self._redis.aclose()

    async def _other(self, record: NodeRecord) -> NodeRecord | None:
        """Return the record under this name if it is of another boot, else None."""
        reply: Any = await self._try(
            lambda: self._redis.mget([redis_keys.node_key(record.node_id)])
        )
        try:
            found = wire.record_from_bytes(reply[0]) if reply and reply[0] else None
        except InvalidRequest:
            return None  # a record of another version
        return None if found is None or found.boot_id == record.boot_id else found

    async def _set(self, record: NodeRecord, *, first: bool = False) -> bool:
        """Store the record; with `first` only if there is none. Return whether it is stored or
        Redis is away.
        """
        lifetime_ms = int(self._timing.node_record_s * 1000)
        key, value = redis_keys.node_key(record.node_id), wire.record_to_bytes(record)
        done = await self._try(lambda: self._redis.set(key, value, px=lifetime_ms, nx=first))
        return bool(done) or self._away

    async def _try(self, command: Callable[[], Awaitable[object]]) -> object:
        """Return the command's answer; None while Redis is away."""
        try:
            async with asyncio.timeout(self._timing.heartbeat_s):
                answer = await command()
        except (RedisError, OSError, TimeoutError) as error:
            if not self._away:
                log.warning("Redis is away, this node goes on without it: %s", error)
            self._away = True
            return None
        if self._away:
            log.info("Redis is back")
        self._away = False
        return answer


class Heartbeat:
    """Calls `beat` each interval until stopped. Life: start() -> beats -> stop()."""

    def __init__(self, beat: Callable[[], Awaitable[None]], interval_s: float) -> None:
        self._beat = beat
        self._interval_s = interval_s
        self._stopping = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run(), name="heartbeat")

    async def stop(self) -> None:
        """Wait until the current beat has ended. May be called twice."""
        self._stopping.set()
        if self._task is not None:
            await asyncio.wait([self._task])

    async def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                await self._beat()
            except Exception:
                # The next beat may succeed, and routers would give up a silent node.
                log.exception("a heartbeat failed")
            try:
                async with asyncio.timeout(self._interval_s):
                    await self._stopping.wait()
            except TimeoutError:
                continue
