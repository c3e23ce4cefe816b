"""Addresses and TCP ports of this machine."""

from __future__ import annotations

import errno
import socket

from baton.protocol.errors import ConfigError


def port_of(address: str) -> int:
    """Return the port of HOST:PORT."""
    return int(address.rpartition(":")[2])


def reachable(host: str) -> str:
    """Return the address by which this machine reaches a server that listens on `host`."""
    if host in ("", "0.0.0.0"):
        return "127.0.0.1"
    if host == "::":
        return "[::1]"
    return f"[{host}]" if ":" in host else host


def usable_port(host: str, given: int | None, default: int, flag: str) -> int:
    port = default if given is None else given
    try:
        bound_socket(host, port).close()
    except OSError as error:
        if error.errno not in (errno.EADDRINUSE, errno.EACCES):
            text = f"--host {host} is no address of this machine ({error.strerror})"
            raise ConfigError(text, field="host") from error
        if given is None:
            return 0
        text = f"port {port} on {host} cannot be used ({error.strerror}); try another --{flag}"
        raise ConfigError(text, field=flag.replace("-", "_")) from error
    return port


def bound_socket(host: str, port: int) -> socket.socket:
    """Return a TCP socket bound to the address, not listening. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        # As servers do: with it, connections in TIME_WAIT do not make a port busy.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
    except BaseException:
        bound.close()
        raise
    return bound


def can_bind(host: str, port: int) -> bool:
    """Return whether a server can have the port now."""
    try:
        bound_socket(host, port).close()
    except OSError:
        return False
    return True
