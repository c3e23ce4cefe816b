"""Links: the connections of RedisStore, one for each key group (baton/runtime/redis/keys.py).

With one server there is one group. In a Redis Cluster each group has its own connection to the
primary of its slot, so the calls of one request always keep their order. Here every error of a
server or a connection, and every time-out, becomes StoreUnavailable.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from redis.asyncio import Redis
from redis.commands.core import AsyncScript
from redis.exceptions import AskError, MovedError, RedisError, TryAgainError

from baton.protocol.clock import Clock
from baton.protocol.errors import StoreUnavailable
from baton.runtime.redis.connections import connect_groups
from baton.runtime.redis.keys import ONLY, SPREAD, KeyGroup, group_of
from router.store.patience import Patience
from router.store.redis_queue import MOVING_S, ScriptQueue

T = TypeVar("T")
FAILURES: Final = (RedisError, OSError, TimeoutError)


@dataclass(frozen=True, slots=True)
class RedisServers:
    """Clients of all key groups. `replicas`: how many replicas must have a write that is to be
    `safe`, before it counts as done."""

    clients: Sequence[Redis]
    replicas: int = 0

    @classmethod
    def of(cls, url: str, timeout_s: float, replicas: int = 0) -> RedisServers:
        """Return clients whose calls fail after `timeout_s`."""
        return cls(connect_groups(url, timeout_s), replicas)


@dataclass(frozen=True, slots=True)
class GroupLink:
    """One key group: its keys, its client, and its queue of scripts."""

    keys: KeyGroup
    client: Redis
    scripts: ScriptQueue


class Links:
    """All links, and the limits of their calls. `connected_at`: when all calls began to succeed, by
    `clock`; None after a failure. Event loop only."""

    def __init__(self, servers: RedisServers, clock: Clock, patience: Patience) -> None:
        self._clock = clock
        self.patience = patience
        self.connected_at: float | None = None
        groups = SPREAD if len(servers.clients) > 1 else (ONLY,)
        self.all = tuple(
            GroupLink(keys, client, ScriptQueue(client, patience, servers.replicas))
            for keys, client in zip(groups, servers.clients, strict=True)
        )

    def of(self, name: str) -> GroupLink:
        """Return the link that has the request, alias or owner of this name."""
        return self.all[group_of(name, len(self.all))]

    def split(
        self, items: Iterable[T], name_of: Callable[[T], str]
    ) -> list[tuple[GroupLink, list[T]]]:
        """Return the links that have these items by their names, each with its own, in order."""
        parts: dict[str, tuple[GroupLink, list[T]]] = {}
        for item in items:
            link = self.of(name_of(item))
            parts.setdefault(link.keys.tag, (link, []))[1].append(item)
        return list(parts.values())

    async def each(self, work: Callable[[GroupLink], Awaitable[T]]) -> list[T]:
        """Do `work` on all links at once; return the answers. Raises the first error, when all
        have ended."""
        return await together([work(link) for link in self.all])

    async def run(
        self,
        link: GroupLink,
        script: AsyncScript,
        keys: Sequence[str],
        args: Sequence[str | int],
        *,
        safe: bool = False,
    ) -> Any:
        """Run a script in a pipeline and return its answer. Raises StoreUnavailable.

        `safe`: wait until the replicas have it, too.
        """
        try:
            answer = await link.scripts.run(script, keys, args, safe=safe)
        except FAILURES as error:
            raise self.failed(error) from error
        self.reached()
        return answer

    def reached(self) -> None:
        """Note that a server has answered."""
        if self.connected_at is None:
            self.connected_at = self._clock.monotonic()

    def failed(self, error: Exception) -> StoreUnavailable:
        """Note a failure, and return it as the store's."""
        self.connected_at = None
        return StoreUnavailable(f"Redis: {type(error).__name__}: {error}")

    async def evaluate(
        self, link: GroupLink, script: AsyncScript, keys: Sequence[str], args: Sequence[str | int]
    ) -> Any:
        """Run a script on its own, and return its answer. Raises StoreUnavailable."""
        return await self.call(lambda: script(keys=keys, args=args, client=link.client))

    async def call(self, work: Callable[[], Awaitable[T]], asked_s: float = 0.0) -> T:
        """Do `work`, one call by redis-py; limit its time. Raises StoreUnavailable.

        `asked_s`: the seconds for which the server was asked to wait if it had no answer. While the
        keys are moving to another server of a Cluster, the call is repeated.
        """
        began, patience_s = self._clock.monotonic(), self.patience.seconds
        try:
            async with asyncio.timeout(patience_s):
                answer = await _settled(work)
        except FAILURES as error:
            if isinstance(error, TimeoutError):
                self.patience.took(patience_s)
            raise self.failed(error) from error
        self.patience.took(self._clock.monotonic() - began - asked_s)
        self.reached()
        return answer

    async def stop(self) -> None:
        for link in self.all:
            await link.scripts.stop()
        for link in self.all:
            await link.client.aclose()


async def _settled(work: Callable[[], Awaitable[T]]) -> T:
    while True:
        try:
            return await work()
        except (AskError, TryAgainError) as error:
            if isinstance(error, MovedError):  # redis-py makes it a kind of AskError
                raise
            await asyncio.sleep(MOVING_S)


async def together(work: Sequence[Awaitable[T]]) -> list[T]:
    """Await all of `work` at once. Raises the first error, when all have ended."""
    if len(work) == 1:
        return [await work[0]]
    answers = await asyncio.gather(*work, return_exceptions=True)
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
    return [answer for answer in answers if not isinstance(answer, BaseException)]
