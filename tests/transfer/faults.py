"""A lane wrapper that loses, repeats, reorders, damages or swaps frames, either way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from baton.handles import LaneAddress
from kv_transfer.base import Lane, Serve, Wire
from kv_transfer.frames import Kind

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


@dataclass
class FaultyWire:
    inner: Wire
    receiving: Fault
    sending: Fault

    def __post_init__(self) -> None:
        self._num_received = 0
        self._num_sent = 0
        self._ready: list[bytes] = []

    def send(self, frame: bytes) -> None:
        frames = self.sending(self._num_sent, frame)
        self._num_sent += 1
        for out in frames:
            self.inner.send(out)

    def receive(self) -> bytes | None:
        while not self._ready:
            frame = self.inner.receive()
            if frame is None:
                return None
            self._ready = self.receiving(self._num_received, frame)
            self._num_received += 1
        return self._ready.pop(0)

    def finish(self) -> None:
        self.inner.finish()

    def cancel(self) -> None:
        self.inner.cancel()


@dataclass
class FaultyLane:
    """Wraps the fetching side of a lane; exporting passes through."""

    inner: Lane
    receiving: Fault = intact
    sending: Fault = intact

    @property
    def name(self) -> str:
        return self.inner.name

    def start(self, boot_id: str, serve: Serve) -> LaneAddress:
        return self.inner.start(boot_id, serve)

    def open(self, address: str) -> Wire:
        return FaultyWire(
            self.inner.open(address),
            self.receiving,
            self.sending,
        )

    def stop(self) -> None:
        self.inner.stop()
