"""The fetching half against a peer that says anything: the conversation that a node holds
(fetcher.py), over wires of parcels, wires that scatter, and the `shm` lane's, which reads P's pool
by P's own word."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence

from baton.protocol.errors import KVLost
from baton.protocol.handles import LaneAddress
from kv_transfer.fetcher import Conversation, Fetched, Fetcher
from kv_transfer.lanes.shm import MAP, ShmLane
from kv_transfer.lanes.wires import WirePool
from kv_transfer.pool.layout import ArenaMemory
from kv_transfer.protocol.base import Blocks, KVSpan, Lane, Payload, Serve, Wire
from kv_transfer.protocol.bodies import decode_body
from kv_transfer.protocol.fetch_session import Intent, WantedExport
from kv_transfer.protocol.frames import HEADER_BYTES, Buffer, decode, split
from kv_transfer.protocol.identity import Side
from kv_transfer.protocol.messages import Hello
from kv_transfer.stats import TransferStats
from tests.fakes import FakeClock
from tests.fuzz.mutations import numbers_changed, reordered
from tests.fuzz.sites import ND, NP, SEED, TOKENS, P, Site, Sites, Talk, control, expected, require
from tests.transfer.pools import UNTOUCHED, fill_untouched

Harm = Callable[[list[bytes]], list[bytes]]


class Said:
    """base.Wire of a peer that says `frames`, whatever it hears, in parcels of any size."""

    def __init__(self, rng: random.Random, frames: Sequence[bytes], harm: Harm) -> None:
        self._rng = rng
        self._frames = frames
        self._harm = harm
        self.left: deque[bytes] | None = None

    def send(self, parcel: bytes) -> None:
        if self.left is None:
            frame = decode(next(split(parcel)), SEED)
            heard, frames = decode_body(frame.header.kind, frame.payload), list(self._frames)
            if isinstance(heard, Hello):
                frames.insert(0, control(P.hello(Side.EXPORTER, NP, heard.nonce)))
            self.left = deque(self._harm(frames))

    def receive(self) -> Buffer | None:
        if not self.left:
            return None
        count = min(len(self.left), self._rng.choice((1, 1, 1, 2, 3, 9)))
        return b"".join(self.left.popleft() for _ in range(count))

    def finish(self) -> None:
        """It says what it wants to."""

    def cancel(self) -> None:
        self.left = deque()


class SaidApart(Said):
    """base.ScatterWire of the same."""

    def receive_header(self) -> bytes | None:
        return self._take(HEADER_BYTES) if self.left else None

    def receive_into(self, views: Sequence[memoryview]) -> None:
        for view in views:
            view[:] = self._take(len(view))

    def _take(self, size: int) -> bytes:
        assert self.left is not None
        data = b"".join(self.left)
        self.left = deque([data[size:]] if data[size:] else [])
        if len(data) < size:
            raise KVLost("the peer left in mid-frame")
        return data[:size]


class SaidLane:
    """base.Lane to such a peer."""

    name = "said"
    direct = False

    def __init__(self, new_wire: Callable[[], Wire]) -> None:
        self._new_wire = new_wire

    def start(self, boot_id: str, serve: Serve) -> LaneAddress:
        return LaneAddress(self.name, boot_id)

    def reaches(self, address: LaneAddress) -> bool:
        return True

    def open(self, address: LaneAddress) -> Wire:
        return self._new_wire()

    def stop(self) -> None:
        """There is nothing to stop."""


class Watched:
    """base.KVMemory that takes down which tokens are written."""

    def __init__(self, memory: ArenaMemory) -> None:
        self._memory = memory
        self.layers, self.format, self.windowed = memory.layers, memory.format, memory.windowed
        self.heads, self.read, self.group = memory.heads, memory.read, memory.group
        self.tables, self.written, self.landed = memory.tables, memory.written, memory.landed
        self.read_state, self.write_state = memory.read_state, memory.write_state
        self.spans: list[KVSpan] = []

    def views(
        self, layer: int, blocks: Blocks, start: int, end: int, heads: range
    ) -> Sequence[memoryview] | None:
        views = self._memory.views(layer, blocks, start, end, heads)
        if views is not None:
            self.spans.append(KVSpan(layer, start, end, heads))
        return views

    def write(self, layer: int, blocks: Blocks, start: int, end: int, payload: Payload) -> None:
        heads = self.heads(layer) if payload.heads is None else payload.heads
        span = KVSpan(layer, start, end, heads)
        if self.spans[-1:] != [span]:  # else its views were asked for, and did not suit
            self.spans.append(span)
        self._memory.write(layer, blocks, start, end, payload)


def harmed(sites: Sites, rng: random.Random, frames: Sequence[bytes]) -> list[bytes]:
    """What becomes of a conversation on the way."""
    out = reordered(rng, frames)
    for _ in range(rng.choice((0, 1, 1, 2))):
        if out:
            at = rng.randrange(len(out))
            out[at] = sites.changed(rng, out[at])
    if rng.random() < 0.02:
        out.insert(rng.randrange(len(out) + 1), b"")  # a parcel without a frame
    return out


def fetching(sites: Sites, rng: random.Random) -> None:
    """Whole conversations, on fresh connections and on kept ones."""
    hold(sites, rng, rng.choice(sites.talks))


def hold(sites: Sites, rng: random.Random, talk: Talk) -> None:
    """One conversation to its end, and what must be true after it."""
    site, wanted = talk.site, talk.wanted
    fill_untouched(site.d.arena)
    lane, address, wire = _way(sites, rng, talk)
    memory, wires = Watched(site.d.memory), WirePool(FakeClock(), 10.0)
    shared = Fetcher(site.fetcher, memory, TransferStats(), wires, FakeClock())
    conversation = Conversation(shared, lane, address, wanted, site.d.blocks)
    if rng.random() < 0.5:
        key, hello = (lane.name, address.address, P.boot_id), P.hello(Side.EXPORTER, NP, ND)
        wires.give(key, wire(), hello)
    fetched: Fetched | None = None
    with expected():
        fetched = conversation.run(lambda: None)
        if fetched.remote is not None and isinstance(lane, ShmLane) and lane.lends(address):
            _borrow(lane, address, site, fetched.remote.tables)
    wires.close()
    _check_written(site, wanted, memory.spans, fetched)


def _way(
    sites: Sites, rng: random.Random, talk: Talk
) -> tuple[Lane, LaneAddress, Callable[[], Wire]]:
    """The lane that `talk` is held on, P's address there, and further wires of the same."""
    kind = Said if talk.wanted.codec == "direct" or rng.random() < 0.5 else SaidApart

    def said() -> Wire:
        return kind(rng, talk.frames, lambda frames: harmed(sites, rng, frames))

    inner = SaidLane(said)
    if talk.wanted.codec != "direct":
        return inner, LaneAddress(inner.name, P.boot_id), said
    p, d = talk.site.p, talk.site.d
    address = ShmLane(inner, p.shared, p.map).start(P.boot_id, lambda *_: iter(()))
    if rng.random() < 0.2:
        address = lying(rng, address)
    lane = ShmLane(inner, d.shared, d.map)
    return lane, address, lambda: lane.open(address)


