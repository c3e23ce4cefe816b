"""Connections of redis-py that do not lose a cancellation. One place for routers and nodes.

redis-py sends under `asyncio.wait_for`. Before Python 3.12 that returns as if nothing had happened
when its task is cancelled in the very turn in which the bytes have left: the caller goes on to wait
for the answer, or for the next message, and whoever stops it waits with it. A time-out of
`asyncio.timeout` is a cancellation, too. `Task.cancelling` still tells of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, Final

from redis.asyncio import Connection, Redis, SSLConnection, UnixDomainSocketConnection
from redis.asyncio.connection import AbstractConnection

Packed = bytes | str | Iterable[bytes]


async def _heeding(connection: AbstractConnection, sending: Coroutine[Any, Any, None]) -> None:
    """`sending`; raises CancelledError if that was asked for meanwhile."""
    task = asyncio.current_task()
    assert task is not None, "redis-py runs in tasks"
    asked_before = task.cancelling()
    await sending
    if task.cancelling() > asked_before:
        await connection.disconnect(nowait=True)  # nobody will read the answer
        raise asyncio.CancelledError


class _Tcp(Connection):
    async def send_packed_command(self, command: Packed, check_health: bool = True) -> None:
        await _heeding(self, super().send_packed_command(command, check_health))


class _Tls(SSLConnection):
    async def send_packed_command(self, command: Packed, check_health: bool = True) -> None:
        await _heeding(self, super().send_packed_command(command, check_health))


class _Unix(UnixDomainSocketConnection):
    async def send_packed_command(self, command: Packed, check_health: bool = True) -> None:
        await _heeding(self, super().send_packed_command(command, check_health))


_HEEDING: Final[dict[type, type]] = {
    Connection: _Tcp, SSLConnection: _Tls, UnixDomainSocketConnection: _Unix,
}  # fmt: skip


def heed_cancellation(client: Redis) -> Redis:
    """The same client; its connections, none of which is made yet, end calls that are cancelled."""
    pool = client.connection_pool
    pool.connection_class = _HEEDING[pool.connection_class]
    return client
