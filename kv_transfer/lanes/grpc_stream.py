"""The `grpc` lane: parcels as raw bytes through identity serializers, one connection per call.

Synchronous gRPC on threads of its own: KV bytes never pass an event loop that serves requests. One
channel per peer address is kept. A channel that has failed is dropped, so that a peer that comes
back is found without waiting for gRPC's backoff. Messages of 1 MiB measured fastest (1.2 GB/s).

Service baton.kv.v1.KVTransfer, method Transfer (protos/kv.proto).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, Final

import grpc

from baton.protocol.clock import SystemClock
from baton.protocol.errors import ConfigError, KVError, KVLost, KVTimeout
from baton.protocol.handles import LaneAddress
from baton.runtime.timing import Timing, channel_options, server_options
from baton.runtime.tls import TlsFiles
from kv_transfer.lanes.deadlines import Deadlines
from kv_transfer.protocol.base import Serve, Wire
from kv_transfer.protocol.frames import Buffer

log = logging.getLogger(__name__)

SERVICE: Final = "baton.kv.v1.KVTransfer"
METHOD: Final = "Transfer"
TLS: Final = "tls"  # attribute of an address: present if it wants TLS
# A connection holds a thread while it waits for a prefill; idle threads cost only address space.
MAX_CONNECTIONS: Final = 256
STOP_GRACE_S: Final = 5.0


class GrpcLane:
    """Implements base.Lane over gRPC. `port` 0 takes a free one; `advertise_host` is the host that
    peers get.
    """

    name = "grpc"
    direct = False

    def __init__(
        self,
        timing: Timing,
        host: str = "127.0.0.1",
        port: int = 0,
        advertise_host: str = "",
        tls: TlsFiles | None = None,
    ) -> None:
        """Raises ConfigError for TLS files that cannot be used."""
        self._timing = timing
        self._host = host
        self._port = port
        self._advertise_host = advertise_host or host
        self._server: grpc.Server | None = None
        self._threads: ThreadPoolExecutor | None = None
        self._deadlines: Deadlines | None = None
        self._tls = tls is not None
        self._server_credentials = tls.server_credentials() if tls else None
        self._channels = _Channels(timing, tls.channel_credentials() if tls else None)

    def start(self, boot_id: str, serve: Serve) -> LaneAddress:
        """Start the server; return its address. Raises ConfigError if the port cannot be bound."""
        self._threads = ThreadPoolExecutor(MAX_CONNECTIONS, thread_name_prefix="kv-grpc")
        deadlines = self._deadlines = Deadlines(SystemClock())
        server = grpc.server(self._threads, options=server_options(self._timing))

        def transfer(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[Buffer]:
            try:
                yield from serve(self.name, _GrpcIncoming(requests, context, deadlines))
            except GeneratorExit:
                # The fetcher has left, or gRPC could not send: then cancel, so that a live fetcher
                # does not wait.
                context.cancel()
                raise

        handler = grpc.stream_stream_rpc_method_handler(
            transfer
        )  # no serializers: bytes stay bytes
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler}),)
        )
        bind = _join(self._host, self._port)
        try:
            if self._server_credentials is not None:
                port = server.add_secure_port(bind, self._server_credentials)
            else:
                port = server.add_insecure_port(bind)
        except RuntimeError as error:
            raise ConfigError(f"cannot bind the KV port {bind}: {error}") from error
        server.start()
        self._server = server
        attributes = ((TLS, ""),) if self._tls else ()
        return LaneAddress(self.name, _join(self._advertise_host, port), attributes)

    def reaches(self, address: LaneAddress) -> bool:
        """Whether both sides want TLS, or neither does."""
        return (TLS in dict(address.attributes)) == self._tls

    def open(self, address: LaneAddress) -> Wire:
        return self._channels.open(address.address)

    def stop(self) -> None:
        if self._server is not None:
            self._server.stop(grace=0).wait(STOP_GRACE_S)
            self._server = None
        if self._threads is not None:
            self._threads.shutdown()
            self._threads = None
        if self._deadlines is not None:
            self._deadlines.stop()
        self._channels.close()


def _join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class _GrpcIncoming:
    """Implements base.Incoming over the server side of a call."""

    buffer = None  # gRPC wants bytes

    def __init__(
        self, requests: Iterator[bytes], context: grpc.ServicerContext, deadlines: Deadlines
    ) -> None:
        self._requests = requests
        self._context = context
        self._deadlines = deadlines

    def receive(self, timeout_s: float) -> bytes | None:
        try:
            with self._deadlines.guard(timeout_s, self._context.cancel):
                return next(self._requests, None)
        except Exception as error:  # noqa: BLE001 - gRPC's bare one for a cancelled call
            log.debug("a fetcher left in mid-conversation: %s", error)
            return None

    def on_closed(self, callback: Callable[[], None]) -> None:
        if not self._context.add_callback(callback):
            callback()


@dataclass(slots=True, eq=False)
class _Channel:
    """A channel and the calls that use it. One that failed, or has old credentials, is closed after
    its last call.
    """

    credentials: grpc.ChannelCredentials | None
    channel: grpc.Channel
    transfer: Callable[..., Any]
    calls: set[Any] = field(default_factory=set[Any])


class _Channels:
    def __init__(
        self, timing: Timing, credentials: Callable[[], grpc.ChannelCredentials] | None
    ) -> None:
        self._timing = timing
        self._credentials = credentials
        self._lock = threading.Lock()
        self._by_address: dict[str, _Channel] = {}
        self._retired: list[_Channel] = []

    def open(self, address: str) -> GrpcWire:
        self._close_retired()
        outbox: SimpleQueue[bytes | None] = SimpleQueue()
        credentials = None if self._credentials is None else self._credentials()
        with self._lock:
            entry = self._by_address.get(address)
            if entry is not None and entry.credentials is not credentials:
                self._retired.append(entry)
                entry = None
            if entry is None:
                entry = self._by_address[address] = self._connect(address, credentials)
            # The call itself has no deadline: a kept connection lives as long as it is used, and
            # whoever waits for bytes has a deadline of its own.
            # waits for it has one.
            call = entry.transfer(iter(outbox.get, None))
            # Keeps the call alive until its last frame is out: a collected call is a cancelled one.
            entry.calls.add(call)
        call.add_done_callback(lambda done: self._ended(address, entry, done, outbox))
        return GrpcWire(call, outbox)

    def close(self) -> None:
        """Close all channels, which breaks their calls. Idempotent."""
        with self._lock:
            entries = [*self._by_address.values(), *self._retired]
            self._by_address.clear()
            self._retired.clear()
        for entry in entries:
            entry.channel.close()

    def _connect(self, address: str, credentials: grpc.ChannelCredentials | None) -> _Channel:
        options: list[tuple[str, int]] = [
            *channel_options(self._timing),
            ("grpc.use_local_subchannel_pool", 1),  # a new channel starts without old backoff
        ]
        if credentials is not None:
            channel = grpc.secure_channel(address, credentials, options)
        else:
            channel = grpc.insecure_channel(address, options)
        transfer = channel.stream_stream(f"/{SERVICE}/{METHOD}")
        return _Channel(credentials, channel, transfer)

    def _ended(
        self, address: str, entry: _Channel, call: Any, outbox: SimpleQueue[bytes | None]
    ) -> None:
        outbox.put(None)  # ends the thread that gRPC lets wait for our next frame
        with self._lock:
            entry.calls.discard(call)
            if call.code() is grpc.StatusCode.UNAVAILABLE and (
                self._by_address.get(address) is entry
            ):
                del self._by_address[address]
                self._retired.append(entry)

    def _close_retired(self) -> None:
        """Close failed channels without calls. Not done in `_ended`: gRPC's own thread runs that,
        and it must not close its channel.
        """
        with self._lock:
            idle = [entry for entry in self._retired if not entry.calls]
            self._retired = [entry for entry in self._retired if entry.calls]
        for entry in idle:
            entry.channel.close()


class GrpcWire:
    """Implements base.Wire over the client side of a call."""

    def __init__(self, call: Any, outbox: SimpleQueue[bytes | None]) -> None:
        self._call = call
        self._outbox = outbox

    def send(self, parcel: bytes) -> None:
        self._outbox.put(parcel)

    def receive(self) -> bytes | None:
        try:
            return next(self._call, None)
        except grpc.RpcError as error:
            raise _lost(error) from error

    def finish(self) -> None:
        self._outbox.put(None)

    def cancel(self) -> None:
        self._call.cancel()
        self._outbox.put(None)


def _lost(error: Any) -> KVError:
    """Return the KVError that a gRPC status means for a transfer."""
    text = f"{error.code().name}: {error.details()}"
    return KVTimeout(text) if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED else KVLost(text)
