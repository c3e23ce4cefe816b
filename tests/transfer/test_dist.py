"""What the `dist` lane adds to the contract: pairs lazy, kept, capped and never retried."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from baton.node.lanes import MAKERS, LaneSettings
from baton.protocol.errors import ConfigError, KVCorrupt, KVError, KVLost, KVTimeout
from baton.protocol.handles import LaneAddress
from baton.runtime.timing import Timing
from baton.runtime.tls import TlsFiles
from kv_transfer.lanes.dist import DistLane, DistSettings
from kv_transfer.lanes.records import RecordSocket, Tag
from kv_transfer.protocol.base import Incoming, ScatterWire, Wire
from kv_transfer.protocol.frames import MAX_PAYLOAD, Buffer
from tests.transfer.pools import PATIENCE_S
from tests.waiting import eventually

TIMING = Timing(kv_progress_s=2.0)
SMALL, BIG = b"s" * 100, bytes(range(256)) * 2000
# Serves big frames for ever, says where, and lives until it is killed or stopped.
CHILD = """
import itertools, sys, signal
from baton.runtime.timing import Timing
from kv_transfer.lanes.dist import DistLane
from tests.waiting import eventually
lane = DistLane(Timing(kv_progress_s=2.0))
def serve(name, peer):
    question = peer.receive(10.0)
    if question is not None:
        yield from itertools.repeat(b"x" * 500_000, int(question))
        peer.receive(60.0)
