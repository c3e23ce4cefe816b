"""Tagged records over a connected socket, and a thread that notices peers that have gone.

The `dist` lane sends records beside its tensors: `{length u32, tag u8}` little-endian, then
`length` bytes. What a record means is in dist.py and pairs.py.
"""

from __future__ import annotations

import contextlib
import enum
import select
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from baton.protocol.errors import KVCorrupt, KVLost, KVTimeout
from kv_transfer.protocol.frames import HEADER_BYTES, MAX_PAYLOAD, Buffer

MAX_RECORD: Final = HEADER_BYTES + MAX_PAYLOAD
_HEAD: Final = struct.Struct("<IB")


class Tag(enum.IntEnum):
    FRAME = 0  # a frame, in the record itself
    TENSOR = 1  # u32: a frame of so many bytes follows over the pair
    WANTED = 2  # exporter: I have a big frame, which pair do we use?
    OFFER = 3  # fetcher: the id of an idle pair or of one to build; empty: no room
    USE = 4  # exporter: u8, a pairs.Use
    STORE = 5  # rendezvous of a new pair: u16 length of the key, key, value
    FINISHED = 6  # the sender sends no more


_TAGS: Final = {int(tag): tag for tag in Tag}


@dataclass(frozen=True, slots=True)
class Record:
    tag: Tag
    body: bytearray


class RecordSocket:
    """Sends and receives records; owns a connected stream socket (TCP: with TCP_NODELAY).

    One thread sends and receives; any thread may `break_`.
    """

    def __init__(self, connection: socket.socket, send_timeout_s: float) -> None:
        self.socket = connection
        self._send_timeout_s = send_timeout_s

    def send(self, tag: Tag, body: Buffer = b"") -> None:
        """Send a record. Raises KVLost; KVTimeout if the peer takes no bytes for too long."""
        try:
            self.socket.settimeout(self._send_timeout_s)
            self.socket.sendall(_HEAD.pack(len(body), tag))
            if len(body):
                self.socket.sendall(body)
        except TimeoutError as error:
            raise KVTimeout("the peer takes no more records") from error
        except OSError as error:
            raise KVLost(f"connection lost: {error}") from error

    def receive(self, timeout_s: float | None = None) -> Record:
        """Return the next record.

        Raises KVLost at the end of the connection, KVTimeout if a wait for bytes takes longer than
        `timeout_s`, and KVCorrupt for bytes that are no record.
        """
        try:
            self.socket.settimeout(timeout_s)
            length, number = _HEAD.unpack(self._exactly(_HEAD.size))
            if number not in _TAGS or length > MAX_RECORD:
                raise KVCorrupt(f"no record: tag {number}, {length} bytes")
            return Record(_TAGS[number], self._exactly(length))
        except TimeoutError as error:
            raise KVTimeout(f"no record for {timeout_s} s") from error
        except OSError as error:
            raise KVLost(f"connection lost: {error}") from error

    def readable(self) -> bool:
        """Whether bytes of a record are there, so that `receive` begins without waiting."""
        poll = select.poll()
        poll.register(self.socket, select.POLLIN)
        return bool(poll.poll(0))

    def _exactly(self, length: int) -> bytearray:
        data = bytearray(length)
        view = memoryview(data)
        while view.nbytes:
            received = self.socket.recv_into(view)
            if received == 0:
                raise KVLost("the peer closed the connection")
            view = view[received:]
        return data

    def break_(self) -> None:
        """End both directions now, for both peers; a blocked call raises KVLost. Any thread."""
        with contextlib.suppress(OSError):  # the peer was faster
            self.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket. Call it only when no other thread may still use it."""
        self.socket.close()


class HangupWatch:
    """Calls back, once, when the peer of a watched socket is gone. One thread, asleep until then.

    It is needed because a thread that waits for a tensor, or for a prefill, reads no socket.
    """

    def __init__(self) -> None:
        # Held during a callback: once `remove` has returned, no callback runs any more.
        self._lock = threading.RLock()
        self._callbacks: dict[int, Callable[[], None]] = {}  # by file descriptor
        self._epoll = select.epoll()
        self._wake, self._woken = socket.socketpair()
        self._epoll.register(self._woken.fileno(), select.EPOLLRDHUP)
        self._thread = threading.Thread(target=self._run, name="kv-hangup", daemon=True)
        self._thread.start()

    def add(self, connection: socket.socket, callback: Callable[[], None]) -> None:
        """Call `callback`, which must not block, when the peer hangs up. Does nothing after
        `stop`.
        """
        with self._lock:
            if not self._epoll.closed:
                self._callbacks[connection.fileno()] = callback
                self._epoll.register(connection.fileno(), select.EPOLLRDHUP | select.EPOLLONESHOT)

    def remove(self, connection: socket.socket) -> None:
        """Stop watching. Call it before the socket is closed: its number may soon be another
        socket's.
        """
        with self._lock:
            if self._callbacks.pop(connection.fileno(), None) and not self._epoll.closed:
                self._epoll.unregister(connection.fileno())

    def stop(self) -> None:
        """End the thread; no callback is called any more. Idempotent."""
        self._wake.close()
        self._thread.join()

    def _run(self) -> None:
        ready = select.poll()
        ready.register(self._epoll.fileno(), select.POLLIN)
        while True:
            ready.poll()
            # Polled under the lock: a number polled before it might be another connection's by now.
            with self._lock:
                for number, _ in self._epoll.poll(0):
                    if number == self._woken.fileno():
                        self._close()
                        return
                    # The socket stays registered, but disarmed, until `remove`.
                    callback = self._callbacks.get(number)
                    if callback is not None:
                        callback()

    def _close(self) -> None:
        with self._lock:
            self._callbacks.clear()
            self._epoll.close()
            self._woken.close()
