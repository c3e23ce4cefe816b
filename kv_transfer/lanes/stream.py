"""The `stream` lane: frames over TCP, Unix sockets and TLS, without a library in between.

It has data-plane threads of its own, blocking sockets and no event loop. A peer on the same host is
reached over a Unix socket in a private directory. The socket's path carries the boot id, so a path
that exists here leads to that very process. TLS (tls.py) guards TCP; the directory guards the Unix
socket. Accepting: stream_server.py. Reading and writing frames: framed_socket.py.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import ssl
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from baton.protocol.errors import ConfigError, KVError, KVLost
from baton.protocol.handles import LaneAddress
from baton.runtime.socket_folder import SocketFolder
from baton.runtime.timing import Timing
from baton.runtime.tls import TlsFiles
from kv_transfer.lanes.framed_socket import FramedSocket
from kv_transfer.lanes.stream_server import MAX_CONNECTIONS, Listener, Served, StreamServer
from kv_transfer.protocol.base import Serve
from kv_transfer.protocol.frames import Buffer

log = logging.getLogger(__name__)

BACKLOG: Final = 128
UNIX: Final = "unix"  # attribute of an address: path of the Unix socket
TLS: Final = "tls"  # attribute of an address: present if TCP runs under TLS
BOOT_ID_CHARS: Final = 16  # of the boot id in the path: 64 random bits
PRIVATE_PREFIX: Final = "baton-kv-"  # of private directories, in the temporary one
MAX_UNIX_PATH: Final = 100  # bytes; the kernel takes 107


@dataclass(frozen=True, slots=True)
class StreamLaneOptions:
    """Where a stream lane listens.

    `port` 0 takes a free one; `advertise_host` is the host that peers get. `unix_dir`: for Unix
    sockets; None = a private directory of this process. At least one of `tcp` and `unix` must be
    true. `tls`: for TCP; both sides must have it, or neither.
    """

    host: str = "127.0.0.1"
    port: int = 0
    advertise_host: str = ""
    tcp: bool = True
    unix: bool = True
    unix_dir: Path | None = None
    tls: TlsFiles | None = None
    max_connections: int = MAX_CONNECTIONS


class StreamLane:
    """Implements base.Lane over sockets; its wires are base.ScatterWire."""

    name = "stream"
    direct = False

    def __init__(self, timing: Timing, options: StreamLaneOptions | None = None) -> None:
        """Raises ConfigError for TLS files that cannot be used."""
        self._timing = timing
        self._options = options or StreamLaneOptions()
        files = self._options.tls
        self._server_tls = files.server_context() if files else None
        self._client_tls = files.client_contexts() if files else None
        self._lock = threading.Lock()
        self._stopped = False
        self._server: StreamServer | None = None
        self._wires: set[StreamWire] = set()
        self._unix_path: Path | None = None
        self._private: SocketFolder | None = None

    def start(self, boot_id: str, serve: Serve) -> LaneAddress:
        """Listen; return the address. Raises ConfigError if an address cannot be bound."""
        listeners: list[Listener] = []
        address, attributes = "", dict[str, str]()
        options = self._options
        try:
            if options.tcp:
                listener = _listen_tcp(options.host, options.port)
                listeners.append(Listener(listener, self._server_tls))
                address = join(options.advertise_host or options.host, listener.getsockname()[1])
                if self._server_tls is not None:
                    attributes[TLS] = "1.3"
            if options.unix:
                listeners.append(Listener(self._listen_unix(boot_id)))
                attributes[UNIX] = str(self._unix_path)
        except ConfigError:
            for listener in listeners:
                listener.socket.close()
            self._remove_unix()
            raise

        def converse(peer: Served) -> Iterator[Buffer]:
            return serve(self.name, peer)

        self._server = StreamServer(listeners, converse, self._timing, options.max_connections)
        return LaneAddress(self.name, address, tuple(sorted(attributes.items())))

    def reaches(self, address: LaneAddress) -> bool:
        """Whether the peer has a Unix socket here, or both sides (or neither) want TLS over TCP."""
        attributes = dict(address.attributes)
        if not address.address or _is_socket(attributes.get(UNIX)):
            return True  # no TCP: a Unix path that is not there may belong to a peer that has died
        return (TLS in attributes) == (self._client_tls is not None)

    def open(self, address: LaneAddress) -> StreamWire:
        tls = None if self._client_tls is None else self._client_tls()
        wire = StreamWire(address, self._timing, tls, self._forget)
        with self._lock:
            stopped = self._stopped
            if not stopped:
                self._wires.add(wire)
        if stopped:
            wire.cancel()
        return wire

    def stop(self) -> None:
        with self._lock:
            self._stopped = True
            wires = set(self._wires)
        if self._server is not None:
            self._server.stop()
        for wire in wires:
            wire.cancel()
        self._remove_unix()

    def _forget(self, wire: StreamWire) -> None:
        with self._lock:
            self._wires.discard(wire)

    def _listen_unix(self, boot_id: str) -> socket.socket:
        directory = self._options.unix_dir
        listener = socket.socket(socket.AF_UNIX)
        try:
            if directory is None:
                self._private = SocketFolder(PRIVATE_PREFIX)
                directory = self._private.path
            else:
                directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            path = directory / f"{boot_id[:BOOT_ID_CHARS]}.sock"
            if len(os.fsencode(path)) > MAX_UNIX_PATH:
                raise OSError(f"the path is longer than {MAX_UNIX_PATH} bytes")
            listener.bind(str(path))
            self._unix_path = path
            path.chmod(0o600)
            listener.listen(BACKLOG)
        except OSError as error:
            listener.close()
            text = f"no Unix socket in {directory}: {error}"
            raise ConfigError(text, field="kv_unix_dir") from error
        return listener

    def _remove_unix(self) -> None:
        if self._unix_path is not None:
            self._unix_path.unlink(missing_ok=True)
            self._unix_path = None
        if self._private is not None:
            self._private.remove()
            self._private = None


class StreamWire:
    """Implements base.ScatterWire over a connection, which opens at the first send or receive."""

    def __init__(
        self,
        address: LaneAddress,
        timing: Timing,
        tls: ssl.SSLContext | None,
        on_ended: Callable[[StreamWire], None],
    ) -> None:
        self._address = address
        self._timing = timing
        self._tls = tls
        self._on_ended = on_ended
        self._lock = threading.Lock()
        self._connection: FramedSocket | None = None
        self._ended: str | None = None  # why nothing may be sent or received any more

    @property
    def at_rest(self) -> bool:
        """Whether the connection is open, as far as is known, and has nothing to read: fit to be
        reused.
        """
        connection = self._connection
        return connection is not None and self._ended is None and connection.at_rest()

    def send(self, parcel: Buffer) -> None:
        """Send a parcel. Raises KVLost, KVTimeout, KVRefused (certificates)."""
        self._spoken_to().send(parcel, self._timing.kv_progress_s)

    def receive(self) -> bytes | None:
        """Return the next frame. Raises KVLost, KVTimeout, KVRefused, KVCorrupt (no frame)."""
        return self._spoken_to().receive(self._timing.kv_progress_s)

    def receive_header(self) -> bytes | None:
        """Return the next frame's header, or None at the end. Raises the errors of `receive`."""
        header = self._spoken_to().receive_header(self._timing.kv_progress_s)
        return None if header is None else bytes(header)

    def receive_into(self, views: Sequence[memoryview]) -> None:
        """Fill `views` with the next bytes. Raises the errors of `receive`."""
        self._spoken_to().receive_into(views, self._timing.kv_progress_s)

    def finish(self) -> None:
        """Close the connection. The last call of the thread that uses this wire. Idempotent."""
        self._end("finished")
        if self._connection is not None:
            self._connection.close()

    def cancel(self) -> None:
        """Break the connection. Any thread, idempotent."""
        self._end("cancelled")
        connection = self._connection
        if connection is not None:
            connection.abandon()

    def _end(self, why: str) -> None:
        with self._lock:
            self._ended = self._ended or why
        self._on_ended(self)

    def _spoken_to(self) -> FramedSocket:
        return self._connection or self._connect()

    # ---- connecting ----------------------------------------------------------------------------
    def _connect(self) -> FramedSocket:
        """Try the places of the address, best first. Raises the error of the last one."""
        last: KVError = KVLost(f"no place to reach at {self._address.address!r}")
        for family, target, tls in self._places():
            try:
                return self._dial(family, target, tls)
            except KVError as error:
                last = error
            if self._ended is not None:
                raise KVLost(self._ended)
        raise last

    def _places(self) -> Iterator[tuple[int, str | tuple[str, int], ssl.SSLContext | None]]:
        unix = dict(self._address.attributes).get(UNIX)
        if unix is not None and _is_socket(unix):
            yield socket.AF_UNIX, unix, None
        host, _, port = self._address.address.rpartition(":")
        if not host or not port.isdecimal():
            return
        try:
            found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
        except OSError as error:
            raise KVLost(f"nobody is called {host}: {error}") from error
        for family, _, _, _, target in found:
            yield family, (str(target[0]), int(target[1])), self._tls

    def _dial(
        self, family: int, target: str | tuple[str, int], tls: ssl.SSLContext | None
    ) -> FramedSocket:
        """Return a connection, after the TLS handshake if any. Raises KVLost, KVTimeout,
        KVRefused.
        """
        connection = FramedSocket(socket.socket(family, socket.SOCK_STREAM))
        self._adopt(connection)
        try:
            connection.connect(target, self._timing.connect_s)
            if tls is not None:
                connection.encrypt(tls)
                connection.handshake(self._timing.connect_s)
        except BaseException:
            self._adopt(None)
            connection.close()
            raise
        return connection

    def _adopt(self, connection: FramedSocket | None) -> None:
        """Set the connection that `cancel` will break. Raises KVLost if `cancel` has been called
        already.
        """
        with self._lock:
            if connection is not None and self._ended is not None:
                connection.close()
                raise KVLost(self._ended)
            self._connection = connection


def join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _listen_tcp(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise ConfigError(f"cannot bind the KV port {join(host, port)}: {error}") from error


def _is_socket(path: str | None) -> bool:
    with contextlib.suppress(OSError, ValueError):
        return path is not None and stat.S_ISSOCK(os.stat(path).st_mode)
    return False
