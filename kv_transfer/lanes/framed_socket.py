"""Frames over one connected stream socket: TCP, Unix, or either of them under TLS.

Frames delimit themselves: a header of 48 bytes says how many bytes follow. Who connects to whom is
in stream.py; what a frame means, and whether it is intact, is in frames.py. One thread sends and
receives; any thread may `break_`. Every wait has a deadline. Plain sockets block in the kernel
under SO_RCVTIMEO and SO_SNDTIMEO, which takes one system call per piece; Python's own timeouts poll
before each. TLS sockets need Python's timeouts.
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import struct
import threading
from collections.abc import Iterator, Sequence
from typing import Final

from baton.protocol.clock import Clock, SystemClock
from baton.protocol.errors import KVCorrupt, KVError, KVLost, KVRefused, KVTimeout
from kv_transfer.protocol.frames import HEADER_BYTES, MAX_PAYLOAD, Buffer, payload_bytes

UNIX_BUFFER_BYTES: Final = 4 << 20  # the most buffers that the kernel takes in one call
IOV_MAX: Final = 1024  # pieces the kernel takes in one call
_TIMEVAL: Final = struct.Struct("@ll")


class FramedSocket:
    """Sends and receives frames; owns a connected socket.

    `max_payload`: the largest payload that a frame from this peer may have.
    """

    def __init__(
        self,
        connection: socket.socket,
        max_payload: int = MAX_PAYLOAD,
        clock: Clock | None = None,
    ) -> None:
        self._socket: socket.socket = connection
        self._tls = isinstance(connection, ssl.SSLSocket)
        self._max_payload = max_payload
        self._clock = clock or SystemClock()
        self._timeout_s: float | None = None
        # so that no descriptor is shut down that has a new owner by now
        self._lock = threading.Lock()
        self._busy = False
        self._broken = False
        self._closed = False
        self._abandoned = False  # `abandon` was called: close it when no call uses it any more
        connection.settimeout(None)
        _set_options(connection)

    @property
    def raw(self) -> socket.socket:
        """The socket, to wait on; not for reading or writing."""
        return self._socket

    # ---- beginning -----------------------------------------------------------------------------
    def connect(self, target: str | tuple[str, int], timeout_s: float) -> None:
        """Connect to `target`. Raises KVLost."""
        with self._using(f"connect to {target}"):
            self._socket.settimeout(timeout_s)
            self._socket.connect(target)
            self._socket.settimeout(None)

    def encrypt(self, context: ssl.SSLContext, server_side: bool = False) -> None:
        """Put TLS over the socket for all that follows; call `handshake` next. Raises KVLost."""
        with self._using("TLS"), self._lock:
            self._socket = context.wrap_socket(
                self._socket, server_side=server_side, do_handshake_on_connect=False
            )
            self._tls, self._timeout_s = True, None

    def handshake(self, timeout_s: float) -> None:
        """Do the TLS handshake; nothing without TLS. Raises KVRefused (certificates, versions),
        KVLost, KVTimeout.
        """
        with self._using("handshake"):
            if isinstance(self._socket, ssl.SSLSocket):
                self._set_timeout(timeout_s)
                self._socket.do_handshake()

    # ---- frames --------------------------------------------------------------------------------
    def send(self, frames: Buffer, timeout_s: float) -> None:
        """Send one or more whole frames. Raises KVLost; KVTimeout if the peer takes nothing for
        `timeout_s`."""
        with self._using("send"):
            self._set_timeout(timeout_s)
            self._socket.sendall(frames)

    def receive_header(self, timeout_s: float) -> bytearray | None:
        """Return the next frame's header, or None at the end of the connection.

        Raises KVLost and KVTimeout, and KVCorrupt for bytes that are no header or a payload that is
        too large.
        """
        header = bytearray(HEADER_BYTES)
        if not self._fill(memoryview(header), timeout_s, may_end=True):
            return None
        num_bytes = payload_bytes(header)
        if num_bytes > self._max_payload:
            raise KVCorrupt(f"payload of {num_bytes} bytes, at most {self._max_payload} here")
        return header

    def receive_into(self, views: Sequence[memoryview], timeout_s: float) -> None:
        """Fill `views` with the next bytes. Raises KVLost, KVTimeout."""
        if self._tls:  # TLS takes one buffer at a time
            for view in views:
                self._fill(view, timeout_s)
            return
        deadline = self._clock.monotonic() + timeout_s
        pending = [view for view in views if view.nbytes]
        with self._using("receive"):
            self._set_timeout(timeout_s)
            while pending:
                # One sleep for all views: one sleep per view cost half as much CPU again.
                count = self._socket.recvmsg_into(pending[:IOV_MAX], 0, socket.MSG_WAITALL)[0]
                if count == 0:
                    raise KVLost("broken off" if self._broken else "the peer left in mid-frame")
                pending = _after(pending, count)
                if pending and self._clock.monotonic() > deadline:
                    raise KVTimeout(f"not the whole frame in {timeout_s} s")

    def receive(self, timeout_s: float) -> bytes | None:
        """Return the next frame, or None at the end of the connection. Raises the errors of
        `receive_header`.
        """
        header = self.receive_header(timeout_s)
        if header is None:
            return None
        payload = bytearray(payload_bytes(header))
        self._fill(memoryview(payload), timeout_s)
        return b"".join((header, payload))

    def at_rest(self) -> bool:
        """Whether the connection is open, as far as is known here, and has nothing to read."""
        with self._lock:
            if self._closed or self._broken:
                return False
            poll = select.poll()
            poll.register(self._socket.fileno(), select.POLLIN)
            return not poll.poll(0)

    # ---- ending --------------------------------------------------------------------------------
    def part(self, timeout_s: float) -> None:
        """End our direction and wait, `timeout_s` at most, until the peer has closed its own.

        Closing with unread bytes of the peer would reset the connection, and the peer would lose
        what was sent.
        """
        deadline = self._clock.monotonic() + timeout_s
        scrap = bytearray(64 << 10)
        with contextlib.suppress(KVError), self._using("part"):
            _shut_down(self._socket, socket.SHUT_WR)
            self._set_timeout(timeout_s)
            while self._clock.monotonic() < deadline:
                if not socket.socket.recv_into(self._socket, scrap):  # its content does not matter
                    return

    def break_(self) -> None:
        """End both directions now: blocked calls raise KVLost. Any thread, idempotent."""
        with self._lock:
            self._break()

    def abandon(self) -> None:
        """Call `break_`, and close the descriptor as soon as no call uses it. Any thread,
        idempotent.
        """
        with self._lock:
            self._break()
            self._abandoned = True
            if not self._busy:
                self._close()

    def close(self) -> None:
        """Close the socket; bytes already sent still arrive. Called by the thread that uses it;
        idempotent.
        """
        with self._lock:
            self._close()

    def _break(self) -> None:
        self._broken = True
        if not self._closed:
            with contextlib.suppress(OSError):  # the peer was faster
                _shut_down(self._socket, socket.SHUT_RDWR)

    def _close(self) -> None:
        self._closed = True
        self._socket.close()

    # ---- inside --------------------------------------------------------------------------------
    @contextlib.contextmanager
    def _using(self, what: str) -> Iterator[None]:
        """Turn the socket errors of a blocking call into KVErrors, and keep the socket open during
        the call.
        """
        with self._lock:
            if self._broken or self._closed:
                raise KVLost(f"{what}: broken off")
            self._busy = True
        try:
            yield
        except OSError as error:
            raise self._error(error, what) from error
        finally:
            with self._lock:
                self._busy = False
                if self._abandoned:
                    self._close()

    def _fill(self, view: memoryview, timeout_s: float, may_end: bool = False) -> bool:
        """Fill `view`. Return False if the connection ended before its first byte and `may_end` is
        set.

        Takes at most twice `timeout_s`: there is a deadline for the whole and one for each wait, so
        a peer that sends single bytes cannot hold the thread.
        """
        deadline = self._clock.monotonic() + timeout_s
        received, size = 0, view.nbytes
        with self._using("receive"):
            self._set_timeout(timeout_s)
            while received < size:
                count = self._socket.recv_into(view[received:])
                if count == 0:
                    if may_end and received == 0 and not self._broken:
                        return False
                    raise KVLost("broken off" if self._broken else "the peer left in mid-frame")
                received += count
                if received < size and self._clock.monotonic() > deadline:
                    raise KVTimeout(f"{received} of {size} bytes in {timeout_s} s")
        return True

    def _set_timeout(self, seconds: float) -> None:
        if seconds == self._timeout_s:
            return
        if self._tls:
            self._socket.settimeout(seconds)
        else:
            whole = int(seconds)
            value = _TIMEVAL.pack(whole, max(1, int((seconds - whole) * 1e6)))
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)
        self._timeout_s = seconds

    def _error(self, error: OSError, what: str) -> KVError:
        """Return the KVError that a socket's error means for a transfer."""
        if self._broken or self._closed:
            return KVLost(f"{what}: broken off")
        if isinstance(error, TimeoutError | BlockingIOError):
            return KVTimeout(f"{what}: nothing for {self._timeout_s} s")
        return _refused_or_lost(error, what)


