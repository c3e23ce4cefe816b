"""The sockets that a router serves HTTP on: TCP ports, or a Unix socket (--uds)."""

from __future__ import annotations

import socket
from pathlib import Path

from baton.protocol.errors import ConfigError
from router.config import RouterConfig


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
