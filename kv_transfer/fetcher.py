"""The fetching side of one conversation: performs what FetcherSession asks for.

Blocking by design: connector.py runs it in a data-plane thread and bridges the result to asyncio.
`cancel` may be called from any thread at any time; after `run` has returned nothing touches the
blocks.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass

from baton.errors import KVCorrupt
from baton.kv_spec import BlockLists
from kv_transfer.base import KVMemory, Lane, Wire
from kv_transfer.bodies import decode_body, encode_body, kind_of
from kv_transfer.frames import decode, encode, seed_of
from kv_transfer.identity import Identity
from kv_transfer.messages import NONCE_BYTES, End, Message
from kv_transfer.session import FetcherSession, Intent, Wanted, header_of
from kv_transfer.stats import TransferStats
from kv_transfer.steps import (
    Arrived,
    Closed,
    FetcherAction,
    FetcherEvent,
    Finish,
    Send,
    Start,
    Write,
)


@dataclass(frozen=True, slots=True)
class Fetcher:
    """The fetching half of a connector: everything its conversations share."""

    identity: Identity
    memory: KVMemory
    stats: TransferStats


@dataclass(frozen=True, slots=True)
class Fetched:
    """What a conversation brought; `end` is None unless it was a fetch."""

    end: End | None
    num_bytes: int


class Conversation:
    """One conversation with an exporter: fetch, renew or release, as `wanted` says."""

    def __init__(
        self, shared: Fetcher, lane: Lane, address: str, wanted: Wanted, blocks: BlockLists
    ) -> None:
        self._shared = shared
        self._lane = lane
        self._address = address
        self._wanted = wanted
        self._blocks = blocks
        self._seed = seed_of(wanted.handle.boot_id)
        nonce = secrets.token_bytes(NONCE_BYTES)
        self._session = FetcherSession(shared.identity, nonce, shared.memory.layers, wanted)
        self._num_bytes = 0
        self._lock = threading.Lock()
        self._wire: Wire | None = None
        self._cancelled = False

    def cancel(self) -> None:
        """Break it; `run` raises KVLost soon. Any thread, any time, idempotent."""
        with self._lock:
            self._cancelled = True
            wire = self._wire
        if wire is not None:
            wire.cancel()

    def run(self, on_progress: Callable[[], None]) -> Fetched:
        """Hold the conversation to its end; `on_progress` is called at the start and at each frame.

        Raises the KVError that ended it.
        """
        on_progress()
        wire = self._lane.open(self._address)
        with self._lock:
            self._wire = wire
            cancelled = self._cancelled
        if cancelled:
            wire.cancel()
        try:
            self._converse(wire, on_progress)
            if self._wanted.intent is Intent.RELEASE:
                while wire.receive() is not None:  # the exporter closes when the blocks are free
                    on_progress()
        except BaseException:
            wire.cancel()
            raise
        finally:
            wire.finish()
        return Fetched(self._session.end, self._num_bytes)

    def _converse(self, wire: Wire, on_progress: Callable[[], None]) -> None:
        event: FetcherEvent = Start()
        while True:
            for action in self._session.receive(event):
                self._perform(action, wire)
            if self._session.done:
                return
            data = wire.receive()
            on_progress()
            event = Closed() if data is None else self._decode(data)

    def _decode(self, data: bytes) -> Arrived:
        try:
            frame = decode(data, self._seed)
            return Arrived(frame.header, decode_body(frame.header.kind, frame.payload))
        except KVCorrupt:
            self._shared.stats.refused_frame()
            raise

    def _perform(self, action: FetcherAction, wire: Wire) -> None:
        match action:
            case Send(message):
                wire.send(self._encode(message))
            case Write(layer, start, end, payload):
                self._shared.memory.write(layer, self._blocks, start, end, payload)
                self._num_bytes += len(payload)
                self._shared.stats.received(self._lane.name, len(payload))
            case Finish():
                wire.finish()

    def _encode(self, message: Message) -> bytes:
        header = header_of(kind_of(message), self._session.export_seq, self._session.epoch)
        return encode(header, [encode_body(message)], self._seed)
