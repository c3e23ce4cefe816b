"""The `shm` lane: the fetcher maps the exporter's pool and copies straight out of it.

Frames (who may read what, from when on, was the lease held) travel over an inner two-sided lane.
The KV bytes cross no socket: the fetcher's own thread copies them once, from pool to pool. If the
exporter dies, its mapped memory stays readable, but nobody confirms the lease, so it is not used.

A peer names a file, never a path: it must lie in the configured directory, belong to this user and
be closed to all others (shm_arena.py). Block ids and heads are checked against the peer's map.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

import numpy as np
import numpy.typing as npt

from baton.protocol.errors import KVCorrupt, KVError, KVLost, KVRefused
from baton.protocol.handles import LaneAddress
from kv_transfer.lanes.shm_arena import ArenaPlace, Attached, ShmArena
from kv_transfer.pool.memory_map import MemoryMap, Piece
from kv_transfer.protocol.base import KVSpan, Lane, Payload, Remote, Serve, Target, Wire
from kv_transfer.protocol.frames import Buffer
from kv_transfer.protocol.shares import heads_of

Bytes = npt.NDArray[np.uint8]

FILE: Final = "file"  # attributes of the address
INODE: Final = "inode"
MAP: Final = "map"
INNER: Final = "inner"
DIGITS: Final = 20
MAX_PEERS: Final = 64  # peers whose parsed attributes are cached


@dataclass(frozen=True, slots=True)
class _ShmPeer:
    place: ArenaPlace
    map: MemoryMap


class ShmLane:
    """Implements base.Lane and lending.LendingLane over one host's shared memory.

    `inner`: a lane of its own for the frames. `pool`: how our pool lies in `arena`; the arena's
    page ids are the pool's block ids.
    """

    name = "shm"
    direct = True

    def __init__(self, inner: Lane, arena: ShmArena, pool: MemoryMap) -> None:
        self._inner = inner
        self._arena = arena
        self._pool = pool
        self._peer_of = lru_cache(MAX_PEERS)(_peer_of)

    def start(self, boot_id: str, serve: Serve) -> LaneAddress:
        inner = self._inner.start(boot_id, lambda _, peer: serve(self.name, peer))
        place = self._arena.place
        own = ((FILE, place.name), (INODE, str(place.inode)), (MAP, self._pool.to_text()))
        return LaneAddress(self.name, inner.address, (*own, (INNER, inner.name), *inner.attributes))

    def reaches(self, address: LaneAddress) -> bool:
        try:
            peer = self._peer_of(address)
        except KVError:
            return False
        return self._arena.reaches(peer.place) and self._inner.reaches(self._inside(address))

    def open(self, address: LaneAddress) -> Wire:
        wire = self._inner.open(self._inside(address))
        return ShmWire(wire, self._arena, lambda: self._peer_of(address))

    def lends(self, address: LaneAddress) -> bool:
        try:
            theirs, ours = self._peer_of(address).map, self._pool
        except KVError:
            return False
        # Strides as well: then a peer's page has the size and the offsets of our own pages.
        return (theirs.block_size, theirs.layers) == (ours.block_size, ours.layers)

    def borrow(self, address: LaneAddress, pages: Sequence[int]) -> ShmLoan:
        peer = self._peer_of(address)
        if pages and not 0 <= min(pages) <= max(pages) < peer.map.num_blocks:
            raise KVCorrupt(f"a block outside a pool of {peer.map.num_blocks}")
        attached = self._arena.attach(peer.place)
        base = self._arena.foreign_base(attached)
        return ShmLoan(self._arena, attached, tuple(base + page for page in pages))

    def want_back(self, wanted: bool) -> None:
        self._arena.want_back(wanted)

    def let_go(self) -> None:
        self._arena.let_go()

    def stop(self) -> None:
        """Stop the inner lane. Whoever made the arena closes it."""
        self._inner.stop()

    def _inside(self, address: LaneAddress) -> LaneAddress:
        return replace(address, name=self._inner.name)


class ShmLoan:
    """Implements lending.Loan: the peer's file stays mapped until the loan ends."""

    def __init__(self, arena: ShmArena, attached: Attached, ids: tuple[int, ...]) -> None:
        self.ids = ids
        self._arena = arena
        self._lock = threading.Lock()
        self._attached: Attached | None = attached

    def orphaned(self) -> bool:
        with self._lock:
            return self._attached is not None and self._arena.orphaned(self._attached)

    def wanted(self) -> bool:
        with self._lock:
            return self._attached is not None and self._arena.wanted(self._attached)

    def end(self) -> None:
        with self._lock:
            attached, self._attached = self._attached, None
        if attached is not None:
            self._arena.detach(attached)


