"""The `nixl` lane: the fetcher reads the exporter's registered pool, one-sided (RDMA, NVLink, UCX).

Frames travel over an inner two-sided lane, as in `shm`; the exporter's process takes no part in the
reads. Reads run while more tokens are announced. `settle` waits for them; only then may CONFIRM be
sent. However a conversation ends, no read can touch our blocks afterwards.

KV that cannot be read in place (another dtype, a slice of heads, a pool that is no plain memory) is
read into a registered scratch buffer and written to the pool from there.
"""

from __future__ import annotations

import base64
import binascii
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Final

import numpy as np
import torch

from baton.protocol.errors import KVCorrupt, KVError, KVLost, KVRefused, KVTimeout
from baton.protocol.handles import LaneAddress
from baton.runtime.timing import Timing
from kv_transfer.lanes.nixl_agent import BATCH, Agent, PageRun, Pump, Read, kind_of, load
from kv_transfer.pool.memory_map import MemoryMap, Piece
from kv_transfer.protocol.base import Incoming, KVSpan, Lane, Payload, Remote, Serve, Target, Wire
from kv_transfer.protocol.frames import Buffer
from kv_transfer.protocol.shares import heads_of, rows_bytes

AGENT: Final = "agent"  # attributes of the address
METADATA: Final = "metadata"
BASE: Final = "base"
KIND: Final = "kind"
MAP: Final = "map"
SCRATCH_BYTES: Final = 8 << 20
KINDS: Final = ("DRAM", "VRAM")
DIGITS: Final = 20
MAX_PEERS: Final = 64  # peers whose parsed attributes are cached


@dataclass(frozen=True, slots=True)
class NixlPool:
    """The pool to register with NIXL.

    `memory`: uint8, the whole KV pool, contiguous. `map`: how the blocks lie in it. `devices`: the
    network devices that UCX may use, comma-separated.
    """

    memory: torch.Tensor
    map: MemoryMap
    devices: str = "lo"


@dataclass(frozen=True, slots=True)
class _NixlPeer:
    agent: str
    base: int
    kind: str
    map: MemoryMap
    metadata: bytes = field(repr=False)


@dataclass(slots=True, eq=False)
class _Local:
    """What the wires of a started lane share."""

    agent: Agent
    pool: NixlPool
    timeout_s: float
    scratch: torch.Tensor
    lock: threading.Lock = field(default_factory=threading.Lock)  # guards scratch and peers
    peers: set[str] = field(default_factory=set[str])

    def meet(self, peer: _NixlPeer) -> None:
        """Make the peer known to the agent, unless it is. Raises KVCorrupt."""
        with self.lock:
            if peer.agent not in self.peers:
                self.agent.add_peer(peer.agent, peer.metadata)
                self.peers.add(peer.agent)

    def drop(self, agent: str) -> None:
        """Forget a failed peer: its next conversation must `meet` it anew."""
        with self.lock:
            self.peers.discard(agent)
            self.agent.drop_peer(agent)


class NixlLane:
    """Implements base.Lane over NIXL. `inner`: a lane of its own for the frames."""

    name = "nixl"
    direct = True

    def __init__(self, inner: Lane, pool: NixlPool, timing: Timing) -> None:
        self._inner = inner
        self._pool = pool
        self._timing = timing
        self._local: _Local | None = None
        self._pump: Pump | None = None
        self._peer_of = lru_cache(MAX_PEERS)(_peer_of)

    def start(self, boot_id: str, serve: Serve) -> LaneAddress:
        """Register the pool and start the inner lane. Raises ConfigError without NIXL."""
        agent = Agent(boot_id, self._pool.devices)
        scratch = torch.empty(SCRATCH_BYTES, dtype=torch.uint8)
        agent.register(self._pool.memory)
        metadata = agent.metadata()  # before the scratch is registered: peers need not reach it
        agent.register(scratch)
        pump = self._pump = Pump(agent, self._timing.kv_progress_s)
        self._local = _Local(agent, self._pool, self._timing.kv_progress_s, scratch)

        def serve_pumped(_: str, peer: Incoming) -> Iterator[Buffer]:
            for parcel in serve(self.name, peer):
                pump.poke()
                yield parcel

        inner = self._inner.start(boot_id, serve_pumped)
        own = (
            (AGENT, boot_id),
            (BASE, str(self._pool.memory.data_ptr())),
            (KIND, kind_of(self._pool.memory)),
            (MAP, self._pool.map.to_text()),
            (METADATA, base64.b64encode(metadata).decode()),
        )
        return LaneAddress(self.name, inner.address, (*own, *inner.attributes))

    def reaches(self, address: LaneAddress) -> bool:
        try:
            self._peer_of(address)
        except KVError:
            return False
        return load() is not None and self._inner.reaches(self._inside(address))

    def open(self, address: LaneAddress) -> Wire:
        wire = self._inner.open(self._inside(address))
        if self._local is None:
            return wire
        return NixlWire(wire, self._local, lambda: self._peer_of(address))

    def stop(self) -> None:
        self._inner.stop()
        if self._pump is not None:
            self._pump.stop()
            self._pump = None
        if self._local is not None:
            self._local.agent.close()
            self._local = None

    def _inside(self, address: LaneAddress) -> LaneAddress:
        return replace(address, name=self._inner.name)


