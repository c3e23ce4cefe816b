"""The `stream` lane and peers that misbehave, are too slow, or too many."""

from __future__ import annotations

import os
import resource
import socket
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest

from baton.protocol.errors import KVCorrupt, KVLost, KVTimeout
from kv_transfer.lanes import stream_server
from kv_transfer.lanes.framed_socket import FramedSocket
from kv_transfer.lanes.stream import StreamLane, StreamWire
from kv_transfer.protocol.base import Incoming
from kv_transfer.protocol.bodies import decode_body
from kv_transfer.protocol.frames import (
    HEADER_BYTES,
    MAX_PAYLOAD,
    Buffer,
    Header,
    Kind,
    decode,
    encode_into,
)
from kv_transfer.protocol.messages import Failure, FailureCode
from tests.transfer.pools import PATIENCE_S
from tests.transfer.stream_bench import TCP_ONLY, Bench, Caught, ask, dial, frame

# ---- peers that misbehave -----------------------------------------------------------------------
GARBAGE = {
    "another protocol": b"GET / HTTP/1.1\r\nHost: nobody\r\nAccept: */*\r\n\r\n".ljust(64),
    "zeros": bytes(HEADER_BYTES),
    "a length beyond all bounds": frame()[:20] + struct.pack("<I", 0xFFFF_FFFF) + frame()[24:],
    "a length beyond a fetcher's": frame(payload=bytes(stream_server.MAX_INCOMING + 1)),
}


@pytest.mark.parametrize("words", GARBAGE)
def test_garbage_is_answered_and_hung_up_on(bench: Bench, words: str) -> None:
    caught = Caught()
    _, address = bench.serve(caught)
    with dial(address) as raw:
        raw.sendall(GARBAGE[words])
        answer = b""
        while piece := raw.recv(4096):
            answer += piece
    assert decode(answer, 0).header.kind is Kind.ERR
    assert len(caught.errors) == 1
    wire = bench.wire(address)  # others are still served
    assert ask(wire) == frame()


@pytest.mark.parametrize("words", ["another protocol", "zeros", "a length beyond all bounds"])
def test_garbage_from_the_exporter_is_corrupt(bench: Bench, words: str) -> None:
    def serve(lane: str, peer: Incoming) -> Iterator[Buffer]:
        peer.receive(PATIENCE_S)
        yield GARBAGE[words]

    _, address = bench.serve(serve)
    wire = bench.wire(address)
    wire.send(frame())
    with pytest.raises(KVCorrupt):
        wire.receive()


@pytest.mark.parametrize("end", [0, 1, HEADER_BYTES, HEADER_BYTES + 2])
def test_a_peer_that_dies_is_lost_at_once(bench: Bench, end: int) -> None:
    """Between frames that is the end, within one it is KVLost."""

    def serve(lane: str, peer: Incoming) -> Iterator[Buffer]:
        peer.receive(PATIENCE_S)
        yield frame()[:end]

    _, address = bench.serve(serve)
    wire = bench.wire(address)
    wire.send(frame())
    if end == 0:
        assert wire.receive() is None
        return
    with pytest.raises(KVLost, match="mid-frame"):
        wire.receive()


@pytest.mark.parametrize("scatter", [False, True])
@pytest.mark.parametrize("end", [0, 1, HEADER_BYTES, HEADER_BYTES + 2])
def test_a_half_open_peer_is_a_timeout(quick: Bench, end: int, scatter: bool) -> None:
    over = threading.Event()

    def serve(lane: str, peer: Incoming) -> Iterator[Buffer]:
        peer.on_closed(over.set)
        peer.receive(PATIENCE_S)
        yield frame()[:end]
        assert over.wait(PATIENCE_S)

    _, address = quick.serve(serve)
    wire = quick.wire(address)
    wire.send(frame())
    with pytest.raises(KVTimeout):
        _receive(wire, scatter)
    wire.cancel()
    assert over.wait(PATIENCE_S)  # and the other side, which reads nothing, has noticed


def _receive(wire: StreamWire, scatter: bool) -> None:
    if not scatter:
        wire.receive()
    elif wire.receive_header() is not None:
        wire.receive_into([memoryview(bytearray(4))])


@pytest.mark.parametrize("scatter", [False, True])
def test_nobody_lives_on_single_bytes(scatter: bool) -> None:
    """Each byte comes in time, the frame does not."""

    class Hours:
        def __init__(self) -> None:
            self.now = 0.0

        def monotonic(self) -> float:
            self.now += 3600
            return self.now

    ours, theirs = socket.socketpair()
    with ours, theirs:
        framed = FramedSocket(ours, clock=Hours())
        theirs.send(b"xx")
        place = [memoryview(bytearray(100))]
        receive = partial(framed.receive_into, place) if scatter else framed.receive
        with pytest.raises(KVTimeout):
            receive(0.2)