class ShmWire:
    """Implements base.DirectWire. Frames use the inner wire; the first pull maps the peer's
    file.
    """

    def __init__(self, inner: Wire, arena: ShmArena, find: Callable[[], _ShmPeer]) -> None:
        """`find` returns where the peer's pool is, or raises KVCorrupt."""
        self._inner = inner
        self._arena = arena
        self._find = find
        self._cancelled = threading.Event()
        self._peer: _ShmPeer | None = None
        self._attached: Attached | None = None
        self._bytes: Bytes = np.empty(0, np.uint8)
        self._scratch: Bytes = np.empty(0, np.uint8)

    def send(self, parcel: bytes) -> None:
        self._inner.send(parcel)

    def receive(self) -> Buffer | None:
        return self._inner.receive()

    def finish(self) -> None:
        self._inner.finish()
        attached, self._attached = self._attached, None
        if attached is not None:
            self._bytes = self._bytes[:0]
            self._arena.detach(attached)

    def cancel(self) -> None:
        self._cancelled.set()
        self._inner.cancel()

    def pull(self, span: KVSpan, source: Remote, target: Target) -> None:
        peer = self._peer or self._attach(source, target)
        spec = target.memory.layers[span.layer]
        held = heads_of(spec.kv_heads, source.format)
        heads = range(span.heads.start - held.start, span.heads.stop - held.start)
        table = source.table(span.layer, target.memory)
        pieces = peer.map.pieces(span.layer, table, (span.start, span.end), heads)
        views = None
        if source.format.dtype == target.memory.format.dtype:
            views = target.memory.views(span.layer, target.blocks, span.start, span.end, span.heads)
        if views is not None and all(piece.dense for piece in pieces):
            self._copy([self._run(piece) for piece in pieces], views)
            return
        packed = self._pack(pieces)
        payload = Payload(packed.data, source.format.dtype, span.heads)
        target.memory.write(span.layer, target.blocks, span.start, span.end, payload)

    def settle(self) -> None:
        """Do nothing: a pull has landed when it returns."""

    def _attach(self, source: Remote, target: Target) -> _ShmPeer:
        peer = self._find()
        if (
            not peer.map.fits(target.memory.layers, source.format.dtype)
            or peer.map.block_size != source.format.block_size
        ):
            raise KVRefused("the peer's pool is not what its format says")
        self._attached = self._arena.attach(peer.place)
        self._bytes = self._arena.foreign_bytes(self._attached).numpy()
        self._peer = peer
        return peer

    def _run(self, piece: Piece) -> Bytes:
        return self._bytes[piece.offset : piece.offset + piece.num_bytes]

    def _copy(self, sources: Sequence[Bytes], views: Sequence[memoryview]) -> None:
        """Copy runs of bytes into `views` of the same total length; numpy releases the GIL."""
        waiting = iter(sources)
        source = np.empty(0, np.uint8)
        for view in views:
            place = np.frombuffer(view, np.uint8)
            while len(place):
                if not len(source):
                    self._go_on()
                    source = next(waiting)
                size = min(len(place), len(source))
                np.copyto(place[:size], source[:size])
                place, source = place[size:], source[size:]

    def _pack(self, pieces: Sequence[Piece]) -> Bytes:
        """Copy the pieces one after the other into memory of our own, and return it."""
        total = sum(piece.num_bytes for piece in pieces)
        if len(self._scratch) < total:
            self._scratch = np.empty(total, np.uint8)
        taken = 0
        for piece in pieces:
            self._go_on()
            place = self._scratch[taken : taken + piece.num_bytes]
            shape, strides = (piece.rows, piece.row_bytes), (piece.row_stride, 1)
            rows = np.ndarray(shape, np.uint8, self._bytes, piece.offset, strides)
            np.copyto(place.reshape(shape), rows)
            taken += piece.num_bytes
        return self._scratch[:total]

    def _go_on(self) -> None:
        if self._cancelled.is_set():
            raise KVLost("cancelled")


def _peer_of(address: LaneAddress) -> _ShmPeer:
    """Return the pool that the address describes. Raises KVCorrupt for attributes that do not."""
    attributes = dict(address.attributes)
    inode = attributes.get(INODE, "")
    if not (inode.isascii() and inode.isdigit() and len(inode) <= DIGITS):
        raise KVCorrupt("an arena without an inode")
    memory_map = MemoryMap.from_text(attributes.get(MAP, ""))
    place = ArenaPlace(attributes.get(FILE, ""), int(inode), memory_map.num_bytes)
    return _ShmPeer(place, memory_map)
