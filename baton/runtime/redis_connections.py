"""Connections of redis-py for routers and nodes.

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
from collections.abc import Coroutine, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from redis.asyncio import Connection, Redis, SSLConnection, UnixDomainSocketConnection
from redis.asyncio.connection import AbstractConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.credentials import CredentialProvider
from redis.exceptions import (
    AuthenticationError,
    InvalidResponse,
    MovedError,
    NoPermissionError,
    RedisError,
    ResponseError,
)

from baton.protocol.errors import ConfigError
from baton.runtime.redis_keys import LEASES, node_key, without_password

log = logging.getLogger(__name__)
Packed = bytes | str | Iterable[bytes]
Call = tuple[str | int, ...]

# Calls that show whether each process may write, but have no effect: no such key, no such script.
NODE_CALL: Final[Call] = ("SET", node_key("?"), "", "XX")
ROUTER_CALL: Final[Call] = ("EVALSHA", "0" * 40, 1, LEASES)
_BROKEN_OFF: Final = (ssl.SSLEOFError, ssl.SSLZeroReturnError, ssl.SSLSyscallError)


async def check_redis(url: str, timeout_s: float, call: Call) -> None:
    """Make one call. Raise ConfigError for an error that waiting does not mend.

    The error's text is one line without the password. A server that is away, slow, full or busy
    raises nothing, because it may be back soon.
    """
    try:
        client = heed_cancellation(
            Redis.from_url(
                url,
                socket_timeout=timeout_s,
                socket_connect_timeout=timeout_s,
                retry=Retry(NoBackoff(), 0),
            )
        )
        try:
            async with asyncio.timeout(timeout_s):
                await client.execute_command(*call)
        finally:
            await client.aclose()
    except (RedisError, OSError, TimeoutError, TypeError, ValueError) as error:
        reason = _permanent(error, encrypted=url.startswith("rediss:"))
        if reason is not None:
            text = f"redis_url {without_password(url)}: {' '.join(reason.split())}"
            raise ConfigError(text, field="redis_url") from error


def _permanent(error: BaseException, *, encrypted: bool) -> str | None:
    """Return why trying again would not help; None if it may help."""
    for cause in _causes(error):
        match cause:
            case MovedError():
                return f"another shard of its cluster has Baton's keys: {cause.host}:{cause.port}"
            case AuthenticationError() | NoPermissionError() | InvalidResponse():
                return str(cause)
            case ResponseError() if "DB index" in str(cause) or "SELECT" in str(cause):
                return str(cause)
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


_HEEDING: Final[dict[type, type]] = {
    Connection: _Tcp, SSLConnection: _Tls, UnixDomainSocketConnection: _Unix,
}  # fmt: skip


def heed_cancellation(client: Redis) -> Redis:
    """Return `client`, changed so that a cancelled call ends. It must not have connected yet.

    The URL's option `password_file` holds then, too: each new connection reads the password there.
    Raises ConfigError for one that cannot be read.
    """
    pool = client.connection_pool
    pool.connection_class = _HEEDING[pool.connection_class]
    options = pool.connection_kwargs
    if (file := options.pop("password_file", None)) is not None:
        options["credential_provider"] = FilePassword(Path(file), options.pop("username", None))
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
            text = f"redis_url: password_file {file}: {error.strerror}"
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
