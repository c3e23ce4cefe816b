"""A call of Redis that is cancelled as its bytes leave ends, whoever made it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path

import pytest
from redis.asyncio import Connection, Redis, SSLConnection, UnixDomainSocketConnection

from baton.protocol.clock import SystemClock
from baton.protocol.errors import ConfigError
from baton.runtime.redis.connections import check_router_redis, connect, heed_cancellation
from router.nodes.directory import RedisDirectory
from router.request.aborts import Aborts
from router.store.redis_links import RedisServers
from router.store.redis_store import RedisStore
from tests.router.fakes import FAST, PATIENCE_S
from tests.router.test_aborts import Requests

pytestmark = pytest.mark.redis
TIMEOUT_S = 5.0
Call = Callable[[Redis], Awaitable[object]]


class Crossing:
    """Cancels a task as soon as the bytes of a command have left, before it has been told so."""

    def __init__(self, client: Redis, word: bytes) -> None:
        self.task: asyncio.Task[object] | None = None
        self.crossed = 0
        crossing, pool = self, client.connection_pool

        class Crossed(pool.connection_class):  # type: ignore[misc, name-defined]
            async def _send_packed_command(self, command: Iterable[bytes]) -> None:
                data = b"".join(command)
                await super()._send_packed_command([data])
                if word in data and crossing.task is not None:
                    crossing.crossed += 1
                    crossing.task.cancel()

        pool.connection_class = Crossed


def store(client: Redis) -> RedisStore:
    return RedisStore(RedisServers([client]), "router", FAST, SystemClock(), TIMEOUT_S)


CALLS: dict[str, tuple[bytes, Call]] = {
    "tail": (b"XREAD", lambda client: store(client).tail("r", "", TIMEOUT_S)),
    "read_log": (b"XRANGE", lambda client: store(client).read_log("r")),
    "counts": (b"HGETALL", lambda client: store(client).counts()),
    "beat": (b"EVALSHA", lambda client: store(client).beat(())),
    "nodes": (b"SCAN", lambda client: RedisDirectory(client, TIMEOUT_S).records()),
    "aborts": (b"SUBSCRIBE", lambda client: Aborts(Requests(), client).run()),
}


@pytest.mark.parametrize("name", CALLS)
async def test_a_call_that_is_cancelled_as_its_bytes_leave_ends(
    name: str, empty_redis: str
) -> None:
    word, call = CALLS[name]
    client = connect(empty_redis, TIMEOUT_S)
    crossing = Crossing(client, word)
    crossing.task = asyncio.ensure_future(call(client))
    await asyncio.wait({crossing.task}, timeout=PATIENCE_S)
    assert (crossing.crossed, crossing.task.cancelled()) == (1, True)
    crossing.task = None
    assert await client.ping(), "no answer to the call that was given up is taken for another's"
    await client.aclose()


async def test_a_time_limit_that_runs_out_as_the_bytes_leave_is_one(empty_redis: str) -> None:
    """asyncio.timeout cancels, too: it would be late by redis-py's own limit."""
    client = connect(empty_redis, TIMEOUT_S)
    limit = asyncio.timeout(None)

    class Late(client.connection_pool.connection_class):  # type: ignore[misc, name-defined]
        async def _send_packed_command(self, command: Iterable[bytes]) -> None:
            data = b"".join(command)
            await super()._send_packed_command([data])
            if b"BLPOP" in data:
                limit.reschedule(0.0)  # of the past: with the next turn of the loop
                await asyncio.sleep(0)

    client.connection_pool.connection_class = Late
    with pytest.raises(TimeoutError):
        async with limit:
            await client.blpop(["nothing"], timeout=0)  # type: ignore[misc]
    await client.aclose()


@pytest.mark.parametrize(
    ("url", "kind"),
    [
        ("redis://127.0.0.1:1", Connection),
        ("rediss://127.0.0.1:1", SSLConnection),
        ("unix:///nowhere", UnixDomainSocketConnection),
    ],
)
def test_every_kind_of_connection_is_made_so(url: str, kind: type) -> None:
    client = heed_cancellation(Redis.from_url(url))
    made = client.connection_pool.connection_class
    assert issubclass(made, kind)
    assert made is not kind


async def test_new_connections_read_the_password_anew(empty_redis: str, tmp_path: Path) -> None:
    admin = Redis.from_url(empty_redis)
    file = tmp_path / "password"
    file.write_text("one\n")
    place = empty_redis.replace("://", "://rotated@", 1)
    url = f"{place}{'&' if '?' in place else '?'}password_file={file}"
    try:
        await admin.execute_command("ACL SETUSER rotated reset on >one ~* &* +@all")
        await check_router_redis(url, TIMEOUT_S)
        client = connect(url, TIMEOUT_S)
        assert await client.acl_whoami() in (b"rotated", "rotated")  # type: ignore[misc]
        await admin.execute_command("ACL SETUSER rotated >two <one")
        with pytest.raises(ConfigError, match="--redis-url"):
            await check_router_redis(url, TIMEOUT_S)
        file.write_text("two\n")
        await check_router_redis(url, TIMEOUT_S)
        await admin.client_kill_filter(_type="normal", skipme=True)
        assert await client.ping()
        file.unlink()
        await client.connection_pool.disconnect()
        assert await client.ping(), "the last password holds"
        await client.aclose()
        with pytest.raises(ConfigError, match="password_file"):
            connect(url, TIMEOUT_S)
    finally:
        await admin.execute_command("ACL DELUSER rotated")
        await admin.aclose()
