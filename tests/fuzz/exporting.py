"""The exporting half with a real export table, while the prefill goes on and time passes: whatever
is asked, nothing stays pinned but for a promise, and that ends."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

from baton.protocol.errors import KVError
from baton.protocol.kv_spec import PoolFormat
from baton.runtime.timing import Timing
from kv_transfer.exporter import Exporter
from kv_transfer.exports import ExportTable
from kv_transfer.protocol.bodies import decode_body
from kv_transfer.protocol.frames import decode, split
from kv_transfer.protocol.identity import Identity, Side
from kv_transfer.protocol.leases import Leases
from kv_transfer.protocol.messages import DIRECT, Fetch, Hello, Message
from kv_transfer.stats import TransferStats
from tests.fakes import FakeClock
from tests.fuzz.mutations import EDGES
from tests.fuzz.sites import (
    HANDLE,
    LEASE_MS,
    ND,
    QUESTIONS,
    SEED,
    SEQ,
    TOKENS,
    P,
    Site,
    Sites,
    control,
    expected,
    require,
)

SOON = Timing(kv_progress_s=0.001)  # nothing here is worth waiting for
LEASE_S = LEASE_MS / 1000
BYTES = 1 << 12  # of an export, as far as bursts are concerned


class Peer:
    """A fetcher (base.Incoming) of a live exporter; it proves itself, unless `rng` says no."""

    buffer: memoryview | None = None

    def __init__(
        self, sites: Sites, rng: random.Random, identity: Identity, then: list[Message]
    ) -> None:
        self._sites = sites
        self._rng = rng
        self._identity = identity
        self._then = then
        self._said = 0
        self.nonce: bytes | None = None

    def receive(self, timeout_s: float) -> bytes | None:
        rng, said = self._rng, self._said
        self._said += 1
        if said < 2:
            frame = control(self._identity.hello(Side.FETCHER, ND, self.nonce if said else None))
            return self._sites.changed(rng, frame) if rng.random() < 0.05 else frame
        if not self._then:
            return None
        frame = control(self._then.pop(0))
        frame = self._sites.changed(rng, frame) if rng.random() < 0.5 else frame
        return frame if rng.random() < 0.9 else frame + control(rng.choice(rng.choice(QUESTIONS)))

    def on_closed(self, callback: Callable[[], None]) -> None:
        pass


class Prefill:
    """What happens to the export meanwhile, a little at each parcel: most of it is progress."""

    def __init__(
        self, rng: random.Random, table: ExportTable, clock: FakeClock, layers: int
    ) -> None:
        self._rng = rng
        self._table = table
        self._clock = clock
        self._left = [(layer, upto) for upto in (9, TOKENS) for layer in range(layers)]
        self._done = False
        if rng.random() < 0.5:
            self._on(len(self._left))

    def go_on(self) -> None:
        rng = self._rng
        self._on(rng.randrange(4))
        if rng.random() < 0.02:
            self._clock.advance(LEASE_S * rng.choice((0.6, 1.1)))
        if rng.random() < 0.02:
            self._table.release(SEQ, KVError("released meanwhile"))

    def _on(self, count: int) -> None:
        for layer, upto in self._left[:count]:
            self._table.publish(SEQ, layer, upto)
        self._left = self._left[count:]
        if not self._left and not self._done:
            self._done = True
            self._table.complete(SEQ, ())


def exporting(sites: Sites, rng: random.Random) -> None:
    """Exporter.serve over a site's pool."""
    serve(sites, rng, rng.choice(sites.talks).site, rng.choice(QUESTIONS))


def serve(sites: Sites, rng: random.Random, site: Site, questions: Sequence[Message]) -> None:
    """One connection to its end, on a direct lane half of the time."""
    freed, clock = list[str](), FakeClock()
    table = ExportTable(
        (1,) * len(site.layers), Leases(LEASE_S), clock, lambda _, blocks, why: freed.append(why)
    )
    table.add(replace(HANDLE, export_seq=table.next_sequence()), site.p.blocks, BYTES)
    prefill = Prefill(rng, table, clock, len(site.layers))
    windowed = site.p.memory.windowed
    question = [
        replace(each, windowed=windowed) if isinstance(each, Fetch) else each for each in questions
    ]
    peer = Peer(sites, rng, _identity(rng, site), question)
    exporter = Exporter(
        P, site.p.memory, table, SOON, clock, TransferStats(),
        direct=frozenset((DIRECT,)) if rng.random() < 0.5 else frozenset(),
        burst_bytes=rng.choice((0, 8, BYTES)), small_bytes=rng.choice((0, BYTES)),
    )  # fmt: skip
    with expected():
        for parcel in exporter.serve(DIRECT, peer):
            for piece in split(parcel):
                frame = decode(piece, SEED)
                message = decode_body(frame.header.kind, frame.payload)
                if isinstance(message, Hello):
                    peer.nonce = message.nonce
            prefill.go_on()
    table.release(SEQ, KVError("over"))
    clock.advance(LEASE_S)  # the end of every promise
    table.expire(clock.monotonic())
    require(table.num_exports == 0, "a reader is left behind")
    require(len(freed) == 1, f"freed {len(freed)} times")


def _identity(rng: random.Random, site: Site) -> Identity:
    """The fetcher's, sometimes that of an odd pool."""
    if rng.random() < 0.8:
        return site.fetcher
    tp_size = rng.choice((1, 2, 3, 8, 64))
    pool = PoolFormat(rng.choice(EDGES[1:]), "int8", tp_size, rng.randrange(tp_size))
    return replace(site.fetcher, format=pool)