class NixlWire:
    """Implements base.DirectWire."""

    def __init__(self, inner: Wire, local: _Local, find: Callable[[], _NixlPeer]) -> None:
        """`find` returns where the peer's pool is, or raises KVCorrupt."""
        self._inner = inner
        self._local = local
        self._find = find
        self._cancelled = threading.Event()
        self._peer: _NixlPeer | None = None
        self._reads: list[Read] = []

    def send(self, parcel: bytes) -> None:
        self._inner.send(parcel)

    def receive(self) -> Buffer | None:
        return self._inner.receive()

    def finish(self) -> None:
        """End the conversation. When this returns, no read can touch our memory any more."""
        self._abandon()
        self._inner.finish()

    def cancel(self) -> None:
        self._cancelled.set()
        self._inner.cancel()

    def pull(self, span: KVSpan, source: Remote, target: Target) -> None:
        peer = self._peer or self._meet(source, target)
        views = None
        if source.format.dtype == target.memory.format.dtype:
            views = target.memory.views(span.layer, target.blocks, span.start, span.end, span.heads)
        places = None if views is None else self._places(views)
        if places is None:
            self._pull_packed(peer, span, source, target)
        else:
            pieces = _pieces(peer, span, source, target)
            self._read(peer, places, pieces, kind_of(self._local.pool.memory))

    def settle(self) -> None:
        try:
            for read in self._reads:
                read.wait(self._local.timeout_s, self._cancelled)
        except (KVLost, KVTimeout) as error:
            self._abandon()
            if isinstance(error, KVLost) and self._peer and not self._cancelled.is_set():
                self._local.drop(self._peer.agent)
            raise
        self._reads.clear()

    def _meet(self, source: Remote, target: Target) -> _NixlPeer:
        peer = self._find()
        if (
            not peer.map.fits(target.memory.layers, source.format.dtype)
            or peer.map.block_size != source.format.block_size
        ):
            raise KVRefused("the peer's pool is not what its format says")
        self._local.meet(peer)
        self._peer = peer
        return peer

    def _places(self, views: Sequence[memoryview]) -> list[tuple[int, int]] | None:
        """Return (address, length) of each view; None if one lies outside the registered memory."""
        memory = self._local.pool.memory
        low, high = memory.data_ptr(), memory.data_ptr() + memory.nbytes
        places: list[tuple[int, int]] = []
        for view in views:
            address = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
            if not low <= address <= address + len(view) <= high:
                return None
            places.append((address, len(view)))
        return places

    def _read(
        self, peer: _NixlPeer, places: Sequence[tuple[int, int]], pieces: Sequence[Piece], kind: str
    ) -> None:
        runs = list(_matched(places, peer.base, pieces))
        for first in range(0, len(runs), BATCH):
            if self._cancelled.is_set():
                raise KVLost("cancelled")
            batch = runs[first : first + BATCH]
            self._reads.append(self._local.agent.read(peer.agent, batch, (kind, peer.kind)))

    def _pull_packed(self, peer: _NixlPeer, span: KVSpan, source: Remote, target: Target) -> None:
        local, dtype = self._local, source.format.dtype
        row_bytes = rows_bytes(target.memory.layers[span.layer], len(span.heads), dtype)
        step = SCRATCH_BYTES // row_bytes
        self.settle()
        for start in range(span.start, span.end, step):
            end = min(span.end, start + step)
            pieces = _pieces(peer, replace(span, start=start, end=end), source, target)
            size = (end - start) * row_bytes
            with local.lock:
                self._read(peer, [(local.scratch.data_ptr(), size)], pieces, "DRAM")
                self.settle()
                payload = Payload(local.scratch[:size].numpy().data, dtype, span.heads)
                target.memory.write(span.layer, target.blocks, start, end, payload)

    def _abandon(self) -> None:
        """Stop the reads under way; a read that cannot be stopped loses its connection."""
        self._reads = [read for read in self._reads if not read.release()]
        if self._reads and self._peer is not None:
            self._local.drop(self._peer.agent)
            self._reads = [read for read in self._reads if not read.release()]


def _pieces(peer: _NixlPeer, span: KVSpan, source: Remote, target: Target) -> list[Piece]:
    spec = target.memory.layers[span.layer]
    held = heads_of(spec.kv_heads, source.format)
    heads = range(span.heads.start - held.start, span.heads.stop - held.start)
    table = source.table(span.layer, target.memory)
    return peer.map.pieces(span.layer, table, (span.start, span.end), heads)


def _matched(
    places: Sequence[tuple[int, int]], base: int, pieces: Sequence[Piece]
) -> Iterator[PageRun]:
    """Yield copies that map `pieces` to `places`, cut at the borders of either list.

    Raises KVCorrupt if `pieces` have fewer bytes than `places`.
    """
    waiting = (
        (base + piece.offset, piece.num_bytes)
        if piece.dense
        else (base + piece.offset + row * piece.row_stride, piece.row_bytes)
        for piece in pieces
        for row in range(1 if piece.dense else piece.rows)
    )
    theirs, left = 0, 0
    for address, length in places:
        at = address
        while at < address + length:
            if left == 0:
                theirs, left = next(waiting, (0, 0))
                if left == 0:
                    raise KVCorrupt("fewer bytes than announced")
            size = min(left, address + length - at)
            yield PageRun(at, theirs, size)
            at, theirs, left = at + size, theirs + size, left - size


def _peer_of(address: LaneAddress) -> _NixlPeer:
    """Return the pool that the address describes. Raises KVCorrupt for attributes that do not."""
    attributes = dict(address.attributes)
    base, kind = attributes.get(BASE, ""), attributes.get(KIND, "")
    if not (base.isascii() and base.isdigit() and len(base) <= DIGITS) or kind not in KINDS:
        raise KVCorrupt("no address of a registered pool")
    try:
        metadata = base64.b64decode(attributes.get(METADATA, ""), validate=True)
    except binascii.Error as error:
        raise KVCorrupt(f"bad NIXL metadata: {error}") from error
    memory_map = MemoryMap.from_text(attributes.get(MAP, ""))
    return _NixlPeer(attributes.get(AGENT, ""), int(base), kind, memory_map, metadata)
