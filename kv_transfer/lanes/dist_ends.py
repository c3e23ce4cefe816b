"""Both ends of a connection of the `dist` lane (dist.py): what they send, when they use a pair, and
when the connection may be closed.

One thread runs each end; `cancel` and hang-ups come from other threads.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from baton.protocol.errors import KVCorrupt, KVError, KVLost, KVTimeout
from kv_transfer.lanes.closing import Closing
from kv_transfer.lanes.pair_groups import DEPTH, Groups, Pair
from kv_transfer.lanes.pairs import Pairs, agree_as_exporter, agree_as_fetcher
from kv_transfer.lanes.records import MAX_RECORD, HangupWatch, Record, RecordSocket, Tag
from kv_transfer.protocol.frames import HEADER_BYTES, Buffer

_SIZE: Final = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class Ends:
    """What all conversations of a lane share."""

    groups: Groups
    pairs: Pairs
    watch: HangupWatch
    inline_bytes: int


class DistIncoming:
    """Implements base.Incoming, and sends the answers. One thread only, except for `break_`."""

    def __init__(self, control: RecordSocket, ends: Ends) -> None:
        self._control = control
        self._ends = ends
        self._pair: Pair | None = None
        self._agreed = False
        self._lock = threading.Lock()
        self._closing = Closing()

    def start(self) -> None:
        self._ends.watch.add(self._control.socket, self._hung_up)

    @property
    def buffer(self) -> memoryview | None:
        """The memory of the pair, from which frames are sent without a copy; None if there is no
        pair.
        """
        try:
            return None if self._pair is None else self._pair.buffer()
        except KVError:
            return None  # the next `send` says why

    def receive(self, timeout_s: float) -> Buffer | None:
        try:
            record = self._control.receive(timeout_s)
        except (KVLost, KVTimeout):
            return None
        self._give_back()
        match record.tag:
            case Tag.FRAME:
                return record.body
            case Tag.FINISHED:
                return None
            case _:
                raise KVCorrupt(f"{record.tag.name} out of place")

    def on_closed(self, callback: Callable[[], None]) -> None:
        self._closing.on_closed(callback)

    def send(self, frame: Buffer) -> None:
        """Send a frame. Raises KVLost, KVTimeout or KVCorrupt."""
        pair = self._pair_for(frame)
        if pair is None:
            self._control.send(Tag.FRAME, frame)
        else:
            self._control.send(Tag.TENSOR, _SIZE.pack(len(frame)))
            pair.send(frame)

    def finish(self) -> None:
        """Tell the peer that nothing more follows, after it has taken everything."""
        if self._pair is not None:
            self._pair.flush()
        self._control.send(Tag.FINISHED)

    def break_(self) -> None:
        """Break the connection. Any thread."""
        self._control.break_()

    def close(self, linger_s: float) -> None:
        self._ends.watch.remove(self._control.socket)
        self._give_back()
        # Closing with unread messages of the peer would reset the connection and lose our own
        # messages.
        with contextlib.suppress(OSError):
            self._control.socket.shutdown(socket.SHUT_WR)
        with contextlib.suppress(KVError):
            while True:
                self._control.receive(linger_s)
        self._control.close()
        self._closing.notify()

    def _give_back(self) -> None:
        with self._lock:
            pair, self._pair = self._pair, None
        self._agreed = False
        if pair is not None:
            with contextlib.suppress(KVError):  # a peer that sends again has taken everything
                pair.flush()
            self._ends.pairs.give_back("", pair)

    def _pair_for(self, frame: Buffer) -> Pair | None:
        if len(frame) <= self._ends.inline_bytes:
            return None
        if not self._agreed:
            self._agreed = True
            pair = agree_as_exporter(self._ends.pairs, self._ends.groups, self._control)
            with self._lock:
                self._pair = pair
                if pair is not None and self._closing.over:
                    pair.kill()
        return self._pair

    def _hung_up(self) -> None:
        # Before the pair is looked at: one that is just being agreed upon then sees it and ends
        # itself.
        self._closing.notify()
        with self._lock:
            if self._pair is not None:
                self._pair.kill()


class DistWire:
    """Implements base.Wire over a connection and, once the exporter wants one, a pair."""

    def __init__(self, control: RecordSocket, ends: Ends, peer: str) -> None:
        self._control = control
        self._ends = ends
        self._peer = peer
        self._rest = memoryview(b"")
        self._ahead: Record | None = None
        self._lock = threading.Lock()  # guards the rest; never held while waiting
        self._pair: Pair | None = None
        self._waits = False  # our thread is reading the connection or the pair
        self._cancelled = False
        self._finished = False
        self._gone = False  # the peer has hung up
        self._closed = False
        self._on_closed: Callable[[DistWire], None] | None = None

    def start(self, on_closed: Callable[[DistWire], None]) -> None:
        self._on_closed = on_closed
        self._ends.watch.add(self._control.socket, self.hung_up)

    def send(self, parcel: bytes) -> None:
        self._give_back()
        self._control.send(Tag.FRAME, parcel)

    def receive(self) -> Buffer | None:
        return self._parcel()

    # ScatterWire: what came over the pair is copied once, to its destination
    def receive_header(self) -> bytes | None:
        parcel = self._parcel()
        if parcel is None:
            return None
        self._rest = parcel[HEADER_BYTES:]
        return bytes(parcel[:HEADER_BYTES])

    def receive_into(self, views: Sequence[memoryview]) -> None:
        for view in views:
            size = min(len(view), len(self._rest))  # the digest finds what is missing
            view[:size] = self._rest[:size]
            self._rest = self._rest[size:]

    def finish(self) -> None:
        with self._lock:
            first, self._finished = not self._finished, True
        if first:
            with contextlib.suppress(KVError):
                self._control.send(Tag.FINISHED)
        self._give_back()
        self._close_if_over()

    def cancel(self) -> None:
        with self._lock:
            self._cancelled = True
            if self._closed:
                return
            if self._pair is not None:
                self._pair.kill()
            self._control.break_()

    def hung_up(self) -> None:
        """Note that the peer has closed the connection, or that we have broken it. Any thread;
        never blocks.
        """
        with self._lock:
            self._gone = True
            if self._waits and self._pair is not None:
                self._pair.kill()
        self._close_if_over()

    def _parcel(self) -> memoryview | None:
        """Return the rest of the last parcel, or the next one, or None at the end of the
        connection.

        The bytes are valid until the next call.
        """
        if self._rest:
            rest, self._rest = self._rest, memoryview(b"")
            return rest
        with self._lock:
            if self._closed:
                if self._cancelled:
                    raise KVLost("cancelled")
                return None
            self._waits = True
        try:
            return self._next_parcel()
        except KVError:
            if self._pair is not None:
                self._pair.kill()
            raise
        finally:
            with self._lock:
                self._waits = False
            self._close_if_over()

    def _give_back(self) -> None:
        with self._lock:
            pair, self._pair = self._pair, None
        if pair is not None:
            self._ends.pairs.give_back(self._peer, pair)

    def _next_parcel(self) -> memoryview | None:
        while True:
            pair = self._pair
            if pair is not None and pair.num_expected:
                return self._take(pair)
            record, self._ahead = self._ahead or self._control.receive(), None
            match record.tag:
                case Tag.FRAME:
                    return memoryview(record.body)
                case Tag.TENSOR:
                    self._expect(record)
                case Tag.WANTED:
                    self._agree()
                case Tag.FINISHED:
                    return None
                case _:
                    raise KVCorrupt(f"{record.tag.name} out of place")

    def _take(self, pair: Pair) -> memoryview:
        """Return the tensor that is due. The one after it travels while the caller empties the
        buffer.
        """
        if self._ahead is None and pair.num_expected < DEPTH and self._control.readable():
            record = self._control.receive()
            if record.tag is Tag.TENSOR:
                self._expect(record)
            else:
                self._ahead = record
        return pair.receive()

    def _expect(self, record: Record) -> None:
        size = int.from_bytes(record.body, "little")
        if self._pair is None or not 0 < size <= MAX_RECORD:
            raise KVCorrupt(f"a tensor of {size} bytes out of place")
        self._pair.expect(size)

    def _agree(self) -> None:
        if self._pair is not None:
            raise KVCorrupt("a second pair for one answer")
        pair = agree_as_fetcher(self._ends.pairs, self._ends.groups, self._control, self._peer)
        with self._lock:
            self._pair = pair
            if pair is not None and self._cancelled:
                pair.kill()

    def _close_if_over(self) -> None:
        """Close the connection if neither our thread nor a last message of ours needs it."""
        with self._lock:
            if self._closed or self._waits or not (self._finished and self._gone):
                return
            self._closed = True
        self._ends.watch.remove(self._control.socket)
        self._control.close()
        if self._on_closed is not None:
            self._on_closed(self)


@dataclass(frozen=True, slots=True)
class LostWire:
    """Implements base.Wire to a peer that is not there: send and receive raise KVLost."""

    why: str

    def send(self, parcel: bytes) -> None:
        raise KVLost(self.why)

    def receive(self) -> Buffer | None:
        raise KVLost(self.why)

    def finish(self) -> None:
        """Do nothing: there is no peer to send to."""

    def cancel(self) -> None:
        """Do nothing: there is no connection to break."""
