"""Where a router listens: HTTP ports, or a Unix socket instead of one."""

from __future__ import annotations

import socket
from pathlib import Path

from baton.protocol.errors import ConfigError
from router.config import RouterConfig


def listen(config: RouterConfig) -> socket.socket:
    """Where HTTP is served. Raises ConfigError."""
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
    """Remove the Unix socket, if there is one. Twice is safe."""
    if config.uds is not None:
        Path(config.uds).unlink(missing_ok=True)


def _remove_dead(path: str) -> None:
    """A socket that a router left behind. Raises OSError if somebody listens."""
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            Path(path).unlink()
        else:
            raise OSError("somebody listens there")


def bind(config: RouterConfig, port: int, *, shared: bool = False) -> socket.socket:
    """A listening HTTP socket; `shared`: other processes may listen there, too. Raises
    ConfigError."""
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
        listener.listen()  # two may bind the same port; the second to listen is refused, here
    except OSError as error:
        raise ConfigError(f"cannot bind {config.host}:{port}: {error}", field="port") from error
    return listener


def join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