def lying(rng: random.Random, address: LaneAddress) -> LaneAddress:
    """Of a peer that says something else about where its pool lies."""
    attributes = dict(address.attributes)
    attributes[MAP] = numbers_changed(rng, attributes[MAP])
    return LaneAddress(address.name, address.address, tuple(attributes.items()))


def _borrow(
    lane: ShmLane, address: LaneAddress, site: Site, tables: Sequence[Sequence[int]]
) -> None:
    """As an adoption would: every page that is lent can be touched."""
    for table in tables:
        loan = lane.borrow(address, table)
        try:
            pages = site.d.shared.pages()
            for page in loan.ids:
                require(page >= site.d.map.num_blocks, "a page of our own passes for another's")
                pages[page].sum()
        finally:
            loan.end()


def _check_written(
    site: Site, wanted: WantedExport, spans: Sequence[KVSpan], fetched: Fetched | None
) -> None:
    upto = [site.first(layer, wanted) for layer in range(len(site.layers))]
    for span in spans:
        require(span.start == upto[span.layer], "tokens twice, or never")
        require(span.end <= TOKENS, "tokens beyond the export")
        require(span.heads == range(site.layers[span.layer].kv_heads), "heads that are not there")
        upto[span.layer] = span.end
    if fetched is not None and wanted.intent is Intent.FETCH:
        require(min(upto) == TOKENS, "an END before everything is there")
        require(fetched.end is not None, "complete without an END")
    memory, blocks = site.d.memory, site.d.blocks
    size = memory.format.block_size
    for layer, spec in enumerate(site.layers):
        held, heads = blocks[memory.group(layer)], range(spec.kv_heads)
        first = held.first * size
        for start, end in ((first, site.first(layer, wanted)), (TOKENS, held.end * size)):
            rows = b"".join(memory.read(layer, blocks, start, max(start, end), heads))
            same = rows.count(UNTOUCHED) == len(rows)
            require(same, "rows that nobody asked for were written")
    pages = site.d.shared.pages()[site.others].numpy().tobytes()
    require(pages.count(UNTOUCHED) == len(pages), "other sequences' blocks were written")