def test_a_reader_that_does_not_read_is_cut_off(quick: Bench) -> None:
    """What waits for it is bounded by the socket's buffers, not by what there is to say."""
    sent, over = 0, threading.Event()

    def serve(lane: str, peer: Incoming) -> Iterator[Buffer]:
        nonlocal sent
        peer.receive(PATIENCE_S)
        peer.on_closed(over.set)
        assert peer.buffer is not None
        for number in range(1000):
            sent = number
            yield encode_into(peer.buffer, Header(Kind.DATA, number), [bytes(MAX_PAYLOAD)], 0)

    _, address = quick.serve(serve)
    wire = quick.wire(address)
    wire.send(frame())
    assert over.wait(PATIENCE_S)
    assert 0 < sent < 100
    with pytest.raises(KVLost):
        all(wire.receive() for _ in range(1000))


def test_who_leaves_is_noticed_while_nobody_reads(bench: Bench) -> None:
    """As when the exporter waits for a prefill."""
    asked, over = threading.Event(), threading.Event()

    def serve(lane: str, peer: Incoming) -> Iterator[Buffer]:
        peer.on_closed(over.set)
        peer.receive(PATIENCE_S)
        asked.set()
        assert over.wait(PATIENCE_S)
        called_at_once = threading.Event()
        peer.on_closed(called_at_once.set)
        assert called_at_once.is_set()
        yield from ()

    _, address = bench.serve(serve)
    wire = bench.wire(address)
    wire.send(frame())
    assert asked.wait(PATIENCE_S)
    wire.cancel()
    assert over.wait(PATIENCE_S)


# ---- many ---------------------------------------------------------------------------------------
def test_beyond_the_cap_one_is_told_so(bench: Bench) -> None:
    lane, address = bench.serve(options=replace(TCP_ONLY, max_connections=2))
    first, second = bench.wire(address), bench.wire(address)
    for wire in (first, second):
        assert ask(wire) == frame()
    third = bench.wire(address)
    third.send(frame())
    data = third.receive()
    assert data is not None
    refusal = decode(data, 0)
    assert decode_body(refusal.header.kind, refusal.payload) == Failure(
        FailureCode.LOST, "2 connections already"
    )
    first.finish()
    assert lane._server is not None
    second.send(frame(2))
    assert second.receive() == frame(2)


def test_at_the_cap_the_longest_silent_one_makes_room(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_server, "SILENT_S", 0.0)
    lane, address = bench.serve(options=replace(TCP_ONLY, max_connections=2))
    with dial(address) as mute:
        _until_silent(lane, 1)
        with dial(address) as other:
            _until_silent(lane, 2)
            wire = bench.wire(address)
            assert ask(wire) == frame()
            assert mute.recv(1) == b""  # who came first and never spoke
            other.sendall(frame())
            assert other.recv(4096) == frame()
    assert lane._server is not None
    assert lane._server.num_connections <= 2


def _until_silent(lane: StreamLane, count: int) -> None:
    """Wait until so many connections have a thread that waits for a frame."""
    assert lane._server is not None
    deadline = time.monotonic() + PATIENCE_S
    while sum(each.silent_since is not None for each in list(lane._server._active)) < count:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_flood_is_survived(bench: Bench) -> None:
    """Twenty times the cap at once: nobody hangs, the threads stay few, and then all is well."""
    _, address = bench.serve(options=replace(TCP_ONLY, max_connections=4))
    flood = [dial(address) for _ in range(80)]
    for raw in flood:
        raw.sendall(frame())
    outcomes = [raw.recv(4) for raw in flood]
    assert all(len(outcome) == 4 for outcome in outcomes)  # an echo or a refusal, never nothing
    assert sum(thread.name == "kv-stream" for thread in threading.enumerate()) <= 4
    for raw in flood:
        raw.close()
    for _ in range(100):  # each try is refused or served; the closed ones leave one by one
        wire = bench.wire(address)
        if ask(wire) == frame():
            break
    else:
        pytest.fail("never served again")


def test_out_of_descriptors_is_no_spin(bench: Bench) -> None:
    """Callers are turned away and the thread goes on accepting."""
    _, address = bench.serve()
    host, _, port = address.address.rpartition(":")
    with socket.socket() as first, socket.socket() as second:
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        highest = max(int(name) for name in os.listdir("/proc/self/fd"))
        fillers: list[int | None] = []
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, before[1]))
        try:
            fillers = list(iter(_one_more, None))
            first.settimeout(PATIENCE_S)
            first.connect((host, int(port)))
            assert first.recv(1) == b""
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
            for number in fillers:
                assert number is not None
                os.close(number)
        second.settimeout(PATIENCE_S)
        second.connect((host, int(port)))
        second.sendall(frame())
        assert second.recv(4096) == frame()


def _one_more() -> int | None:
    try:
        return os.open(os.devnull, os.O_RDONLY)
    except OSError:
        return None
