"""The accepting half of the `stream` lane: one thread accepts; each connection has a thread of its
own.

Life of a connection: accepted -> (TLS handshake) -> `serve` runs on its thread -> closed by either
side. At the limit, the connection that has been silent longest is closed to make room, if it has
been silent for a second (an idle one of a pool, or a peer that never sent anything). Otherwise the
new connection gets a refusal and is closed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import selectors
import socket
import ssl
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeAlias

from baton.protocol.clock import SystemClock
from baton.protocol.errors import KVCorrupt, KVError
from baton.runtime.timing import Timing
from kv_transfer.lanes.closing import Closing
from kv_transfer.lanes.framed_socket import FramedSocket
from kv_transfer.lanes.records import HangupWatch
from kv_transfer.protocol.bodies import encode_body
from kv_transfer.protocol.frames import HEADER_BYTES, MAX_PAYLOAD, Buffer, Header, Kind, encode
from kv_transfer.protocol.messages import Failure, FailureCode

log = logging.getLogger(__name__)

MAX_CONNECTIONS: Final = 256
MAX_INCOMING: Final = 64 << 10  # payload of a frame from a fetcher: control messages only
SILENT_S: Final = 1.0  # a connection that is silent for so long may be closed to make room
LINGER_S: Final = 1.0  # how long a refused peer may take to read the reason
MAX_LINGERING: Final = 64


@dataclass(frozen=True, slots=True)
class Listener:
    """A bound socket, and the TLS context of the connections that it accepts (None: no TLS)."""

    socket: socket.socket
    tls: ssl.SSLContext | None = None


class Served:
    """Implements base.Incoming over an accepted connection."""

    def __init__(self, connection: FramedSocket) -> None:
        self.connection = connection
        # set while its thread waits for the peer's next frame
        self.silent_since: float | None = None
        self._clock = SystemClock()
        self._closing = Closing()
        self._buffer: memoryview | None = None

    @property
    def buffer(self) -> memoryview:
        """Memory to build big frames in (frames.encode_into); each is sent before the next is
        built.
        """
        if self._buffer is None:
            self._buffer = memoryview(bytearray(HEADER_BYTES + MAX_PAYLOAD))
        return self._buffer

    def receive(self, timeout_s: float) -> bytes | None:
        """Return the next frame, or None if the peer has left. Raises KVCorrupt for bytes that are
        no frame.
        """
        self.silent_since = self._clock.monotonic()
        try:
            frame = self.connection.receive(timeout_s)
        except KVCorrupt:
            raise
        except KVError as error:
            log.debug("a fetcher left in mid-conversation: %s", error)
            return None
        finally:
            self.silent_since = None
        return frame

    def on_closed(self, callback: Callable[[], None]) -> None:
        self._closing.on_closed(callback)

    def hang_up(self) -> None:
        """Note that the peer is gone or has sent everything. Any thread, idempotent."""
        self._closing.notify()

    def break_(self) -> None:
        """End the connection. Any thread, idempotent."""
        self.connection.break_()
        self.hang_up()


Conversation: TypeAlias = Callable[[Served], Iterator[Buffer]]


class StreamServer:
    """Accepts on `listeners` from its construction until `stop`, which closes them."""

    def __init__(
        self,
        listeners: Sequence[Listener],
        converse: Conversation,
        timing: Timing,
        max_connections: int = MAX_CONNECTIONS,
    ) -> None:
        self._converse = converse
        self._timing = timing
        self._max_connections = max_connections
        self._clock = SystemClock()
        self._lock = threading.Lock()
        self._stopped = False
        self._active: set[Served] = set()
        self._threads: set[threading.Thread] = set()
        self._lingering: deque[tuple[float, socket.socket]] = deque()
        self._spare: int | None = _spare()
        self._watch = HangupWatch()
        self._wake, self._woken = socket.socketpair()
        self._listeners = listeners
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._woken, selectors.EVENT_READ)
        for listener in listeners:
            listener.socket.setblocking(False)
            self._selector.register(listener.socket, selectors.EVENT_READ, listener)
        self._accepting = threading.Thread(target=self._accept_all, name="kv-accept", daemon=True)
        self._accepting.start()

    @property
    def num_connections(self) -> int:
        """The number of connections being served now. Any thread."""
        return len(self._active)

    def stop(self) -> None:
        """Break every connection; end all threads and close all descriptors. Idempotent."""
        with self._lock:
            if self._stopped:
                return
            self._stopped = True
        self._wake.close()
        self._accepting.join()
        with self._lock:
            active, threads = set(self._active), set(self._threads)
        for served in active:
            served.break_()
        for thread in threads:
            thread.join()
        self._watch.stop()
        if self._spare is not None:
            os.close(self._spare)

    # ---- the accepting thread ------------------------------------------------------------------
    def _accept_all(self) -> None:
        while not self._stopped:
            for key, _ in self._selector.select(self._close_lingering()):
                if isinstance(key.data, Listener):
                    self._accept(key.data)
        self._selector.close()
        for listener in self._listeners:
            listener.socket.close()
        for _, connection in self._lingering:
            connection.close()
        self._woken.close()

    def _accept(self, listener: Listener) -> None:
        try:
            connection, _ = listener.socket.accept()
        except BlockingIOError:
            return  # the peer has left already
        except OSError as error:
            log.warning("cannot accept a KV connection: %s", error)
            self._drop_one(listener.socket)
            return
        with self._lock:
            room = len(self._active) < self._max_connections
        if not room and not self._make_room():
            self._refuse(connection, listener.tls is not None)
            return
        try:
            connection.setblocking(True)
            served = Served(FramedSocket(connection, MAX_INCOMING))
        except OSError as error:  # the peer has reset the connection already
            log.debug("a KV connection was gone at once: %s", error)
            connection.close()
            return
        work = partial(self._run, served, listener.tls)
        thread = threading.Thread(target=work, name="kv-stream", daemon=True)
        with self._lock:
            self._active.add(served)
            self._threads.add(thread)
        thread.start()

    def _make_room(self) -> bool:
        """Close the connection that has been silent longest, if for at least SILENT_S; return
        whether it did.
        """
        with self._lock:
            silent = [
                (since, id(served), served)
                for served in self._active
                if (since := served.silent_since) is not None
            ]
            since, _, served = min(silent, default=(0.0, 0, None))
            if served is None or self._clock.monotonic() - since < SILENT_S:
                return False
            self._active.discard(served)
        log.debug("at %d KV connections: a silent one makes room", self._max_connections)
        served.break_()
        return True

    def _refuse(self, connection: socket.socket, tls: bool) -> None:
        """Send the reason, if that needs no waiting, and give the peer time to read it."""
        log.warning("more than %d KV connections: one refused", self._max_connections)
        failure = Failure(FailureCode.LOST, f"{self._max_connections} connections already")
        with contextlib.suppress(OSError):
            if not tls:
                connection.setblocking(False)
                connection.send(encode(Header(Kind.ERR), [encode_body(failure)], 0))
            connection.shutdown(socket.SHUT_WR)
        self._lingering.append((self._clock.monotonic() + LINGER_S, connection))

    def _close_lingering(self) -> float | None:
        """Close refused connections whose time is over. Return the seconds until the next one's;
        None: no other.
        """
        now = self._clock.monotonic()
        while self._lingering and (
            self._lingering[0][0] <= now or len(self._lingering) > MAX_LINGERING
        ):
            self._lingering.popleft()[1].close()
        return self._lingering[0][0] - now if self._lingering else None

    def _drop_one(self, listener: socket.socket) -> None:
        """Out of descriptors: use the spare one to accept and close a connection, instead of
        spinning.
        """
        if self._spare is None:
            waiting = select.poll()
            waiting.register(self._woken, select.POLLIN)
            # another process took the spare descriptor: wait a little
            waiting.poll(LINGER_S * 1000)
        else:
            os.close(self._spare)
            with contextlib.suppress(OSError):
                listener.accept()[0].close()
        self._spare = _spare()

    # ---- a connection's thread -----------------------------------------------------------------
    def _run(self, served: Served, tls: ssl.SSLContext | None) -> None:
        connection = served.connection
        try:
            if tls is not None:
                connection.encrypt(tls, server_side=True)
                connection.handshake(self._timing.connect_s)
            self._watch.add(connection.raw, served.hang_up)
            for frames in self._converse(served):
                connection.send(frames, self._timing.kv_progress_s)
        except KVError as error:
            log.debug("a KV connection ended: %s", error)
        finally:
            self._watch.remove(connection.raw)
            served.hang_up()
            connection.part(LINGER_S)
            connection.close()
            with self._lock:
                self._active.discard(served)
                self._threads.discard(threading.current_thread())


def _spare() -> int | None:
    """Open a spare descriptor for the time when all others are in use; None if none is left."""
    try:
        return os.open(os.devnull, os.O_RDONLY)
    except OSError:
        return None
