"""Connections of redis-py for routers and nodes, to every kind of Redis that a URL may name.

`connect` is the only place that makes clients. With Sentinels and in a Cluster, a connection asks
for the primary each time it is made (primaries.py). A server that turns out to be no primary
any more (MOVED, READONLY) loses the connection, so that the next try finds the new one.
redis-py's own RedisCluster is not used: docs/adr/0013-key-groups.md says why.

Before a process starts, `check_redis` finds the errors that waiting does not mend (a wrong
password, database, shard, permission or CA). Otherwise they would look like an endless outage.

`heed_cancellation` makes calls end when they are cancelled. redis-py sends under
`asyncio.wait_for`. Before Python 3.12, wait_for returns normally if its task is cancelled in the
very turn of the loop in which the bytes have left. The caller then waits for the answer or the next
message, and the canceller waits for the caller. A time-out of `asyncio.timeout` is such a
cancellation. `Task.cancelling` still shows it.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Coroutine, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from redis.asyncio import (
    Connection,
    ConnectionPool,
    Redis,
    SSLConnection,
    UnixDomainSocketConnection,
)
from redis.asyncio.connection import AbstractConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.credentials import CredentialProvider
from redis.exceptions import (
    AuthenticationError,
    InvalidResponse,
    MovedError,
    NoPermissionError,
    ReadOnlyError,
    RedisError,
    ResponseError,
)
from redis.exceptions import ConnectionError as RedisConnectionError

from baton.protocol.errors import ConfigError
from baton.runtime.redis.keys import TAG, KeyGroup, key_groups, node_key, slot_of
from baton.runtime.redis.primaries import (
    ClusterMap,
    Place,
    Primary,
    SentinelPrimary,
    SlotPrimary,
    WrongRedis,
)
from baton.runtime.redis.urls import (
    FLAG,
    PASSWORD_FILE,
    RedisAddress,
    RedisKind,
    parse_redis_url,
    without_password,
)

log = logging.getLogger(__name__)
Packed = bytes | str | Iterable[bytes]
Call = tuple[str | int, ...]

# Shows whether a node may write, but has no effect: there is no such key.
NODE_CALL: Final[Call] = ("SET", node_key("?"), "", "XX")
_BROKEN_OFF: Final = (ssl.SSLEOFError, ssl.SSLZeroReturnError, ssl.SSLSyscallError)


def router_call(group: KeyGroup) -> Call:
    """Return a call that shows whether a router may run scripts on the keys of `group`.

    It has no effect: there is no such script.
    """
    return ("EVALSHA", "0" * 40, 1, group.leases)


def connect(url: str, timeout_s: float, retries: int = 1) -> Redis:
    """Return a client for the keys of nodes (TAG). `url` has passed `check_redis_url`.

    Its calls fail after `timeout_s`. A call over a broken connection is repeated `retries` times
    over a new one. A cancelled call ends at once.
    """
    return _clients(url, (TAG,), timeout_s, retries)[0]


def connect_groups(url: str, timeout_s: float, retries: int = 1) -> Sequence[Redis]:
    """Return one such client for each of the key groups of this kind of Redis, in their order."""
    groups = key_groups(parse_redis_url(url).kind)
    return _clients(url, [group.tag for group in groups], timeout_s, retries)


def _clients(url: str, tags: Sequence[str], timeout_s: float, retries: int) -> list[Redis]:
    """Return a client for the keys of each of the hash tags."""
    address = parse_redis_url(url)
    common: dict[str, Any] = {
        "socket_timeout": timeout_s,
        "socket_connect_timeout": timeout_s,
        "retry": Retry(NoBackoff(), retries),
    }
    if address.kind is RedisKind.SINGLE:
        return [heed_cancellation(Redis.from_url(url, **common)) for _ in tags]
    kind = _FollowingTcp if address.tls is None else _FollowingTls
    login = with_file_password(address.login)
    options = {**login, **(address.tls or {}), "db": address.database}
    return [
        Redis.from_pool(ConnectionPool(kind, primary=primary, **options, **common))
        for primary in _primaries(address, tags, timeout_s)
    ]


def _primaries(address: RedisAddress, tags: Sequence[str], timeout_s: float) -> list[Primary]:
    sentinel = address.kind is RedisKind.SENTINEL
    login = address.sentinel_login if sentinel else with_file_password(address.login)

    def dial(place: Place) -> Redis:
        limits = {"socket_timeout": timeout_s, "socket_connect_timeout": timeout_s}
        tls: dict[str, Any] = {} if address.tls is None else {"ssl": True, **address.tls}
        once = Retry(NoBackoff(), 0)
        client = Redis(host=place[0], port=place[1], retry=once, **limits, **login, **tls)
        return heed_cancellation(client)

    if sentinel:
        return [SentinelPrimary(address.hosts, address.service, dial) for _ in tags]
    cluster = ClusterMap(address.hosts, dial)
    return [SlotPrimary(cluster, slot_of(tag)) for tag in tags]


async def check_redis(url: str, timeout_s: float, call: Call) -> None:
    """Make one call for the keys of nodes. Raise ConfigError for an error that waiting does not
    mend.

    The error's text is one line without the password. A server that is away, slow, full or busy
    raises nothing, because it may be back soon.
    """
    await _check(url, timeout_s, TAG, call)


async def check_router_redis(url: str, timeout_s: float) -> None:
    """Do what `check_redis` does, by a script for the keys of requests."""
    group = key_groups(parse_redis_url(url).kind)[0]
    await _check(url, timeout_s, group.tag, router_call(group))


async def _check(url: str, timeout_s: float, tag: str, call: Call) -> None:
    try:
        [client] = _clients(url, [tag], timeout_s, 0)
        try:
            async with asyncio.timeout(timeout_s):
                await client.execute_command(*call)
        finally:
            await client.aclose()
    except (RedisError, OSError, TimeoutError, TypeError, ValueError) as error:
        reason = _permanent(error, encrypted=url.startswith("rediss"))
        if reason is not None:
            text = f"{FLAG} {without_password(url)}: {' '.join(reason.split())}"
            raise ConfigError(text, field="redis_url") from error


def _permanent(error: BaseException, *, encrypted: bool) -> str | None:
    """Return why trying again would not help; None if it may help."""
    for cause in _causes(error):
        match cause:
            case MovedError():
                place = f"{cause.host}:{cause.port}"
                return f"it is a cluster, for redis+cluster://; {place} has Baton's keys"
            case AuthenticationError() | NoPermissionError() | InvalidResponse() | WrongRedis():
                return str(cause)
            case ResponseError() if "DB index" in str(cause) or "SELECT" in str(cause):
                return str(cause)
            case ResponseError() if "unknown command" in str(cause):  # a Sentinel's answer
                return f"it is no Redis that keeps keys: {cause}"
            case ssl.SSLError() if not isinstance(cause, _BROKEN_OFF):
                return f"TLS: {cause}"
            case FileNotFoundError() if encrypted:
                return f"TLS: {cause}"
            case TypeError() | ValueError():  # options of the URL
                return str(cause)
            case _:
                pass
    return None


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and its causes; redis-py gives some causes only as the error's context."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


async def _heeding(connection: AbstractConnection, sending: Coroutine[Any, Any, None]) -> None:
    """Await `sending`; raise CancelledError if the task was cancelled meanwhile."""
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
    def _connection_arguments(self) -> Mapping[str, Any]:
        self.ssl_context.context = None  # certificates that were replaced hold from now on
        return super()._connection_arguments()

    async def send_packed_command(self, command: Packed, check_health: bool = True) -> None:
        await _heeding(self, super().send_packed_command(command, check_health))


class _Unix(UnixDomainSocketConnection):
    async def send_packed_command(self, command: Packed, check_health: bool = True) -> None:
        await _heeding(self, super().send_packed_command(command, check_health))


class Following:
    """A connection that asks for the primary whenever it connects; combined with a kind of
    redis-py's connections."""

    host: str
    port: int

    def __init__(self, *, primary: Primary, **options: Any) -> None:
        self.primary = primary
        super().__init__(**options)

    async def _connect(self) -> None:
        self.host, self.port = await self.primary.place()
        try:
            await super()._connect()  # pyright: ignore  # of the connection that this is mixed into
        except BaseException:
            self.primary.doubt()
            raise

    async def read_response(self, *args: Any, **options: Any) -> Any:
        connection: Any = super()
        try:
            return await connection.read_response(*args, **options)
        except (MovedError, ReadOnlyError) as error:
            self.primary.doubt()
            closing: Any = self
            await closing.disconnect(nowait=True)
            raise RedisConnectionError(f"{self.host}:{self.port} answers: {error}") from error


