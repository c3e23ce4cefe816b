"""The `dist` lane: frames as tensors over torch.distributed groups of two, NCCL or gloo.

One TCP connection per conversation carries records (records.py): small frames, and the agreement on
a pair (pairs.py). The sides agree on a pair when the first big frame is about to be sent, so only
after the peer has proven that it knows the deployment's secret. A record TENSOR announces a big
frame, which follows as one tensor over the pair. A pair serves one answer: with the fetcher's next
message it is idle again, for any conversation of the two processes. After FINISHED its sender sends
no more.

If either side has no room for another pair, big frames travel in records: slower, never stuck. The
death of a peer shows at once in the connection or in the pair; a peer that hangs causes KVTimeout.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from dataclasses import dataclass
from typing import Final

import torch.distributed as dist

from baton.protocol.errors import ConfigError, KVError
from baton.protocol.handles import LaneAddress
from baton.runtime.timing import Timing
from kv_transfer.lanes.dist_ends import DistIncoming, DistWire, Ends, LostWire
from kv_transfer.lanes.pair_groups import Backend, Groups
from kv_transfer.lanes.pairs import Pairs
from kv_transfer.lanes.records import HangupWatch, RecordSocket
from kv_transfer.protocol.base import Serve, Wire

log = logging.getLogger(__name__)

MAX_CONVERSATIONS: Final = 256


@dataclass(frozen=True, slots=True)
class DistSettings:
    """Settings of the `dist` lane.

    `host`, `port` (0: any free one): where to listen. `advertise_host`: the host that peers get.
    `max_pairs` counts both directions; an NCCL pair takes 50-100 MB of GPU memory. Frames of up to
    `inline_bytes` travel as records: below 64 KiB a socket is faster than a tensor.
    """

    host: str = "127.0.0.1"
    port: int = 0
    advertise_host: str = ""
    backend: Backend = "gloo"
    max_pairs: int = 8
    inline_bytes: int = 64 << 10


class DistLane:
    """Implements base.Lane over pairs."""

    name = "dist"
    direct = False

    def __init__(self, timing: Timing, settings: DistSettings | None = None) -> None:
        self._timing = timing
        self._settings = settings or DistSettings()
        self.pairs = Pairs(self._settings.max_pairs)
        self._lock = threading.Lock()
        self._listener: socket.socket | None = None
        self._accepting: threading.Thread | None = None
        self._ends: Ends | None = None  # None: not started, or stopped
        self._serving: dict[DistIncoming, threading.Thread] = {}
        self._outgoing: set[DistWire] = set()

    def start(self, boot_id: str, serve: Serve) -> LaneAddress:
        """Listen for peers. Raises ConfigError if the port cannot be bound or torch lacks the
        backend.
        """
        if self._settings.backend == "nccl" and not dist.is_nccl_available():
            raise ConfigError("this build of torch has no NCCL", field="kv_lanes")
        host, port = self._settings.host, self._settings.port
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            listener = socket.create_server((host, port), family=family)
        except OSError as error:
            raise ConfigError(f"cannot bind the KV port {_join(host, port)}: {error}") from error
        advertised = self._settings.advertise_host or host
        # gloo binds one address: it cannot bind "all addresses".
        local = advertised if host in ("", "0.0.0.0", "::") else host
        groups = Groups(self._settings.backend, local, self._timing.kv_progress_s)
        ends = Ends(groups, self.pairs, HangupWatch(), self._settings.inline_bytes)
        self._listener, self._ends = listener, ends
        self._accepting = threading.Thread(
            target=self._accept, args=(listener, serve, ends), name="kv-dist", daemon=True
        )
        self._accepting.start()
        return LaneAddress(self.name, _join(advertised, listener.getsockname()[1]))

    def reaches(self, address: LaneAddress) -> bool:
        return True

    def open(self, address: LaneAddress) -> Wire:
        with self._lock:
            ends = self._ends
        if ends is None:
            return LostWire("lane stopped")
        host, _, port = address.address.rpartition(":")
        try:
            where = (host.strip("[]"), int(port))
            connection = socket.create_connection(where, self._timing.connect_s)
        except (OSError, ValueError) as error:
            return LostWire(f"nobody at {address.address}: {error}")
        control = self._records(connection)
        wire = DistWire(control, ends, address.address)
        with self._lock:
            stopped = self._ends is None
            if not stopped:
                self._outgoing.add(wire)
        wire.start(self._forget)
        if stopped:
            wire.cancel()
        return wire

    def stop(self) -> None:
        with self._lock:
            ends, self._ends = self._ends, None
            serving, outgoing = dict(self._serving), list(self._outgoing)
        if ends is None:
            return
        assert self._listener is not None
        assert self._accepting is not None
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes `accept`
        self._accepting.join()
        self._listener.close()
        for incoming in serving:
            incoming.break_()
        for wire in outgoing:
            wire.cancel()
        for thread in serving.values():
            thread.join()
        ends.watch.stop()
        for wire in outgoing:
            wire.hung_up()
        self.pairs.close()
        ends.groups.deadlines.stop()

    def _records(self, connection: socket.socket) -> RecordSocket:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return RecordSocket(connection, self._timing.kv_progress_s)

    def _forget(self, wire: DistWire) -> None:
        with self._lock:
            self._outgoing.discard(wire)

    def _accept(self, listener: socket.socket, serve: Serve, ends: Ends) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            incoming = DistIncoming(self._records(connection), ends)
            thread = threading.Thread(
                target=self._run, args=(incoming, serve), name="kv-dist-serve", daemon=True
            )
            with self._lock:
                welcome = self._ends is not None and len(self._serving) < MAX_CONVERSATIONS
                if welcome:
                    self._serving[incoming] = thread
                    thread.start()
            if not welcome:
                connection.close()

    def _run(self, incoming: DistIncoming, serve: Serve) -> None:
        incoming.start()
        try:
            for frame in serve(self.name, incoming):
                incoming.send(frame)
            incoming.finish()
        except KVError as error:
            log.debug("a fetcher left in mid-conversation: %s", error)
        finally:
            incoming.close(self._timing.connect_s)
            with self._lock:
                self._serving.pop(incoming, None)


def _join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
