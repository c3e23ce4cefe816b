"""The fetching side of one conversation: performs what FetcherSession asks for.

It blocks by design: fetches.py runs it in a thread of the data plane and bridges the result to
asyncio. `cancel` may be called from any thread at any time. After `run` has returned, no thread
touches the blocks.
"""

from __future__ import annotations

import secrets
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from baton.protocol.clock import Clock
from baton.protocol.errors import InternalError, KVCorrupt, KVLost, KVRefused
from baton.protocol.handles import LaneAddress
from kv_transfer.lanes.wires import WirePool
from kv_transfer.protocol.base import (
    Blocks,
    DirectWire,
    KVMemory,
    KVSpan,
    Lane,
    Remote,
    ScatterWire,
    Target,
    Wire,
)
from kv_transfer.protocol.bodies import decode_body, encode_body, kind_of
from kv_transfer.protocol.fetch_session import FetcherSession, Intent, WantedExport
from kv_transfer.protocol.frames import (
    Announced,
    Kind,
    decode,
    decode_header,
    encode,
    seed_of,
    split,
)
from kv_transfer.protocol.identity import Identity
from kv_transfer.protocol.messages import NONCE_BYTES, End, Hello, Message
from kv_transfer.protocol.session import header_of
from kv_transfer.protocol.shares import rows_bytes
from kv_transfer.protocol.steps import (
    Arrived,
    Closed,
    FetcherAction,
    FetcherEvent,
    Landed,
    Pull,
    Send,
    Settle,
    Start,
    Write,
    WriteState,
)
from kv_transfer.stats import TransferStats

MOST_GROUPS: Final = 16  # of layers, that a fetch tells
# Layer -> from when its KV came, until when (seconds of the clock), how many bytes.
Arrivals: TypeAlias = dict[int, tuple[float, float, int]]


@dataclass(frozen=True, slots=True)
class Fetcher:
    """The fetching half of a connector: what all its conversations share."""

    identity: Identity
    memory: KVMemory
    stats: TransferStats
    wires: WirePool
    clock: Clock


@dataclass(frozen=True, slots=True)
class Fetched:
    """The result of a conversation.

    `end` is None unless the conversation was a fetch. `remote` is None unless it was a direct
    fetch. `arrivals`: of the layers whose bytes came.
    """

    end: End | None
    num_bytes: int
    lane: str
    arrivals: Arrivals
    remote: Remote | None = None