class _FollowingTcp(Following, _Tcp):
    pass


class _FollowingTls(Following, _Tls):
    pass


_HEEDING: Final[dict[type, type]] = {
    Connection: _Tcp, SSLConnection: _Tls, UnixDomainSocketConnection: _Unix,
}  # fmt: skip


def heed_cancellation(client: Redis) -> Redis:
    """Return `client`, changed so that a cancelled call ends. It must not have connected yet.

    The URL's option `password_file` holds then, too. Raises ConfigError for one that cannot be
    read.
    """
    pool = client.connection_pool
    pool.connection_class = _HEEDING[pool.connection_class]
    pool.connection_kwargs = with_file_password(pool.connection_kwargs)
    return client


class FilePassword(CredentialProvider):
    """A user's password in a file, which may be replaced. If it cannot be read, the last one holds.

    Inheritance is redis-py's way to ask for it.
    """

    def __init__(self, file: Path, username: str | None) -> None:
        """Raises ConfigError if the file cannot be read."""
        self._file = file
        self._username = username
        try:
            self._password = file.read_text().strip()
        except OSError as error:
            text = f"{FLAG}: {PASSWORD_FILE} {file}: {error.strerror}"
            raise ConfigError(text, field="redis_url") from error

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        try:
            self._password = self._file.read_text().strip()
        except OSError as error:
            log.error("the last password of Redis stays in use: %s", error)
        if self._username is None:
            return (self._password,)
        return self._username, self._password

    async def get_credentials_async(self) -> tuple[str] | tuple[str, str]:
        return self.get_credentials()


def with_file_password(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options of a connection as redis-py takes them: each new connection reads the password
    in the file that `password_file` names, if there is one. Raises ConfigError for one that cannot
    be read."""
    taken = dict(options)
    file = taken.pop(PASSWORD_FILE, None)
    if file is not None:
        username = taken.pop("username", None)
        taken["credential_provider"] = FilePassword(Path(file), username)
    return taken
