"""The baselines of the lanes: a bare socket and a bare gRPC stream of raw bytes.

They have no frames, digests, leases or sessions. The bytes go from the memory of one process to
their place in the memory of another, by the plainest code that each medium allows. Both ends are in
this module.
"""

from __future__ import annotations

import socket
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import grpc

from baton.runtime.timing import Timing, channel_options, server_options

KINDS: Final = ("raw tcp", "raw unix", "bare grpc")
CHUNK: Final = 1 << 20
METHOD: Final = "/bench.Raw/Read"


def pieces(memory: memoryview) -> Iterator[memoryview]:
    """Yield slices of at most CHUNK bytes."""
    for start in range(0, len(memory), CHUNK):
        yield memory[start : start + CHUNK]


class RawServer:
    """Sends `memory` to every client, in three ways."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self._folder = tempfile.TemporaryDirectory(prefix="baton-bench-")
        self._sockets = {
            "raw tcp": socket.create_server(("127.0.0.1", 0)),
            "raw unix": _unix_server(Path(self._folder.name) / "raw"),
        }
        self._threads = [
            threading.Thread(target=self._accept, args=(listener,), name=f"bench-{kind}")
            for kind, listener in self._sockets.items()
        ]
        for thread in self._threads:
            thread.start()
        self._grpc = grpc.server(ThreadPoolExecutor(2), options=server_options(Timing()))
        service, _, name = METHOD[1:].partition("/")
        handler = grpc.unary_stream_rpc_method_handler(self._answer)
        self._grpc.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(service, {name: handler}),)
        )
        self._port = self._grpc.add_insecure_port("127.0.0.1:0")
        self._grpc.start()

    @property
    def addresses(self) -> dict[str, str]:
        host, port = self._sockets["raw tcp"].getsockname()
        return {
            "raw tcp": f"{host}:{port}",
            "raw unix": str(self._sockets["raw unix"].getsockname()),
            "bare grpc": f"127.0.0.1:{self._port}",
        }

    def stop(self) -> None:
        self._grpc.stop(grace=0).wait()
        for listener in self._sockets.values():
            listener.shutdown(socket.SHUT_RDWR)  # wakes the thread in accept()
            listener.close()
        for thread in self._threads:
            thread.join()
        self._folder.cleanup()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                connection.recv(1)
                for piece in pieces(self._memory):
                    connection.sendall(piece)

    def _answer(self, request: bytes, context: Any) -> Iterator[bytes]:
        for piece in pieces(self._memory):
            yield bytes(piece)


def _unix_server(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()
    return listener


def read_raw(kind: str, address: str, memory: memoryview) -> None:
    """Fill `memory` from the server; `kind` is one of KINDS."""
    if kind == "bare grpc":
        _read_grpc(address, memory)
        return
    with _connect(kind, address) as connection:
        connection.sendall(b"?")
        for piece in pieces(memory):
            taken = 0
            while taken < len(piece):
                count = connection.recv_into(piece[taken:])
                if count == 0:
                    raise ConnectionError("the raw sender has closed")
                taken += count


def _connect(kind: str, address: str) -> socket.socket:
    if kind == "raw unix":
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(address)
        return connection
    host, _, port = address.rpartition(":")
    connection = socket.create_connection((host, int(port)))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def _read_grpc(address: str, memory: memoryview) -> None:
    with grpc.insecure_channel(address, options=channel_options(Timing())) as channel:
        received = channel.unary_stream(METHOD)(b"?")
        for piece, data in zip(pieces(memory), received, strict=True):
            piece[:] = data
