"""The `memory` lane: conversations inside one process, through queues. The reference for all lanes.

It has real threads, bounded queues (back-pressure) and the frames of every other lane. A
`MemoryFabric` is the network; lanes that share one reach each other.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Final

from baton.protocol.errors import KVLost
from baton.protocol.handles import LaneAddress
from kv_transfer.lanes.closing import Closing
from kv_transfer.protocol.base import Serve, Wire
from kv_transfer.protocol.frames import Buffer

log = logging.getLogger(__name__)

CAPACITY: Final = 4  # parcels in flight in one direction


class Pipe:
    """One direction of a conversation: a bounded queue that can end (finish) or break."""

    def __init__(self) -> None:
        self._frames: deque[Buffer] = deque()
        self._changed = threading.Condition()
        self._finished = False
        self._broken: str | None = None

    def put(self, frame: Buffer) -> None:
        """Add a frame; block while the queue is full. Raises KVLost once broken."""
        with self._changed:
            self._changed.wait_for(lambda: self._broken or len(self._frames) < CAPACITY)
            if self._broken is not None:
                raise KVLost(self._broken)
            self._frames.append(frame)
            self._changed.notify_all()

    def get(self, timeout_s: float | None = None) -> Buffer | None:
        """Return the next frame, or None after the last one or after `timeout_s`. Raises KVLost
        once broken.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._broken or self._frames or self._finished, timeout_s
            )
            if self._broken is not None:
                raise KVLost(self._broken)
            if not self._frames:
                return None
            self._changed.notify_all()
            return self._frames.popleft()

    def finish(self) -> None:
        with self._changed:
            self._finished = True
            self._changed.notify_all()

    def break_(self, why: str) -> None:
        """Drop the frames in flight; both ends then raise KVLost. The first reason `why` is
        kept.
        """
        with self._changed:
            self._broken = self._broken or why
            self._changed.notify_all()


class _MemoryConversation:
    """Both pipes of one conversation and the callbacks of its exporting end."""

    def __init__(self) -> None:
        self.to_exporter = Pipe()
        self.to_fetcher = Pipe()
        self._closing = Closing()

    def break_(self, why: str) -> None:
        self.to_exporter.break_(why)
        self.to_fetcher.break_(why)
        self.close()

    def close(self) -> None:
        self._closing.notify()

    # base.Incoming, for the exporter's generator
    @property
    def buffer(self) -> memoryview | None:
        return None

    def receive(self, timeout_s: float) -> Buffer | None:
        try:
            return self.to_exporter.get(timeout_s)
        except KVLost:
            return None

    def on_closed(self, callback: Callable[[], None]) -> None:
        self._closing.on_closed(callback)


class MemoryWire:
    """The fetching end; implements base.Wire."""

    def __init__(self, conversation: _MemoryConversation) -> None:
        self._conversation = conversation

    def send(self, parcel: bytes) -> None:
        self._conversation.to_exporter.put(parcel)

    def receive(self) -> Buffer | None:
        return self._conversation.to_fetcher.get()

    def finish(self) -> None:
        self._conversation.to_exporter.finish()

    def cancel(self) -> None:
        self._conversation.break_("cancelled")


class MemoryFabric:
    """The network of the `memory` lane: which lane is at which address."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lanes: dict[str, MemoryLane] = {}

    def attach(self, address: str, lane: MemoryLane) -> None:
        with self._lock:
            self._lanes[address] = lane

    def detach(self, address: str) -> None:
        with self._lock:
            self._lanes.pop(address, None)

    def find(self, address: str) -> MemoryLane | None:
        with self._lock:
            return self._lanes.get(address)


class MemoryLane:
    """Implements base.Lane inside one process; its address is the boot id."""

    name = "memory"
    direct = False

    def __init__(self, fabric: MemoryFabric) -> None:
        self._fabric = fabric
        self._lock = threading.Lock()
        self._address: str | None = None
        self._serve: Serve | None = None
        self._active: dict[_MemoryConversation, threading.Thread] = {}
        self._outgoing: set[_MemoryConversation] = set()

    def start(self, boot_id: str, serve: Serve) -> LaneAddress:
        self._address, self._serve = boot_id, serve
        self._fabric.attach(boot_id, self)
        return LaneAddress(self.name, boot_id)

    def reaches(self, address: LaneAddress) -> bool:
        """Return True: whether the peer is there is known only after an attempt."""
        return True

    def open(self, address: LaneAddress) -> Wire:
        conversation = _MemoryConversation()
        with self._lock:
            self._outgoing.add(conversation)
        conversation.on_closed(lambda: self._forget(conversation))
        peer = self._fabric.find(address.address)
        if peer is None:
            conversation.break_(f"nobody at memory address {address.address}")
        else:
            peer.accept(conversation)
        return MemoryWire(conversation)

    def accept(self, conversation: _MemoryConversation) -> None:
        """Serve a conversation that another lane of the fabric has opened."""
        thread = threading.Thread(
            target=self._run, args=(conversation,), name="kv-memory", daemon=True
        )
        with self._lock:
            gone = self._serve is None
            if not gone:
                self._active[conversation] = thread
                thread.start()
        if gone:
            conversation.break_("exporter gone")

    def stop(self) -> None:
        with self._lock:
            self._serve = None
            active = dict(self._active)
            outgoing = list(self._outgoing)
        if self._address is not None:
            self._fabric.detach(self._address)
        for conversation in active:
            conversation.break_("exporter gone")
        for conversation in outgoing:
            conversation.break_("lane stopped")
        for thread in active.values():
            thread.join()

    def _forget(self, conversation: _MemoryConversation) -> None:
        with self._lock:
            self._outgoing.discard(conversation)

    def _run(self, conversation: _MemoryConversation) -> None:
        try:
            serve = self._serve
            if serve is not None:
                for parcel in serve(self.name, conversation):
                    conversation.to_fetcher.put(parcel)
        except KVLost:
            log.debug("a fetcher left in mid-conversation")
        finally:
            conversation.to_fetcher.finish()
            conversation.close()
            with self._lock:
                self._active.pop(conversation, None)
