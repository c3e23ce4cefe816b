"""Serves conversations on the exporting side: performs what ExporterSession asks for.

One generator per conversation, run by a thread of the lane: it yields frames and blocks in
`Incoming.receive` or, while the prefill computes, in Reader.wait. The engine thread is never here.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterator
from dataclasses import dataclass

from baton.clock import Clock, deadline_from_ms
from baton.errors import KVCorrupt, KVError
from baton.timing import Timing
from kv_transfer.base import Incoming, KVMemory
from kv_transfer.bodies import decode_body, encode_body, kind_of
from kv_transfer.exports import ExportTable, Reader, Snapshot
from kv_transfer.frames import HEADER_BYTES, Header, Kind, decode, encode, seed_of
from kv_transfer.identity import Identity
from kv_transfer.messages import (
    NONCE_BYTES,
    Confirm,
    Failure,
    FailureCode,
    Fetch,
    Message,
    Renew,
    failure_of,
)
from kv_transfer.session import ExporterSession, ExporterState, header_of
from kv_transfer.stats import TransferStats
from kv_transfer.steps import (
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
)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Exporter:
    """The exporting half of a connector: everything its conversations share."""

    identity: Identity
    memory: KVMemory
    table: ExportTable
    timing: Timing
    clock: Clock
    stats: TransferStats

    def serve(self, lane: str, peer: Incoming) -> Iterator[bytes]:
        """The frames that answer `peer`, one conversation from its first HELLO to its end."""
        return _Conversation(self, lane, peer).run()


class _Conversation:
    def __init__(self, shared: Exporter, lane: str, peer: Incoming) -> None:
        self._shared = shared
        self._lane = lane
        self._peer = peer
        self._seed = seed_of(shared.identity.boot_id)
        nonce = secrets.token_bytes(NONCE_BYTES)
        self._session = ExporterSession(shared.identity, nonce, shared.memory.layers)
        self._reader: Reader | None = None
        self._seen: int | None = None  # last version of the export's progress fed to the session
        self._deadline: float | None = None
        self._opened_at = 0.0

    def run(self) -> Iterator[bytes]:
        session = self._session
        answer: ExporterEvent | None = None
        try:
            while not session.done:
                event = self._next_event() if answer is None else answer
                answer = None
                for action in session.receive(event):
                    frame, answer = self._perform(action)
                    if frame is not None:
                        yield frame
                    if isinstance(answer, Refused):
                        break  # later reads of the same list would be refused too
        except KVCorrupt as error:
            self._shared.stats.refused_frame()
            log.warning("conversation on lane %s ended: %s", self._lane, error)
            yield self._encode(failure_of(error))
        finally:
            if self._reader is not None:
                self._reader.close()

    def _next_event(self) -> ExporterEvent:
        """Wait for progress of the export while streaming, else for the peer's next frame."""
        if self._session.state is ExporterState.STREAMING:
            return self._next_progress()
        data = self._peer.receive(self._shared.timing.kv_progress_s)
        if data is None:
            return Closed()
        frame = decode(data, self._seed)
        return Arrived(frame.header, decode_body(frame.header.kind, frame.payload))

    def _next_progress(self) -> ExporterEvent:
        assert self._reader is not None
        try:
            snapshot = self._reader.wait(self._seen, self._shared.timing.kv_progress_s / 3)
        except KVError as error:
            return Refused(failure_of(error))
        if self._reader.closed:
            return Closed()
        if self._deadline is not None and self._shared.clock.monotonic() >= self._deadline:
            return Refused(Failure(FailureCode.TIMEOUT, "the request's time is over"))
        return Idle() if snapshot is None else self._progress(snapshot)

    def _progress(self, snapshot: Snapshot) -> Progress:
        self._seen = snapshot.version
        return Progress(snapshot.upto, snapshot.first_tokens)

    def _perform(self, action: ExporterAction) -> tuple[bytes | None, ExporterEvent | None]:
        """The frame to send and the event to feed back, if any."""
        match action:
            case Send(message):
                return self._encode(message), None
            case SendData():
                return self._read(action)
            case Open(fetch):
                return None, self._open(fetch)
            case Check(message):
                return None, self._check(message)
            case Release(export_seq, epoch):
                self._release(export_seq, epoch)
                return None, None

    def _encode(self, message: Message) -> bytes:
        kind = kind_of(message)
        header = header_of(kind, self._session.export_seq, self._session.epoch)
        return encode(header, [encode_body(message)], self._seed)

    def _read(self, action: SendData) -> tuple[bytes | None, ExporterEvent | None]:
        assert self._reader is not None
        memory, layer = self._shared.memory, action.layer
        header = Header(
            kind=Kind.DATA,
            export_seq=self._session.export_seq,
            epoch=self._session.epoch,
            layer=layer,
            num_heads=memory.layers[layer].kv_heads,
            token0=action.start,
            num_tokens=action.end - action.start,
        )
        try:
            # The frame is a copy: the blocks are free of us before the network is waited for.
            with self._reader.reading():
                fragments = memory.read(layer, self._reader.blocks, action.start, action.end)
                frame = encode(header, fragments, self._seed)
        except KVError as error:
            return None, Refused(failure_of(error))
        self._shared.stats.sent(self._lane, len(frame) - HEADER_BYTES)
        return frame, None

    def _open(self, fetch: Fetch) -> ExporterEvent:
        shared = self._shared
        try:
            reader = shared.table.open(
                fetch.export_seq, fetch.secret, fetch.request_id, fetch.epoch
            )
        except KVError as error:
            return Refused(failure_of(error))
        self._reader = reader
        self._opened_at = shared.clock.monotonic()
        self._deadline = deadline_from_ms(fetch.timeout_ms, shared.clock)
        self._peer.on_closed(reader.close)
        return Opened(reader.handle.num_tokens)

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

    def _release(self, export_seq: int, epoch: int) -> None:
        """Release, and end the conversation only when nobody touches the blocks any more."""
        shared = self._shared
        if self._reader is not None and self._reader.completed_at is not None:
            ready_at = max(self._reader.completed_at, self._opened_at)
            shared.stats.tail(shared.clock.monotonic() - ready_at)
        freed = shared.table.acknowledge(export_seq, epoch)
        if freed is not None:
            try:
                freed.result(shared.timing.kv_progress_s)
            except TimeoutError:
                log.warning("export %d is still being read after its release", export_seq)
