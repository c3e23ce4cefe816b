"""Which nodes exist (NodeDirectory: the node records in Redis), and which may come (ExpectedNodes).

Not here: whether a node answers (router/nodes/session.py). Without Redis there is no directory, and
the addresses come from the command line.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Any, Final, Protocol

from redis.asyncio import Redis
from redis.exceptions import RedisError

from baton.protocol import wire
from baton.protocol.clock import Clock
from baton.protocol.errors import InvalidRequest, StoreUnavailable
from baton.protocol.handles import NodeRecord
from baton.runtime.redis.keys import NODE_PATTERN
from router.nodes.policy import NodeSnapshot

logger = logging.getLogger(__name__)
SCAN_COUNT: Final = 1000
CouldServe = Callable[[NodeSnapshot], bool]
# Returns the key of the model that a node serves; None if it is none of the router's models.
ModelOf = Callable[[NodeRecord], str | None]


def only_model(_: NodeRecord) -> str:
    """Return the key of the model of a router that has one."""
    return ""


class NodeDirectory(Protocol):
    async def records(self) -> list[NodeRecord]:
        """Return the records that have not expired. Raises StoreUnavailable."""
        ...


class RedisDirectory:
    def __init__(self, client: Redis, timeout_s: float) -> None:
        self._redis = client
        self._timeout_s = timeout_s
        self._unreadable: set[bytes] = set()
        self._read_last: dict[bytes, NodeRecord] = {}  # by the bytes: an idle node's stay the same

    async def records(self) -> list[NodeRecord]:
        try:
            async with asyncio.timeout(self._timeout_s):
                keys, values = await self._read()
        except (RedisError, OSError, TimeoutError) as error:
            raise StoreUnavailable(f"Redis: {type(error).__name__}: {error}") from error
        found: dict[bytes, NodeRecord] = {}
        for key, value in zip(keys, values, strict=True):
            if value is None:
                continue  # expired in between
            try:
                found[value] = self._read_last.get(value) or wire.record_from_bytes(value)
            except InvalidRequest as error:
                if key not in self._unreadable:  # logged once, not at each heartbeat
                    logger.error("the record %s cannot be read: %s", key, error.message)
                self._unreadable.add(key)
        self._read_last = found
        return list(found.values())

    async def _read(self) -> tuple[list[bytes], list[Any]]:
        keys: list[bytes] = [
            key async for key in self._redis.scan_iter(match=NODE_PATTERN, count=SCAN_COUNT)
        ]
        return keys, list(await self._redis.mget(keys)) if keys else []


class ExpectedNodes:
    """Nodes that do not serve now but may serve soon, so that requests wait for them.

    A node is expected while it is connected or its record lives, and for `wait_s` after that. In
    this time it may be restarted, or replaced by another node; or this router itself was paused and
    has yet to connect again. With `wait_s` 0 no node is expected. Event loop only. Which requests
    wait is decided in router/request/dispatch.py and router/request/gate/gate.py.
    """

    def __init__(self, clock: Clock, wait_s: float, model_of: ModelOf = only_model) -> None:
        self._clock = clock
        self._wait_s = wait_s
        self._model_of = model_of
        self._until: dict[str, tuple[float, NodeSnapshot]] = {}  # by boot id

    def here(self, records: Iterable[NodeRecord]) -> None:
        """Note that these nodes are here now: they are expected for `wait_s` from now on."""
        until = self._clock.monotonic() + self._wait_s
        for record in records:
            if (model := self._model_of(record)) is not None:
                self._until[record.boot_id] = until, NodeSnapshot.of(record, model)

    def refused(self, record: NodeRecord) -> None:
        """Stop expecting a node, because this router refuses to use it."""
        self._until.pop(record.boot_id, None)

    def left_s(self, could_serve: CouldServe) -> float:
        """Return for how many seconds a node that could serve is still expected; 0 if none is.

        `could_serve` gets the snapshot of each expected node, as if the node were connected and
        idle.
        """
        now = self._clock.monotonic()
        self._until = {boot: kept for boot, kept in self._until.items() if kept[0] > now}
        ends = [until for until, node in self._until.values() if could_serve(node)]
        return max(ends) - now if ends else 0.0
