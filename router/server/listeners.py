"""The sockets that a router serves HTTP on (TCP ports, or a Unix socket, --uds), and the server.

The router tells its clients long before that it stops (exchanges.py), but some have just connected:
the kernel has accepted them, and nobody has read what they ask. uvicorn closes them. HttpServer
first takes what waits in the listeners, closes these, and gives each new one a moment to ask.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Final, cast

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from baton.protocol.errors import ConfigError
from router.config import RouterConfig

ACCEPT_S: Final = 0.05  # event loops accept and read at least once meanwhile
FIRST_REQUEST_S: Final = 1.0  # from the end of listening to a request's head
_STEP_S: Final = 0.02


def listen(config: RouterConfig) -> socket.socket:
    """Return the listening socket of the public HTTP API.

    Raises ConfigError if it cannot be bound."""
    if config.uds is None:
        return bind(config, config.port, shared=config.reuse_port)
    listener = socket.socket(socket.AF_UNIX)
    try:
        if Path(config.uds).is_socket():
            _remove_dead(config.uds)
        listener.bind(config.uds)
        listener.listen()
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot bind {config.uds}: {error}", field="uds") from error
    return listener


def release(config: RouterConfig) -> None:
    """Remove the file of the Unix socket, if there is one. Calling it twice is safe."""
    if config.uds is not None:
        Path(config.uds).unlink(missing_ok=True)


def _remove_dead(path: str) -> None:
    """Remove the socket file of a router that has ended. Raises OSError if somebody listens."""
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            Path(path).unlink()
        else:
            raise OSError("somebody listens there")


def bind(config: RouterConfig, port: int, *, shared: bool = False) -> socket.socket:
    """Return a socket that listens on `port`. `shared`: other processes may listen there as well.

    Raises ConfigError if the port cannot be bound."""
    try:
        found = socket.getaddrinfo(
            config.host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, _, _, _, address = found[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(address)
        # Two sockets with SO_REUSEADDR may bind the same port; the second fails at listen().
        listener.listen()
    except OSError as error:
        raise ConfigError(f"cannot bind {config.host}:{port}: {error}", field="port") from error
    return listener


def join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class HttpServer(uvicorn.Server):
    """`began` is set when it serves. It sleeps until `should_exit` is set; uvicorn's own loop would
    look ten times a second. uvicorn offers only inheritance to change this."""

    def __init__(self, config: uvicorn.Config) -> None:
        self.began = asyncio.Event()
        self.date_s = 1.0  # between two looks at the clock, for the header Date
        self._leaving = asyncio.Event()
        super().__init__(config)

    @property
    def should_exit(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether the server must end; to be set on the event loop."""
        return self._leaving.is_set()

    @should_exit.setter
    def should_exit(self, value: bool) -> None:
        if value:
            self._leaving.set()
        else:
            self._leaving.clear()

    async def main_loop(self) -> None:
        """Keep the header Date right until the server must end."""
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.date_s):
                    await self._leaving.wait()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """The process has its own signal handlers."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.began.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop listening, answer whatever has been asked, end."""
        for _ in range(5):  # a loop that is late looks at its timers before its sockets
            await asyncio.sleep(ACCEPT_S / 5)
        for server in self.servers:
            server.close()
        left_s = FIRST_REQUEST_S
        while self._asked_nothing() and left_s > 0 and not self.force_exit:
            await asyncio.sleep(_STEP_S)
            left_s -= _STEP_S
        await super().shutdown(sockets)

    def _asked_nothing(self) -> bool:
        """Whether a connection is so new that no request has come on it."""
        # uvicorn sets `cycle` with the first request's head.
        connections = cast("set[HttpToolsProtocol]", self.server_state.connections)
        return any(cast("object", connection.cycle) is None for connection in connections)