class Conversation:
    """One conversation with an exporter: `wanted.intent` says if it fetches, renews or releases."""

    def __init__(
        self,
        shared: Fetcher,
        lane: Lane,
        address: LaneAddress,
        wanted: WantedExport,
        blocks: Blocks,
    ) -> None:
        self._shared = shared
        self._lane = lane
        self._address = address
        self._wanted = wanted
        self._target = Target(shared.memory, blocks)
        self._seed = seed_of(wanted.handle.boot_id)
        self._session = self._new_session(None)
        self._inbox: deque[memoryview] = deque()  # frames of the last parcel
        self._num_bytes = 0
        self._arrivals: Arrivals = {}
        self._came_at = 0.0  # when the last parcel came
        self._answered = False  # the exporter has sent something in this conversation
        self._unsuited = False
        self._scatter: ScatterWire | None = None
        self._lock = threading.Lock()
        self._wire: Wire | None = None
        self._cancelled = False

    def _new_session(self, peer: Hello | None) -> FetcherSession:
        shared, nonce = self._shared, secrets.token_bytes(NONCE_BYTES)
        return FetcherSession(shared.identity, nonce, shared.memory.layers, self._wanted, peer)

    @property
    def elsewhere(self) -> bool:
        """Whether another lane may be tried after a failure: true if this one did not begin to
        serve.
        """
        greeted = self._answered and self._session.peer is not None  # not turned away before HELLO
        return self._unsuited or not greeted

    def cancel(self) -> None:
        """Break the conversation: `run` soon raises KVLost. Any thread, any time, idempotent."""
        with self._lock:
            self._cancelled = True
            wire = self._wire
        if wire is not None:
            wire.cancel()

    def run(self, on_progress: Callable[[], None]) -> Fetched:
        """Hold the conversation to its end. Raises the KVError that ended it.

        `on_progress` is called at the start and at each parcel.
        """
        on_progress()
        boot_id = self._wanted.handle.boot_id
        wires, key = self._shared.wires, (self._lane.name, self._address.address, boot_id)
        kept = wires.take(key)
        if kept is not None:
            self._shared.stats.connected(self._lane.name, reused=True)
            self._session = self._new_session(kept.peer)
            try:
                self._hold(kept.wire, on_progress)
            except KVLost:
                # The exporter may have closed the kept connection; then it has received nothing of
                # ours.
                if self._answered or self._cancelled:
                    raise
                kept = None
                self._session = self._new_session(None)
        if kept is not None:
            wire = kept.wire
        else:
            self._shared.stats.connected(self._lane.name, reused=False)
            wire = self._lane.open(self._address)
            self._hold(wire, on_progress)
        assert self._session.peer is not None
        wires.give(key, wire, self._session.peer)
        session = self._session
        return Fetched(
            session.end, self._num_bytes, self._lane.name, self._arrivals, session.remote
        )

    def _hold(self, wire: Wire, on_progress: Callable[[], None]) -> None:
        with self._lock:
            self._wire = wire
            cancelled = self._cancelled
        if cancelled:
            wire.cancel()
        self._scatter = wire if isinstance(wire, ScatterWire) else None
        try:
            self._converse(wire, on_progress)
            if self._inbox:
                raise KVCorrupt("more frames than the conversation has")
        except BaseException:
            wire.cancel()
            wire.finish()
            raise
        finally:
            if self._wanted.intent is Intent.FETCH:
                self._shared.memory.landed()
            with self._lock:
                self._wire = None  # a later cancel must not break the next conversation

    def _converse(self, wire: Wire, on_progress: Callable[[], None]) -> None:
        event: FetcherEvent = Start()
        while True:
            self._perform_all(self._session.receive(event), wire)
            if self._session.done:
                return
            event = self._next(wire, on_progress)

    def _next(self, wire: Wire, on_progress: Callable[[], None]) -> FetcherEvent:
        try:
            if self._scatter is not None:
                head = self._scatter.receive_header()
                self._came_at = self._shared.clock.monotonic()
                on_progress()
                if head is None:
                    return Closed()
                self._answered = True
                return self._receive_payload(self._scatter, decode_header(head, self._seed))
            if not self._inbox:
                parcel = wire.receive()
                self._came_at = self._shared.clock.monotonic()
                on_progress()
                if parcel is None:
                    return Closed()
                self._answered = True
                self._inbox.extend(split(parcel))
            if not self._inbox:
                raise KVCorrupt("empty parcel")
            frame = decode(self._inbox.popleft(), self._seed)
            return Arrived(frame.header, decode_body(frame.header.kind, frame.payload))
        except KVCorrupt:
            self._shared.stats.refused_frame(self._lane.name)
            raise

    def _receive_payload(self, wire: ScatterWire, head: Announced) -> FetcherEvent:
        """Receive a payload straight into the pool if its bytes need no conversion, else into a
        buffer.

        Damaged bytes do no harm in the pool: nobody uses the blocks before END.
        """
        header, num_bytes = head.header, head.num_bytes
        if header.kind is Kind.DATA and num_bytes and self._session.in_pool_dtype:
            span = self._session.expect(header, num_bytes)
            views = self._shared.memory.views(
                span.layer, self._target.blocks, span.start, span.end, span.heads
            )
            if views is not None:
                wire.receive_into(views)
                head.verify(views)
                self._count(span.layer, num_bytes)
                return Landed(header, num_bytes)
        payload = memoryview(bytearray(num_bytes))
        wire.receive_into([payload])
        head.verify([payload])
        return Arrived(header, decode_body(header.kind, payload))

    def _perform_all(self, actions: Sequence[FetcherAction], wire: Wire) -> None:
        frames = [self._encode(action.message) for action in actions if isinstance(action, Send)]
        for action in actions:
            self._perform(action, wire)
        if frames:
            wire.send(b"".join(frames))  # sent last: Settle comes before CONFIRM

    def _perform(self, action: FetcherAction, wire: Wire) -> None:
        match action:
            case Write(span, payload):
                self._shared.memory.write(
                    span.layer, self._target.blocks, span.start, span.end, payload
                )
                self._count(span.layer, len(payload.data))
            case WriteState(span, data):
                self._shared.memory.write_state(span.layer, self._target.blocks, span.start, data)
                self._count(span.layer, len(data))
                self._shared.stats.state_received(self._lane.name, len(data))
            case Pull(span, source):
                try:
                    _direct(wire).pull(span, source, self._target)
                except KVRefused:
                    self._unsuited = True
                    raise
                self._count(span.layer, self._bytes_of(span, source.format.dtype))
            case Settle():
                _direct(wire).settle()
            case Send():
                pass

    def _bytes_of(self, span: KVSpan, dtype: str) -> int:
        spec = self._shared.memory.layers[span.layer]
        return (span.end - span.start) * rows_bytes(spec, len(span.heads), dtype)

    def _count(self, layer: int, num_bytes: int) -> None:
        """Note bytes of a layer that are here now; over nixl: whose read has begun."""
        start, _, before = self._arrivals.get(layer, (self._came_at, 0.0, 0))
        self._arrivals[layer] = start, self._shared.clock.monotonic(), before + num_bytes
        self._num_bytes += num_bytes
        self._shared.stats.received(self._lane.name, num_bytes)

    def _encode(self, message: Message) -> bytes:
        header = header_of(kind_of(message), self._session.export_seq, self._session.epoch)
        return encode(header, [encode_body(message)], self._seed)


def _direct(wire: Wire) -> DirectWire:
    if not isinstance(wire, DirectWire):
        raise InternalError("codec direct on a lane whose wires cannot pull")
    return wire


def grouped(parts: Sequence[Arrivals], num_layers: int, began: float) -> tuple[int, ...]:
    """Return `NodeSpan.layers` of a fetch that began at `began`, from what each exporting rank has
    sent of a model of `num_layers` layers. More than MOST_GROUPS of them are told in groups of
    equal size; groups of which nothing came are left out.
    """
    size = -(-num_layers // MOST_GROUPS)
    found: dict[int, tuple[float, float, int]] = {}
    for arrivals in parts:
        for layer, (start, end, num_bytes) in arrivals.items():
            group = layer // size
            first, last, total = found.get(group, (start, end, 0))
            found[group] = min(first, start), max(last, end), total + num_bytes
    numbers: list[int] = []
    for group, (start, end, num_bytes) in sorted(found.items()):
        times = (max(0, int((at - began) * 1e6)) for at in (start, end))
        numbers += group * size, min((group + 1) * size, num_layers) - 1, *times, num_bytes
    return tuple(numbers)
