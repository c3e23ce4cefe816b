"""Readers of single frames, of records and of maps: what turns a peer's bytes into values."""

from __future__ import annotations

import random
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from baton.protocol.errors import KVLost
from kv_transfer.lanes.dist_ends import DistWire, Ends
from kv_transfer.lanes.framed_socket import FramedSocket
from kv_transfer.lanes.pair_groups import Groups
from kv_transfer.lanes.pairs import Pairs
from kv_transfer.lanes.records import RecordSocket, Tag
from kv_transfer.pool.memory_map import MemoryMap
from kv_transfer.protocol.bodies import decode_body
from kv_transfer.protocol.frames import (
    HEADER_BYTES,
    MAX_PAYLOAD,
    Kind,
    decode,
    decode_header,
    split,
)
from tests.fuzz.mutations import EDGES, damaged, numbers_changed
from tests.fuzz.sites import SEED, Sites, expected, require

PATIENCE_S = 5.0
HEAD = struct.Struct("<IB")  # of a record


def decoding(sites: Sites, rng: random.Random) -> None:
    """frames.split, decode, decode_header and bodies.decode_body."""
    data = sites.changed(rng, rng.choice(sites.frames))
    pieces = list(split(data))
    require(b"".join(pieces) == data, "split loses or invents bytes")
    for piece in pieces:
        with expected():
            frame = decode(piece, SEED)
            require(len(frame.payload) == len(piece) - HEADER_BYTES, "payload of another length")
            decode_body(frame.header.kind, frame.payload)
        with expected():
            announced = decode_header(piece[:HEADER_BYTES], SEED)
            require(0 <= announced.num_bytes <= MAX_PAYLOAD, "length beyond all bounds")
    with expected():
        decode_body(rng.choice(list(Kind)), memoryview(rng.randbytes(rng.randrange(40))))


def reading(sites: Sites, rng: random.Random) -> None:
    """FramedSocket on a socket whose peer says anything and leaves."""
    parts = [rng.choice(sites.frames) for _ in range(rng.randrange(1, 4))]
    at = rng.randrange(len(parts))
    parts[at] = sites.changed(rng, parts[at])
    data = b"".join(parts)[: 60 << 10]
    with _said(data) as connection:
        framed = FramedSocket(connection, rng.choice((MAX_PAYLOAD, 64)))
        taken = 0
        with expected():
            if rng.random() < 0.5:
                while (frame := framed.receive(PATIENCE_S)) is not None:
                    taken += len(frame)
            else:
                while (head := framed.receive_header(PATIENCE_S)) is not None:
                    place = memoryview(bytearray(decode_header(head, SEED).num_bytes))
                    cut = rng.randrange(len(place) + 1)
                    framed.receive_into([place[:cut], place[cut:]], PATIENCE_S)
                    taken += len(head) + len(place)
            require(taken == len(data), "an end in mid-frame passed for an end")
        require(taken <= len(data), "more was read than was said")


def recording(sites: Sites, rng: random.Random) -> None:
    """RecordSocket and the fetching end of the `dist` lane above it; no pair is ever built."""
    records = [_record(rng, sites) for _ in range(rng.randrange(1, 6))]
    data = b"".join(records)[: 60 << 10]
    if rng.random() < 0.5:
        data = damaged(rng, data, records)
    with _said(data) as connection:
        control, taken = RecordSocket(connection, PATIENCE_S), 0
        with expected():
            while True:
                record = control.receive(PATIENCE_S)
                whole = HEAD.pack(len(record.body), record.tag) + record.body
                require(data[taken : taken + len(whole)] == whole, "a record nobody has said")
                taken += len(whole)
        rest = data[taken:]
        length, tag = HEAD.unpack_from(rest.ljust(HEAD.size, b"\0"))
        whole = len(rest) >= HEAD.size and tag in list(Tag) and length <= len(rest) - HEAD.size
        require(not whole, "a record that was said is not heard")
    with _said(data) as connection:
        groups, pairs = NoGroups("gloo", "127.0.0.1", PATIENCE_S), Pairs(limit=rng.randrange(2))
        ends = Ends(groups, pairs, sites.watch, inline_bytes=0)
        control = RecordSocket(connection, PATIENCE_S)
        _converse(DistWire(control, ends, "peer"), rng, data)
        require(pairs.num_pairs == 0, "room for a pair is lost")


def _record(rng: random.Random, sites: Sites) -> bytes:
    tag = rng.choice((*Tag, Tag.FRAME, Tag.FRAME))
    match tag:
        case Tag.FRAME:
            frame = rng.choice(sites.frames)
            body = sites.changed(rng, frame) if rng.random() < 0.3 else frame
        case Tag.TENSOR:
            body = rng.choice(EDGES).to_bytes(4, "little")
        case Tag.USE:
            body = bytes([rng.randrange(4)])
        case _:
            body = rng.randbytes(rng.choice((0, 0, 1, 16)))
    length = rng.choice(EDGES) if rng.random() < 0.1 else len(body)
    return HEAD.pack(length, rng.randrange(256) if rng.random() < 0.1 else tag) + body


def _frames_said(data: bytes) -> Iterator[bytes]:
    """The bodies of FRAME records, each head taken at its word."""
    while len(data) >= HEAD.size:
        length, tag = HEAD.unpack_from(data)
        if tag == Tag.FRAME:
            yield data[HEAD.size : HEAD.size + length]
        data = data[HEAD.size + length :]


def _converse(wire: DistWire, rng: random.Random, data: bytes) -> None:
    """Hear the peer out: what is heard are the frames that it said, in their order."""
    said, heard = b"".join(_frames_said(data)), b""
    apart = rng.random() < 0.5
    try:
        with expected():
            while True:
                if not apart:
                    parcel = wire.receive()
                    if parcel is None:
                        break
                    heard += parcel
                    continue
                head = wire.receive_header()
                if head is None:
                    break
                place = memoryview(bytearray(decode_header(head, SEED).num_bytes))
                cut = rng.randrange(len(place) + 1)
                wire.receive_into([place[:cut], place[cut:]])
    finally:
        wire.cancel()
        wire.finish()
        wire.hung_up()
    require(said.startswith(heard), "frames that nobody has said")


class NoGroups(Groups):
    """Where no pair can be built."""

    def build(self, control: RecordSocket, rank: int) -> Any:
        raise KVLost("nothing is built here")


def mapping(sites: Sites, rng: random.Random) -> None:
    """MemoryMap as a peer's address tells it: all that it leads to lies in the memory it tells."""
    text = numbers_changed(rng, rng.choice(sites.talks).site.p.map.to_text())
    with expected():
        told = MemoryMap.from_text(text)
        blocks = [rng.choice(EDGES[:10]) for _ in range(rng.randrange(6))]
        start, end = (rng.choice(EDGES[:9]) for _ in range(2))
        heads = range(*sorted(rng.choices(EDGES[:5], k=2)))
        layer = rng.randrange(len(told.layers))
        for piece in told.pieces(layer, blocks, (start, end), heads):
            after = piece.offset + (piece.rows - 1) * piece.row_stride + piece.row_bytes
            require(piece.offset >= 0, "a piece before the memory")
            require(after <= told.num_bytes, "a piece beyond the memory")


@contextmanager
def _said(data: bytes) -> Iterator[socket.socket]:
    """A connection on which the peer has said `data` and gone."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(data)
        theirs.shutdown(socket.SHUT_WR)
        yield ours
