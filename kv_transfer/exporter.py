"""Serves connections on the exporting side: performs what ExporterSession asks for.

A thread of the lane runs one generator per connection. The generator yields parcels of frames. It
blocks in `Incoming.receive` or, while the prefill computes, in Reader.wait. The engine thread never
runs this code.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from baton.protocol.clock import Clock, deadline_from_ms
from baton.protocol.errors import InternalError, KVCorrupt, KVError
from baton.runtime.failpoints import FAILPOINTS
from baton.runtime.timing import Timing
from kv_transfer.exports import ExportTable, Reader, Snapshot
from kv_transfer.pool.codec import converted
from kv_transfer.protocol.base import Incoming, KVMemory, KVSpan, Payload, StateSpan
from kv_transfer.protocol.bodies import decode_body, encode_body, kind_of
from kv_transfer.protocol.frames import (
    HEADER_BYTES,
    MAX_PAYLOAD,
    Buffer,
    Header,
    decode,
    encode,
    encode_into,
    seed_of,
    split,
)
from kv_transfer.protocol.identity import Identity
from kv_transfer.protocol.messages import (
    NONCE_BYTES,
    Confirm,
    End,
    Failure,
    FailureCode,
    Fetch,
    Message,
    Renew,
    failure_of,
)
from kv_transfer.protocol.session import (
    ExporterSession,
    ExporterState,
    data_header,
    header_of,
    state_header,
)
from kv_transfer.protocol.shares import rows_bytes
from kv_transfer.protocol.steps import (
    Announce,
    Arrived,
    Check,
    Closed,
    ExporterAction,
    ExporterEvent,
    Idle,
    LeaseHeld,
    Open,
    Opened,
    Progress,
    Refused,
    Release,
    Send,
    SendData,
    SendState,
)
from kv_transfer.stats import TransferStats

log = logging.getLogger(__name__)


# payloads of at most so many bytes are joined to one parcel: joining costs a copy
SMALL_FRAME: Final = 1 << 16
# progress deadlines for which a connection between two conversations may be silent
IDLE_FACTOR: Final = 3


@dataclass(frozen=True, slots=True)
class Exporter:
    """The exporting half of a connector: what all its connections share.

    `direct`: names of the lanes whose fetchers read our memory themselves. `burst_bytes`: new KV is
    sent once there are so many bytes of it, or with token 1. An export of up to `small_bytes` is
    sent with token 1 only.
    """

    identity: Identity
    memory: KVMemory
    table: ExportTable
    timing: Timing
    clock: Clock
    stats: TransferStats
    direct: frozenset[str] = frozenset()
    burst_bytes: int = 0
    small_bytes: int = 0

    def burst_of(self, reader: Reader, adopting: bool) -> int:
        """Return how many new bytes wake the sending thread before token 1 is there.

        For a small export, and for a fetcher that adopts the blocks, the number is larger than the
        export: the thread sleeps until the export is complete.
        """
        whole = adopting or reader.num_bytes <= self.small_bytes
        return reader.num_bytes + 1 if whole else self.burst_bytes

    def serve(self, lane: str, peer: Incoming) -> Iterator[Buffer]:
        """Yield the parcels that answer `peer`, from its first HELLO to the end of the
        connection.
        """
        return _Connection(self, lane, peer).run()


class _Parcels:
    """Joins small frames, so that they are sent as one parcel."""

    def __init__(self) -> None:
        self._frames: list[Buffer] = []
        self._num_bytes = 0

    def add(self, frame: Buffer) -> Iterator[Buffer]:
        """Take a frame; yield the parcels that must be sent now."""
        big = len(frame) > SMALL_FRAME + HEADER_BYTES
        if big or self._num_bytes + len(frame) > MAX_PAYLOAD:
            yield from self.flush()
        if big:
            yield frame
            return
        self._frames.append(frame)
        self._num_bytes += len(frame)

    def flush(self) -> Iterator[Buffer]:
        if self._frames:
            parcel = self._frames[0] if len(self._frames) == 1 else b"".join(self._frames)
            self._frames, self._num_bytes = [], 0
            yield parcel


class _Connection:
    def __init__(self, shared: Exporter, lane: str, peer: Incoming) -> None:
        self._shared = shared
        self._lane = lane
        self._peer = peer
        self._seed = seed_of(shared.identity.boot_id)
        memory = shared.memory
        self._session = ExporterSession(
            shared.identity,
            secrets.token_bytes(NONCE_BYTES),
            memory.layers,
            direct=lane in shared.direct,
            windowed=memory.windowed,
        )
        self._inbox: deque[memoryview] = deque()  # frames of the peer's last parcel
        self._reader: Reader | None = None
        # last version of the export's progress that the session has received
        self._seen: int | None = None
        self._deadline: float | None = None
        self._adopting = False
        self._opened_at = 0.0
        self._waited_s = 0.0
        # rows (token and layer) of this fetch; for failpoints
        self._rows_sent = self._rows_wanted = 0
        self._began = False  # a frame of this fetch has been sent; for failpoints
        self._lock = threading.Lock()
        self._closed = False

    def run(self) -> Iterator[Buffer]:
        session = self._session
        parcels = _Parcels()
        answer: ExporterEvent | None = None
        self._peer.on_closed(self._on_closed)
        try:
            while not session.done:
                event = answer or self._next_at_once()
                waited = event is None
                if event is None:
                    yield from parcels.flush()  # the next event may take time: send what is there
                    event = self._next_event()
                answer = None
                actions = session.receive(event)
                if waited and isinstance(event, Progress) and not actions:
                    # The progress has nothing for this fetcher, which needs a sign of life all the
                    # same.
                    actions = session.receive(Idle())
                for action in actions:
                    frame, answer = self._perform(action)
                    if frame is not None:
                        yield from parcels.add(frame)
                    if isinstance(answer, Refused):
                        break  # later reads of the same list would be refused too
            yield from parcels.flush()
        except KVCorrupt as error:
            self._shared.stats.refused_frame(self._lane)
            log.warning("connection on lane %s ended: %s", self._lane, error)
            yield from parcels.flush()
            yield self._encode(failure_of(error))
        except InternalError:
            log.exception("a connection on lane %s ended by a fault of ours", self._lane)
            yield from parcels.flush()
            yield self._encode(Failure(FailureCode.LOST, "the exporter has failed"))
        finally:
            self._on_closed()

    def _on_closed(self) -> None:
        """Mark the connection as closed and wake the thread that waits for progress. Any thread."""
        with self._lock:
            self._closed = True
            reader = self._reader
        if reader is not None:
            reader.close()

    def _next_at_once(self) -> ExporterEvent | None:
        """Return an event that is there without waiting, or None.

        The frames that answer it travel in one parcel with those that are sent anyway.
        """
        reader = self._reader
        if self._session.state is not ExporterState.STREAMING or self._seen is not None:
            return None
        assert reader is not None
        try:
            snapshot = reader.wait(None, 0.0)
        except KVError as error:
            return Refused(failure_of(error))
        return None if snapshot is None else self._progress(snapshot)

    def _next_event(self) -> ExporterEvent:
        """Wait for progress of the export while streaming, else for the peer's next frame."""
        state, timing = self._session.state, self._shared.timing
        if state is ExporterState.STREAMING:
            return self._next_progress()
        if not self._inbox:
            between = state in (ExporterState.READY, ExporterState.ENDED, ExporterState.HELD)
            patience_s = timing.kv_progress_s * (IDLE_FACTOR if between else 1)
            parcel = self._peer.receive(patience_s)
            if parcel is None:
                return Closed()
            self._inbox.extend(split(parcel))
        if not self._inbox:
            raise KVCorrupt("empty parcel")
        frame = decode(self._inbox.popleft(), self._seed)
        return Arrived(frame.header, decode_body(frame.header.kind, frame.payload))

    def _next_progress(self) -> ExporterEvent:
        assert self._reader is not None
        shared = self._shared
        before = shared.clock.monotonic()
        try:
            burst_bytes = shared.burst_of(self._reader, self._adopting)
            snapshot = self._reader.wait(self._seen, shared.timing.kv_alive_s, burst_bytes)
        except KVError as error:
            return Refused(failure_of(error))
        if self._reader.closed:
            return Closed()
        now = shared.clock.monotonic()
        self._waited_s += now - before
        if self._deadline is not None and now >= self._deadline:
            return Refused(Failure(FailureCode.TIMEOUT, "the request's time is over"))
        return Idle() if snapshot is None else self._progress(snapshot)

    def _progress(self, snapshot: Snapshot) -> Progress:
        self._seen = snapshot.version
        return Progress(snapshot.upto, snapshot.first_tokens, round(self._waited_s * 1000))

    def _perform(self, action: ExporterAction) -> tuple[Buffer | None, ExporterEvent | None]:
        """Perform `action`. Return the frame to send and the event to feed back; each may
        be None.
        """
        match action:
            case Send(message):
                if isinstance(message, End):
                    FAILPOINTS.hit("kv.last")
                return self._encode(message), None
            case SendData(span, dtype):
                return self._read(span, dtype)
            case SendState(span):
                return self._read_state(span)
            case Announce(span):
                return self._announce(span)
            case Open(fetch):
                return None, self._open(fetch)
            case Check(message, adopting):
                return None, self._promise() if adopting else self._check(message)
            case Release():
                self._release(action)
                return None, None

    def _encode(self, message: Message) -> bytes:
        kind = kind_of(message)
        header = header_of(kind, self._session.export_seq, self._session.epoch)
        return encode(header, [encode_body(message)], self._seed)

    def _read(self, span: KVSpan, dtype: str) -> tuple[Buffer | None, ExporterEvent | None]:
        assert self._reader is not None
        memory = self._shared.memory
        header = data_header(span, self._session.export_seq, self._session.epoch)
        try:
            # The frame is a copy: the blocks may be freed while the network is waited for.
            with self._reader.reading():
                fragments = memory.read(
                    span.layer, self._reader.blocks, span.start, span.end, span.heads
                )
                if dtype != memory.format.dtype:
                    spec = memory.layers[span.layer]
                    whole = Payload(_joined(fragments), memory.format.dtype, span.heads)
                    fragments = converted(spec, whole, dtype)
                frame = self._build(header, fragments)
        except KVError as error:
            return None, Refused(failure_of(error))
        self._shared.stats.sent(self._lane, len(frame) - HEADER_BYTES)
        return self._pass_frame(frame, span.end - span.start), None

    def _read_state(self, span: StateSpan) -> tuple[Buffer | None, ExporterEvent | None]:
        assert self._reader is not None
        memory = self._shared.memory
        header = state_header(span, self._session.export_seq, self._session.epoch)
        try:
            with self._reader.reading():  # the slot of the state is not free before the blocks are
                blocks = self._reader.blocks
                fragments = memory.read_state(span.layer, blocks, span.start, span.end)
                frame = self._build(header, fragments)
        except KVError as error:
            return None, Refused(failure_of(error))
        self._shared.stats.sent(self._lane, len(frame) - HEADER_BYTES)
        return self._pass_frame(frame, 0), None

    def _build(self, header: Header, fragments: Sequence[Buffer]) -> Buffer:
        """Build a frame: a big one in the lane's own memory if it has any, otherwise by joining the
        parts.
        """
        buffer = self._peer.buffer
        if buffer is None or sum(map(len, fragments)) <= SMALL_FRAME:
            return encode(header, fragments, self._seed)
        return encode_into(buffer, header, fragments, self._seed)

    def _announce(self, span: KVSpan) -> tuple[Buffer | None, ExporterEvent | None]:
        assert self._reader is not None
        memory = self._shared.memory
        try:
            self._reader.verify()
        except KVError as error:
            return None, Refused(failure_of(error))
        header = data_header(span, self._session.export_seq, self._session.epoch)
        row = rows_bytes(memory.layers[span.layer], len(span.heads), memory.format.dtype)
        self._shared.stats.sent(self._lane, row * (span.end - span.start))
        return self._pass_frame(encode(header, [], self._seed), span.end - span.start), None

    def _pass_frame(self, frame: Buffer, num_rows: int) -> Buffer:
        """Return `frame` (DATA of `num_rows` rows, or STATE), or a damaged copy if a failpoint asks
        for it (its digest then does not match).
        """
        if not FAILPOINTS.armed:
            return frame
        before, self._rows_sent = self._rows_sent, self._rows_sent + num_rows
        began, self._began = self._began, True
        first = not began and FAILPOINTS.hit("kv.first")
        half = before < self._rows_wanted / 2 <= self._rows_sent and FAILPOINTS.hit("kv.half")
        if not (first or half):
            return frame
        damaged = bytearray(frame)
        damaged[-1] ^= 1
        return bytes(damaged)

    def _open(self, fetch: Fetch) -> ExporterEvent:
        shared = self._shared
        try:
            reader = shared.table.open(
                fetch.export_seq, fetch.secret, fetch.request_id, fetch.epoch, self._lane
            )
        except KVError as error:
            return Refused(failure_of(error))
        with self._lock:
            self._reader, closed = reader, self._closed
        if closed:
            reader.close()
        self._seen, self._waited_s = None, 0.0
        self._adopting = fetch.adopt
        left = reader.handle.num_tokens - fetch.start_token
        self._rows_sent, self._rows_wanted = 0, left * len(shared.memory.layers)
        self._began = False
        self._opened_at = shared.clock.monotonic()
        self._deadline = deadline_from_ms(fetch.timeout_ms, shared.clock)
        return Opened(reader.handle.num_tokens, shared.memory.tables(reader.blocks))

    def _check(self, message: Renew | Confirm | None) -> ExporterEvent:
        table = self._shared.table
        try:
            match message:
                case None:
                    assert self._reader is not None
                    self._reader.verify()
                case Renew():
                    table.renew(message.export_seq, message.secret, message.epoch)
                case Confirm():
                    table.confirm(message.export_seq, message.secret, message.epoch)
        except KVError as error:
            return Refused(failure_of(error))
        return LeaseHeld()

    def _promise(self) -> ExporterEvent:
        """Promise the blocks to a fetcher that reads them where they lie. Its part of the transfer
        ends here.
        """
        assert self._reader is not None
        try:
            self._reader.promise()
        except KVError as error:
            return Refused(failure_of(error))
        self._end_tail(self._reader)
        return LeaseHeld(round(self._shared.table.lease_s * 1000))

    def _end_tail(self, reader: Reader) -> None:
        if reader.completed_at is not None:
            ready_at = max(reader.completed_at, self._opened_at)
            self._shared.stats.tail(self._lane, self._shared.clock.monotonic() - ready_at)
        self._reader = None  # the time after token 1 is counted once per fetch

    def _release(self, action: Release) -> None:
        shared, reader = self._shared, self._reader
        FAILPOINTS.hit("kv.acked")
        if reader is not None and reader.handle.export_seq == action.export_seq:
            self._end_tail(reader)
        freed = shared.table.acknowledge(action.export_seq, action.epoch, action.rank, action.ranks)
        if freed is not None and action.wait:
            try:
                freed.result(shared.timing.kv_progress_s)
            except TimeoutError:
                log.warning("export %d is still being read after its release", action.export_seq)


def _joined(fragments: Sequence[memoryview]) -> memoryview:
    return fragments[0] if len(fragments) == 1 else memoryview(b"".join(fragments))