def _refused_or_lost(error: OSError, what: str) -> KVError:
    """Return KVRefused if TLS says that these two peers may not talk, else KVLost."""
    broke = isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError | ssl.SSLSyscallError)
    if isinstance(error, ssl.SSLError) and not broke:
        return KVRefused(f"{what}: TLS: {error.reason or error}")
    return KVLost(f"{what}: {error}")


def _after(views: Sequence[memoryview], count: int) -> list[memoryview]:
    """Return what is left of `views` after their first `count` bytes."""
    for index, view in enumerate(views):
        if count < view.nbytes:
            return [view[count:], *views[index + 1 :]]
        count -= view.nbytes
    return []


def _set_options(connection: socket.socket) -> None:
    """Set the socket's options.

    TCP: no delay for small frames; the kernel tunes the buffers (setting a size would end that).
    Unix: large buffers.
    """
    if connection.family == socket.AF_UNIX:
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            connection.setsockopt(socket.SOL_SOCKET, option, UNIX_BUFFER_BYTES)
    else:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _shut_down(connection: socket.socket, how: int) -> None:
    """Shut down the socket below TLS.

    SSLSocket's own shutdown would drop the TLS state, and a thread still reading would take
    ciphertext for frames.
    """
    socket.socket.shutdown(connection, how)
