"""Where the primary is: asked of Sentinels, or of the nodes of a Redis Cluster.

A primary may be replaced by its replica at any time. So connections ask here each time they are
made (connections.py), and say so (`doubt`) when they got a wrong answer. Each answer is one
server's word: after a doubt, another server is asked first.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoPermissionError, RedisError, ResponseError

Place = tuple[str, int]  # host and port
Dial = Callable[[Place], Redis]


class WrongRedis(RedisError):
    """The servers that the URL names are not what it says. Waiting does not mend it."""


class Primary(Protocol):
    """Where one primary is."""

    async def place(self) -> Place:
        """Ask. Raises RedisError or OSError."""
        ...

    def doubt(self) -> None:
        """Note that the last answer was wrong, or that nobody answered there."""
        ...


class SentinelPrimary:
    """The primary of a Sentinels' `service`. `dial` makes a client of one Sentinel."""

    def __init__(self, hosts: Sequence[Place], service: str, dial: Dial) -> None:
        self._hosts = deque(hosts)
        self._service = service
        self._dial = dial

    async def place(self) -> Place:
        failure: Exception | None = None
        for host in tuple(self._hosts):
            try:
                answer: list[bytes] | None = await _ask(
                    self._dial, host, "SENTINEL", "GET-MASTER-ADDR-BY-NAME", self._service
                )
            except (RedisError, OSError, TimeoutError) as error:
                failure = error
                self.doubt()
                continue
            if answer is not None:
                return answer[0].decode(), int(answer[1])
        if failure is None:
            raise WrongRedis(f"no Sentinel knows the service {self._service!r}")
        raise RedisConnectionError(f"no Sentinel answers: {failure}") from failure

    def doubt(self) -> None:
        self._hosts.rotate(-1)


class ClusterMap:
    """Which node of a Cluster is the primary of which slots. `dial` makes a client of one node.

    All connections share one map. It is asked for when it is first needed and after each doubt.
    """

    def __init__(self, hosts: Sequence[Place], dial: Dial) -> None:
        self._given = tuple(hosts)
        self._nodes = deque(hosts)
        self._dial = dial
        self._ranges: list[tuple[int, int, Place]] = []  # first slot, last slot, primary
        self._asking = asyncio.Lock()

    async def primary_of(self, slot: int) -> Place:
        """Return the primary of a slot. Raises RedisError or OSError."""
        async with self._asking:
            if not self._ranges:
                self._ranges = await self._ask_all()
        for first, last, place in self._ranges:
            if first <= slot <= last:
                return place
        self.doubt()
        raise RedisConnectionError(f"no node of the cluster serves slot {slot}")

    def doubt(self) -> None:
        self._ranges = []
        self._nodes.rotate(-1)

    async def _ask_all(self) -> list[tuple[int, int, Place]]:
        failure: Exception | None = None
        for node in dict.fromkeys((*self._nodes, *self._given)):
            try:
                rows: list[Any] = await _ask(self._dial, node, "CLUSTER", "SLOTS")
            except (RedisError, OSError, TimeoutError) as error:
                failure = error
                continue
            known = [_place_of(each, node) for row in rows for each in row[2:]]
            self._nodes = deque(dict.fromkeys((*known, node)))
            return [(row[0], row[1], _place_of(row[2], node)) for row in rows]
        raise RedisConnectionError(f"no node of the cluster answers: {failure}") from failure


@dataclass(frozen=True, slots=True)
class SlotPrimary:
    """The primary of one slot of a Cluster."""

    cluster: ClusterMap
    slot: int

    async def place(self) -> Place:
        return await self.cluster.primary_of(self.slot)

    def doubt(self) -> None:
        self.cluster.doubt()


def _place_of(row: Sequence[Any], asked: Place) -> Place:
    """Return host and port of a node in an answer; a node that does not know its own name is the
    one that was asked."""
    host: bytes | None = row[0]
    return host.decode() if host and host != b"?" else asked[0], int(row[1])


async def _ask(dial: Dial, place: Place, *command: str) -> Any:
    """Return one server's answer to `command`. Raises WrongRedis if it has no such command."""
    client = dial(place)
    try:
        reply: Any = client.execute_command(*command)
        return await reply
    except NoPermissionError:
        raise
    except ResponseError as error:
        raise WrongRedis(f"{place[0]}:{place[1]} answers {command[0]} with: {error}") from error
    finally:
        await client.aclose()
