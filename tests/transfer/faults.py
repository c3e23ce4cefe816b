"""A lane wrapper that loses, repeats, reorders, damages or swaps frames, either way."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from baton.protocol.errors import KVLost
from baton.protocol.handles import LaneAddress
from kv_transfer.protocol.base import (
    DirectWire,
    KVSpan,
    Lane,
    Remote,
    ScatterWire,
    Serve,
    Target,
    Wire,
)
from kv_transfer.protocol.frames import HEADER_BYTES, Kind, decode_header, payload_bytes, split

SCATTERING = ("stream", "dist")  # lanes whose wires are base.ScatterWire

Fault = Callable[
    [int, bytes], list[bytes]
]  # (index of the frame in its direction, frame) -> frames


def kind_of(frame: bytes) -> Kind:
    return Kind(frame[4])


def intact(index: int, frame: bytes) -> list[bytes]:
    return [frame]


def on_nth(kind: Kind, nth: int, fault: Callable[[bytes], list[bytes]]) -> Fault:
    """Apply `fault` to the nth frame of `kind`, over all conversations; others pass."""
    seen = 0

    def apply(index: int, frame: bytes) -> list[bytes]:
        nonlocal seen
        if kind_of(frame) is not kind:
            return [frame]
        seen += 1
        return fault(frame) if seen - 1 == nth else [frame]

    return apply


def on_every(kind: Kind, fault: Callable[[bytes], list[bytes]]) -> Fault:
    return lambda index, frame: fault(frame) if kind_of(frame) is kind else [frame]


def flip_bit(frame: bytes, bit: int = 8 * 60) -> list[bytes]:
    damaged = bytearray(frame)
    damaged[bit // 8 % len(frame)] ^= 1 << bit % 8
    return [bytes(damaged)]


def lose(frame: bytes) -> list[bytes]:
    return []


def repeat(frame: bytes) -> list[bytes]:
    return [frame, frame]


def truncate(frame: bytes) -> list[bytes]:
    return [frame[:-3]]


class SwapOfLayer:
    """A fault for DATA: one frame of `layer`, the first to come, is held back until the next one of
    that layer has passed; all others pass as they are."""

    def __init__(self, layer: int) -> None:
        self._layer = layer
        self._held: list[bytes] = []
        self.holding = threading.Event()
        self.swapped = threading.Event()

    def __call__(self, frame: bytes) -> list[bytes]:
        layer = decode_header(frame[:HEADER_BYTES], 0).header.layer
        if layer != self._layer or self.swapped.is_set():
            return [frame]
        if not self._held:
            self._held.append(frame)
            self.holding.set()
            return []
        self.swapped.set()
        return [frame, *self._held]


class FaultyWire:
    """base.Wire; faults see single frames, whatever the parcels they came in. They are looked up at
    each frame: a test may change them while a connection is kept."""

    def __init__(self, inner: Wire, lane: FaultyLane) -> None:
        self.inner = inner
        self.lane = lane
        self._num_received = 0
        self._num_sent = 0
        self._ready: list[bytes] = []

    def send(self, parcel: bytes) -> None:
        for frame in split(parcel):
            frames = self.lane.sending(self._num_sent, bytes(frame))
            self._num_sent += 1
            for out in frames:
                self.inner.send(out)

    def receive(self) -> bytes | None:
        while not self._ready:
            frames = self._arriving()
            if frames is None:
                return None
            for frame in frames:
                self._ready += self.lane.receiving(self._num_received, frame)
                self._num_received += 1
        return self._ready.pop(0)

    def _arriving(self) -> list[bytes] | None:
        """The next parcel as it comes, in frames."""
        parcel = self.inner.receive()
        return None if parcel is None else [bytes(frame) for frame in split(parcel)]

    def finish(self) -> None:
        self.inner.finish()

    def cancel(self) -> None:
        self.inner.cancel()


class FaultyScatterWire(FaultyWire):
    """base.ScatterWire: what faults leave of the frames is one run of bytes, as on a socket. Who
    misses some of a frame takes them from the next one."""

    def __init__(self, inner: ScatterWire, lane: FaultyLane) -> None:
        super().__init__(inner, lane)
        self._scatter = inner
        self._rest = b""

    def receive_header(self) -> bytes | None:
        if not self._rest and not self._more():
            return None
        return self._take(HEADER_BYTES)

    def receive_into(self, views: Sequence[memoryview]) -> None:
        for view in views:
            view[:] = self._take(len(view))
        own = [isinstance(view.obj, bytearray) for view in views]
        self.lane.num_in_pool += not all(own)  # what is looked at first lies in memory of its own

    def _arriving(self) -> list[bytes] | None:
        header = self._scatter.receive_header()
        if header is None:
            return None
        payload = bytearray(payload_bytes(header))
        self._scatter.receive_into([memoryview(payload)])
        return [header + payload]

    def _more(self) -> bool:
        frame = self.receive()
        self._rest += frame or b""
        return frame is not None

    def _take(self, num_bytes: int) -> bytes:
        while len(self._rest) < num_bytes:
            if not self._more():
                raise KVLost("the peer left in mid-frame")
        taken, self._rest = self._rest[:num_bytes], self._rest[num_bytes:]
        return taken


class FaultyDirectWire(FaultyWire):
    """base.DirectWire: what is pulled is not ours to damage."""

    def __init__(self, inner: DirectWire, lane: FaultyLane) -> None:
        super().__init__(inner, lane)
        self._direct = inner

    def pull(self, span: KVSpan, source: Remote, target: Target) -> None:
        self._direct.pull(span, source, target)

    def settle(self) -> None:
        self._direct.settle()


@dataclass
class FaultyLane:
    """Wraps the fetching side of a lane; exporting passes through. Its wires can what the lane's
    can, so that a fetcher goes its usual way with them.

    `num_in_pool`: payloads that were received straight into a pool, which SCATTERING lanes do.
    """

    inner: Lane
    receiving: Fault = intact
    sending: Fault = intact
    num_in_pool: int = 0

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def direct(self) -> bool:
        return self.inner.direct

    def start(self, boot_id: str, serve: Serve) -> LaneAddress:
        return self.inner.start(boot_id, serve)

    def reaches(self, address: LaneAddress) -> bool:
        return self.inner.reaches(address)

    def open(self, address: LaneAddress) -> Wire:
        wire = self.inner.open(address)
        if isinstance(wire, ScatterWire):
            return FaultyScatterWire(wire, self)
        return (
            FaultyDirectWire(wire, self) if isinstance(wire, DirectWire) else FaultyWire(wire, self)
        )

    def stop(self) -> None:
        self.inner.stop()