sys.stdout.write(lane.start("0a" * 16, serve).address + "\\n")
sys.stdout.flush()
signal.pause()
"""


def answer(_: str, peer: Incoming) -> Iterator[Buffer]:
    """Each question `n` is answered by n big frames, numbered, then a small one."""
    while (question := peer.receive(PATIENCE_S)) is not None:
        for index in range(int(bytes(question))):
            frame = index.to_bytes(4, "little") + BIG
            buffer = peer.buffer
            if buffer is not None:
                buffer[: len(frame)] = frame
                yield buffer[: len(frame)]
            else:
                yield frame
        yield SMALL


@pytest.fixture
def start() -> Iterator[Callable[..., tuple[DistLane, LaneAddress]]]:
    lanes: list[DistLane] = []

    def start_lane(**settings: int | str) -> tuple[DistLane, LaneAddress]:
        lane = DistLane(TIMING, DistSettings(**settings))  # type: ignore[arg-type]
        lanes.append(lane)
        return lane, lane.start("0a" * 16, answer)

    yield start_lane
    for lane in lanes:
        lane.stop()
        lane.stop()
    assert [lane.pairs.num_pairs for lane in lanes] == [0] * len(lanes)
    assert not [t.name for t in threading.enumerate() if t.name.startswith("kv-")]


def ask(wire: ScatterWire, count: int) -> None:
    """One conversation, checked."""
    wire.send(b"%d" % count)
    for index in range(count):
        frame = wire.receive()
        assert frame is not None
        assert bytes(frame) == index.to_bytes(4, "little") + BIG
    assert bytes(wire.receive() or b"") == SMALL


def drain(wire: Wire) -> None:
    while wire.receive() is not None:
        pass


async def test_a_pair_is_built_for_the_first_big_frame_and_kept(start) -> None:
    (p, address), (d, _) = start(), start()
    wire = d.open(address)
    ask(wire, 0)
    assert (p.pairs.num_built, d.pairs.num_built) == (0, 0)
    for _ in range(3):
        ask(wire, 4)
    wire.finish()

    async def is_idle() -> bool:
        """Nor has the exporter anything to do any more; until then it has to offer another pair."""
        return p.pairs.num_idle == d.pairs.num_idle == 1

    await eventually(is_idle)
    other = d.open(address)
    ask(other, 4)
    other.finish()
    assert (p.pairs.num_built, d.pairs.num_built) == (1, 1)


def test_payloads_land_in_their_place(start) -> None:
    (_, address), (d, _) = start(), start()
    wire = d.open(address)
    wire.send(b"3")
    for index in range(3):
        place = bytearray(len(BIG) - 44)
        head = wire.receive_header()
        assert head == (index.to_bytes(4, "little") + BIG)[:48]
        wire.receive_into([memoryview(place)[:5], memoryview(place)[5:]])
        assert place == BIG[44:]
    assert bytes(wire.receive() or b"") == SMALL
    wire.finish()


def test_conversations_at_the_same_time_have_pairs_of_their_own(start) -> None:
    (p, address), (d, _) = start(), start()
    wires = [d.open(address) for _ in range(3)]
    for wire in wires:
        wire.send(b"2")
    for index in range(2):
        for wire in wires:
            assert bytes(wire.receive() or b"")[:4] == index.to_bytes(4, "little")
    assert p.pairs.num_built == 3
    for wire in wires:
        assert bytes(wire.receive() or b"") == SMALL
        wire.finish()


@pytest.mark.parametrize(("p_pairs", "d_pairs"), [(1, 8), (8, 1), (0, 8)])
def test_without_room_for_a_pair_frames_take_the_other_way(
    start, p_pairs: int, d_pairs: int
) -> None:
    (p, address), (d, _) = start(max_pairs=p_pairs), start(max_pairs=d_pairs)
    wires = [d.open(address) for _ in range(3)]
    for wire in wires:
        wire.send(b"2")
    for wire in wires:  # all are in the middle of an answer
        assert bytes(wire.receive() or b"")[4:] == BIG
    assert p.pairs.num_pairs <= p_pairs
    assert d.pairs.num_pairs <= d_pairs
    for wire in wires:
        assert bytes(wire.receive() or b"")[4:] == BIG
        assert bytes(wire.receive() or b"") == SMALL
        wire.finish()


def test_the_oldest_idle_pair_makes_room(start) -> None:
    (d, _) = start(max_pairs=1)
    exporters = [start() for _ in range(2)]
    for _ in range(2):
        for p, address in exporters:
            wire = d.open(address)
            ask(wire, 2)
            wire.finish()
            assert d.pairs.num_pairs == 1
            assert p.pairs.num_built >= 1
    assert d.pairs.num_built == 4


def test_a_broken_conversation_takes_its_pair_with_it(start) -> None:
    (_, address), (d, _) = start(), start()
    wire = d.open(address)
    wire.send(b"50")
    assert wire.receive() is not None
    wire.cancel()
    with pytest.raises(KVLost):
        drain(wire)
    wire.finish()
    assert d.pairs.num_pairs == 0
    other = d.open(address)
    ask(other, 4)  # a new group: nothing of the old one in it
    other.finish()
    assert d.pairs.num_built == 2


def test_cancel_wakes_a_blocked_receive(start) -> None:
    (_, address), (d, _) = start(), start()
    wire = d.open(address)
    threading.Timer(0.05, wire.cancel).start()
    with pytest.raises(KVLost):
        wire.receive()
    wire.finish()


@pytest.fixture
def child() -> Iterator[tuple[subprocess.Popen[str], LaneAddress]]:
    with subprocess.Popen([sys.executable, "-c", CHILD], stdout=subprocess.PIPE, text=True) as peer:
        assert peer.stdout is not None
        yield peer, LaneAddress("dist", peer.stdout.readline().strip())
        peer.kill()


@pytest.mark.parametrize(("blow", "error"), [(signal.SIGKILL, KVLost), (signal.SIGSTOP, KVTimeout)])
def test_a_peer_killed_or_stopped_in_mid_transfer(
    start, child, blow: signal.Signals, error: type[KVError]
) -> None:
    """A death is heard of; only a peer that is silent is waited for, and then it is a timeout."""
    d, _ = start()
    peer, address = child
    wire = d.open(address)
    wire.send(b"1000000")
    for _ in range(5):
        assert wire.receive() is not None
    os.kill(peer.pid, blow)
    # A stopped exporter may stop between two frames: then the connector's own deadline ends it.
    watchdog = threading.Timer(2 * TIMING.kv_progress_s, wire.cancel)
    if blow is signal.SIGSTOP:
        watchdog.start()
    with pytest.raises((error, KVLost) if blow is signal.SIGSTOP else error):
        drain(wire)
    watchdog.cancel()
    wire.finish()
    assert d.pairs.num_pairs == 0


def test_nobody_there_and_a_stopped_lane(start) -> None:
    d, _ = start()
    for address in ("127.0.0.1:9", "nonsense", "127.0.0.1:x"):
        wire = d.open(LaneAddress("dist", address))
        for call in (wire.receive, lambda wire=wire: wire.send(b"")):
            with pytest.raises(KVLost):
                call()
        wire.finish()
        wire.cancel()
    d.stop()
    with pytest.raises(KVLost, match="stopped"):
        d.open(LaneAddress("dist", "127.0.0.1:9")).receive()


def test_a_taken_port_stops_the_start(start) -> None:
    _, address = start()
    port = int(address.address.rpartition(":")[2])
    with pytest.raises(ConfigError, match="cannot bind"):
        DistLane(TIMING, DistSettings(port=port)).start("0b" * 16, answer)


def test_what_this_lane_cannot_do_stops_the_start() -> None:
    if not dist.is_nccl_available():
        with pytest.raises(ConfigError, match="NCCL"):
            DistLane(TIMING, DistSettings(backend="nccl")).start("0b" * 16, answer)
    assert MAKERS["dist"](LaneSettings(TIMING)).name == "dist"
    files = TlsFiles(Path("cert"), Path("key"), Path("ca"))
    with pytest.raises(ConfigError, match="TLS"):
        MAKERS["dist"](LaneSettings(TIMING, tls=files))


@pytest.mark.parametrize(
    "record",
    [
        (Tag.TENSOR, b"\x10\0\0\0"),
        (Tag.TENSOR, b""),
        (Tag.TENSOR, (2 * MAX_PAYLOAD).to_bytes(4, "little")),
        (Tag.OFFER, b"x" * 16),
        (Tag.STORE, b"\1\0a"),
    ],
)
def test_records_out_of_place_are_corrupt(start, record: tuple[Tag, bytes]) -> None:
    """To a fetcher; the exporter hangs up on whoever sends such things."""
    d, own = start()
    with socket.create_server(("127.0.0.1", 0)) as server:
        wire = d.open(LaneAddress("dist", f"127.0.0.1:{server.getsockname()[1]}"))
        connection, _ = server.accept()
        with connection:
            RecordSocket(connection, 1.0).send(*record)
            with pytest.raises(KVCorrupt):
                wire.receive()
            wire.cancel()
            wire.finish()
    host, _, port = own.address.rpartition(":")
    with socket.create_connection((host, int(port)), PATIENCE_S) as connection:
        control = RecordSocket(connection, 1.0)
        control.send(*record)
        with pytest.raises(KVLost):
            control.receive(PATIENCE_S)


@pytest.mark.parametrize("garbage", [b"\xff" * 5, b"\0\0\0\xff\0", b"\1\0\0\0\x63"])
def test_garbage_is_no_record(garbage: bytes) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(garbage)
        with pytest.raises(KVCorrupt):
            RecordSocket(ours, 1.0).receive(1.0)
