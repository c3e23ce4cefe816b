"""A lane wrapper that loses, repeats, reorders, damages or swaps frames, either way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from baton.handles import LaneAddress
from kv_transfer.base import DirectWire, Lane, Remote, Serve, Span, Target, Wire
from kv_transfer.frames import Kind, split

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


def swap_neighbours() -> Callable[[bytes], list[bytes]]:
    """Reorder: hold the first frame back until the second has passed."""
    held: list[bytes] = []

    def fault(frame: bytes) -> list[bytes]:
        if not held:
            held.append(frame)
            return []
        frames = [frame, *held]
        held.clear()
        return frames

    return fault


class FaultyWire:
    """base.Wire; faults see single frames, whatever the parcels they came in."""

    def __init__(self, inner: Wire, receiving: Fault, sending: Fault) -> None:
        self.inner = inner
        self._receiving = receiving
        self._sending = sending
        self._num_received = 0
        self._num_sent = 0
        self._ready: list[bytes] = []

    def send(self, parcel: bytes) -> None:
        for frame in split(parcel):
            frames = self._sending(self._num_sent, bytes(frame))
            self._num_sent += 1
            for out in frames:
                self.inner.send(out)

    def receive(self) -> bytes | None:
        while not self._ready:
            parcel = self.inner.receive()
            if parcel is None:
                return None
            for frame in split(parcel):
                self._ready += self._receiving(self._num_received, bytes(frame))
                self._num_received += 1
        return self._ready.pop(0)

    def finish(self) -> None:
        self.inner.finish()

    def cancel(self) -> None:
        self.inner.cancel()


class FaultyDirectWire(FaultyWire):
    """base.DirectWire: what is pulled is not ours to damage."""

    def pull(self, span: Span, source: Remote, target: Target) -> None:
        assert isinstance(self.inner, DirectWire)
        self.inner.pull(span, source, target)

    def settle(self) -> None:
        assert isinstance(self.inner, DirectWire)
        self.inner.settle()


@dataclass
class FaultyLane:
    """Wraps the fetching side of a lane; exporting passes through."""

    inner: Lane
    receiving: Fault = intact
    sending: Fault = intact

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
        kind = FaultyDirectWire if self.direct else FaultyWire
        return kind(wire, self._on_receiving, self._on_sending)

    # Looked up at each frame: a test may change them while a connection is kept.
    def _on_receiving(self, index: int, frame: bytes) -> list[bytes]:
        return self.receiving(index, frame)

    def _on_sending(self, index: int, frame: bytes) -> list[bytes]:
        return self.sending(index, frame)

    def stop(self) -> None:
        self.inner.stop()
