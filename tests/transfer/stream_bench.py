"""Stream lanes under test, with the proof that they give everything back."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from baton.protocol.errors import KVCorrupt, KVError
from baton.protocol.handles import LaneAddress
from baton.runtime.timing import Timing
from kv_transfer.lanes.stream import StreamLane, StreamLaneOptions, StreamWire
from kv_transfer.protocol.base import Incoming, Serve, Wire
from kv_transfer.protocol.frames import Buffer, Header, Kind, encode
from tests.transfer.pools import BOOT_P, PATIENCE_S

TCP_ONLY: Final = StreamLaneOptions(unix=False)
UNIX_ONLY: Final = StreamLaneOptions(tcp=False)
OTHERS_S: Final = 2.0  # after which a descriptor is no passing one of another test's threads


def frame(number: int = 1, payload: bytes = b"body", kind: Kind = Kind.DATA) -> bytes:
    return encode(Header(kind, export_seq=number), [payload], 0)


def echo(lane: str, peer: Incoming) -> Iterator[Buffer]:
    while (data := peer.receive(PATIENCE_S)) is not None:
        yield data


@dataclass
class Bench:
    """Lanes of one test; `close` proves that all threads and descriptors came back. gRPC's threads
    of older tests may close theirs meanwhile, or open some for a moment."""

    lanes: list[StreamLane] = field(default_factory=list)
    wires: list[StreamWire] = field(default_factory=list)
    timing: Timing = field(default_factory=Timing)

    def __post_init__(self) -> None:
        self.threads = set(threading.enumerate())
        self.descriptors = descriptors()

    def lane(self, options: StreamLaneOptions = TCP_ONLY) -> StreamLane:
        lane = StreamLane(self.timing, options)
        self.lanes.append(lane)
        return lane

    def serve(
        self, serve: Serve = echo, options: StreamLaneOptions = TCP_ONLY
    ) -> tuple[StreamLane, LaneAddress]:
        lane = self.lane(options)
        return lane, lane.start(BOOT_P, serve)

    def wire(self, address: LaneAddress, options: StreamLaneOptions = TCP_ONLY) -> StreamWire:
        wire = self.lane(options).open(address)
        self.wires.append(wire)
        return wire

    def close(self) -> None:
        for wire in self.wires:
            wire.finish()
        for _ in range(2):
            for lane in self.lanes:
                lane.stop()
        assert set(threading.enumerate()) <= self.threads
        until = time.monotonic() + OTHERS_S
        while descriptors() - self.descriptors and time.monotonic() < until:
            time.sleep(0.01)
        assert not descriptors() - self.descriptors


def descriptors() -> set[str]:
    """What this process has open, but for the directory that is read to say so."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            found.add(f"{name} {os.readlink(f'/proc/self/fd/{name}')}")
        except FileNotFoundError:
            continue
    return found


def dial(address: LaneAddress) -> socket.socket:
    host, _, port = address.address.rpartition(":")
    return socket.create_connection((host, int(port)), PATIENCE_S)


def ask(wire: Wire, number: int = 1) -> bytes:
    """One frame there and one back."""
    wire.send(frame(number))
    answer = wire.receive()
    assert answer is not None
    return bytes(answer)


class Caught:
    """A `serve` that keeps what `receive` raised; as the exporter does, it then says so."""

    def __init__(self) -> None:
        self.errors: list[KVError] = []
        self.calls = 0

    def __call__(self, lane: str, peer: Incoming) -> Iterator[Buffer]:
        self.calls += 1
        try:
            yield from echo(lane, peer)
        except KVCorrupt as error:
            self.errors.append(error)
            yield frame(kind=Kind.ERR)
