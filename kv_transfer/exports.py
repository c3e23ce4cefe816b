"""The export table: which blocks of this node others may read, how far they are filled, until when.

Life of an export: add -> publish* -> complete -> released -> freed. It is released by ACK,
release(), the end of its lease, or stop(); from then on no read may begin. It is freed, once, when
the last read has ended: then `on_released` is called and the caller unpins the blocks. Reads over a
direct lane do not count: the fetcher does them, and checks the lease after its last read. A reader
that adopts the blocks has a promise instead: the blocks are not freed before that reader lets go,
or before the last lease that was reported to it is over, whoever releases the export.

Two fences: (boot id, sequence) names the memory, and every reader speaks for an epoch of the
request. A reader whose epoch is below the highest seen for that request is refused, also in the
middle of a transfer. Threads: one lock, held for microseconds, guards everything; only Reader.wait
blocks.
"""

from __future__ import annotations

import hmac
import itertools
import logging
import math
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from baton.protocol.clock import Clock
from baton.protocol.errors import InternalError, KVError, KVRefused, KVStale
from baton.protocol.events import FirstToken
from baton.protocol.handles import KVHandle
from kv_transfer.protocol.base import Blocks, OnReleased
from kv_transfer.protocol.leases import Leases
from kv_transfer.stats import NO_LANE

log = logging.getLogger(__name__)
LEASE_OVER: Final = "the lease is over"


@dataclass(slots=True, eq=False)
class Export:
    """One export. Only its table writes it, under the table's lock."""

    handle: KVHandle
    blocks: Blocks
    num_bytes: int
    upto: list[int]  # by layer: tokens [0, upto) are published
    changed: threading.Condition
    published_bytes: int = 0
    wake_at: float = math.inf  # a waiting reader is woken at so many published bytes
    first_tokens: tuple[FirstToken, ...] | None = None
    completed_at: float | None = None
    version: int = 0  # grows with every change that a reader may wait for
    urgent: int = 0  # grows with the changes that wake every reader at once
    readers: int = 0  # reads in progress: the blocks must not be reused
    promises: dict[int, float] = field(default_factory=dict[int, float])  # epoch -> until
    acks: _Acks | None = None  # which ranks of a tensor-parallel fetcher have acknowledged
    lane: str = NO_LANE  # the lane that last asked for this export
    end: KVError | None = None  # why it was released; later reads raise this error
    freeing: bool = False  # True once a caller has taken on to free it
    freed: Future[None] = field(default_factory=Future[None])


@dataclass(slots=True)
class _Acks:
    """Which ranks of a fetching group have acknowledged, for one epoch."""

    epoch: int
    wanted: frozenset[int]
    given: set[int] = field(default_factory=set[int])


@dataclass(frozen=True, slots=True)
class Snapshot:
    """An export's progress at one moment at which its lease was held."""

    version: int
    upto: tuple[int, ...]
    first_tokens: tuple[FirstToken, ...] | None


@dataclass(slots=True)
class _Fence:
    """The highest epoch seen of a request; kept while the request has an export here."""

    epoch: int
    num_exports: int = 0


_ALONE: Final = frozenset((0,))


class ExportTable:
    """All exports of a node. `layer_bytes`: the KV bytes of one token, by layer."""

    def __init__(
        self, layer_bytes: Sequence[int], leases: Leases, clock: Clock, on_released: OnReleased
    ) -> None:
        self._layer_bytes = layer_bytes
        self._leases = leases
        self._clock = clock
        self._on_released = on_released
        self._lock = threading.Lock()
        self._sequence = itertools.count(1)
        self._live: dict[int, Export] = {}
        self._draining: dict[int, Export] = {}  # released, but still being read or promised
        self._fences: dict[str, _Fence] = {}

    @property
    def lease_s(self) -> float:
        return self._leases.lease_s

    # ---- exporting side ------------------------------------------------------------------------
    def next_sequence(self) -> int:
        return next(self._sequence)

    def add(self, handle: KVHandle, blocks: Blocks, num_bytes: int) -> None:
        """Offer `blocks` under a fresh lease. `export_bytes` counts `num_bytes` until the export is
        freed. Raises InternalError for a sequence number that is taken.
        """
        with self._lock:
            seq = handle.export_seq
            if seq in self._live or seq in self._draining:
                raise InternalError(f"export {seq} exists already")
            export = Export(
                handle=handle,
                blocks=blocks,
                num_bytes=num_bytes,
                upto=[0] * len(self._layer_bytes),
                changed=threading.Condition(self._lock),
            )
            self._live[handle.export_seq] = export
            fence = self._fences.setdefault(handle.request_id, _Fence(handle.epoch))
            fence.num_exports += 1
            self._raise_fence(handle.request_id, handle.epoch)
            self._leases.grant(handle.export_seq, self._clock.monotonic())

    def publish(self, export_seq: int, layer: int, upto: int, state_bytes: int = 0) -> bool:
        """Let readers read tokens [0, upto) of `layer`, and renew the lease. With the last token
        come `state_bytes` of recurrent state.

        Return False if the export is released or its lease has lapsed. Raises InternalError if
        `upto` exceeds the export's tokens.
        """
        with self._lock:
            export = self._live.get(export_seq)
            if export is None or not self._leases.renew(export_seq, self._clock.monotonic()):
                return False
            if upto > export.handle.num_tokens:
                raise InternalError(f"published {upto} of {export.handle.num_tokens} tokens")
            if upto > export.upto[layer]:
                new_bytes = (upto - export.upto[layer]) * self._layer_bytes[layer]
                export.published_bytes += new_bytes + state_bytes
                export.upto[layer] = upto
                self._published(export)
            return True

    def blocks_of(self, export_seq: int) -> Blocks | None:
        """Return the blocks of an export, or None if it has been released."""
        with self._lock:
            export = self._live.get(export_seq)
            return None if export is None else export.blocks

    def complete(self, export_seq: int, first_tokens: Sequence[FirstToken]) -> None:
        """Record the first tokens, which END carries to the fetcher. Does nothing after a
        release.
        """
        with self._lock:
            export = self._live.get(export_seq)
            if export is not None:
                export.first_tokens = tuple(first_tokens)
                export.completed_at = self._clock.monotonic()
                self._changed(export)

    def release(self, export_seq: int, end: KVError) -> Future[None] | None:
        """Let no new read begin; waiting readers get the error `end`.

        Return a future that is done when the blocks are free (a promise may delay that), or None if
        the blocks are free already or there never was such an export.
        """
        with self._lock:
            export = self._live.pop(export_seq, None)
            if export is None:
                draining = self._draining.get(export_seq)
                return draining.freed if draining else None
            free_now = self._close(export, end)
        if free_now:
            self._free(export)
        return export.freed

    def release_all(self, end: KVError) -> list[Future[None]]:
        """Release every export and drop all promises: readers must not use the blocks any more."""
        with self._lock:
            exports = [*self._live.values(), *self._draining.values()]
            for export in exports:
                export.promises.clear()
        futures = [self.release(export.handle.export_seq, end) for export in exports]
        self.expire(self._clock.monotonic())
        return [future for future in futures if future is not None]

    def expire(self, now: float) -> list[str]:
        """Release every export whose lease has lapsed by `now`, and return the lanes that asked for
        them.

        Also free the released exports that only promises have kept, if these promises are over.
        """
        with self._lock:
            due = [seq for seq in self._leases.due(now) if seq in self._live]
            lanes = [self._live[seq].lane for seq in due]
            kept = [export for export in self._draining.values() if self._freeable(export, now)]
        for seq in due:
            self.release(seq, KVStale(LEASE_OVER))
        for export in kept:
            self._free(export)
        return lanes

    def next_expiry(self) -> float | None:
        """Return when `expire` next has something to do if no lease is extended; None if never."""
        with self._lock:
            kept = [max(e.promises.values()) for e in self._draining.values() if e.promises]
            lease = self._leases.next_expiry()
            return min(kept if lease is None else [lease, *kept], default=None)

    @property
    def num_exports(self) -> int:
        """Exports whose blocks are not free yet."""
        with self._lock:
            return len(self._live) + len(self._draining)

    @property
    def export_bytes(self) -> int:
        with self._lock:
            exports = (*self._live.values(), *self._draining.values())
            return sum(export.num_bytes for export in exports)

    # ---- reading side (verify_locked, begin_read and end_read: for Reader only) ----------------
    def open(
        self, export_seq: int, secret: bytes, request_id: str, epoch: int, lane: str = NO_LANE
    ) -> Reader:
        """Begin to read. Raises KVStale for an unknown, released or lapsed export or an old epoch,
        and KVRefused for a wrong secret.
        """
        with self._lock:
            export = self._admit(export_seq, secret, epoch)
            if export.handle.request_id != request_id:
                raise KVStale(f"export {export_seq} is not of request {request_id}")
            export.lane = lane
            return Reader(self, export, epoch)

    def renew(self, export_seq: int, secret: bytes, epoch: int) -> None:
        """Extend the lease, and the promise if `epoch` has one. Raises the errors of `open`."""
        with self._lock:
            export = self._admit(export_seq, secret, epoch)
            self._renew(export, epoch, promise=epoch in export.promises)

    def confirm(self, export_seq: int, secret: bytes, epoch: int) -> None:
        """Check, without extending the lease, that the export is held or promised to `epoch`.

        Raises the errors of `open` if it is not.
        """
        with self._lock:
            kept = self._draining.get(export_seq)
            if kept is None or epoch not in kept.promises:
                self._admit(export_seq, secret, epoch)
            elif not hmac.compare_digest(kept.handle.secret, secret):
                raise KVRefused(f"wrong secret for export {export_seq}")

    def promise(self, export: Export, epoch: int) -> None:
        """Extend the lease, and keep the blocks as they are until its end even if the export is
        released.
        """
        with self._lock:
            self.verify_locked(export, epoch)
            self._renew(export, epoch, promise=True)

    def _renew(self, export: Export, epoch: int, promise: bool) -> None:
        now = self._clock.monotonic()
        self._leases.renew(export.handle.export_seq, now)
        if promise:
            export.promises[epoch] = now + self._leases.lease_s

    def acknowledge(
        self, export_seq: int, epoch: int, rank: int = 0, ranks: frozenset[int] = _ALONE
    ) -> Future[None] | None:
        """Release the export once each of the receiving group's `ranks` has acknowledged it.

        Does nothing if a newer epoch has taken over. Return None while ranks are missing, else what
        `release` returns. The promise to `epoch` ends in any case.
        """
        kept = self._break_promise(export_seq, epoch)
        if kept is not None:
            self._free(kept)
            return kept.freed
        with self._lock:
            export = self._live.get(export_seq)
            if export is not None:
                if self._fenced(export, epoch):
                    return None
                if not ranks <= {rank} and not self._all_given(export, epoch, rank, ranks):
                    return None
        return self.release(export_seq, KVStale("acknowledged"))

    def _all_given(self, export: Export, epoch: int, rank: int, ranks: frozenset[int]) -> bool:
        """Note a rank's acknowledgement; return whether it was the last one."""
        acks = export.acks
        if acks is None or (acks.epoch, acks.wanted) != (epoch, ranks):
            acks = export.acks = _Acks(epoch, ranks)
        acks.given.add(rank)
        return acks.wanted <= acks.given

    def _break_promise(self, export_seq: int, epoch: int) -> Export | None:
        """End the promise to `epoch`. Return the export if the caller must now free it,
        else None.
        """
        with self._lock:
            export = self._live.get(export_seq) or self._draining.get(export_seq)
            if export is None or export.promises.pop(epoch, None) is None:
                return None
            return export if self._freeable(export, self._clock.monotonic()) else None

    def _freeable(self, export: Export, now: float) -> bool:
        """Whether the caller must free the export now. True for one caller only. Called under the
        lock.
        """
        if export.end is None or export.freeing:
            return False
        export.promises = {e: until for e, until in export.promises.items() if now < until}
        if export.readers or export.promises:
            return False
        export.freeing = True
        return True

    def _admit(self, export_seq: int, secret: bytes, epoch: int) -> Export:
        export = self._live.get(export_seq)
        if export is None:
            raise KVStale(f"no export {export_seq}")
        if not hmac.compare_digest(export.handle.secret, secret):
            raise KVRefused(f"wrong secret for export {export_seq}")
        self.verify_locked(export, epoch)
        self._raise_fence(export.handle.request_id, epoch)
        return export

    def _raise_fence(self, request_id: str, epoch: int) -> None:
        """Raise the request's fence to `epoch` and wake its waiting readers: those of older epochs
        then learn that they are fenced.
        """
        fence = self._fences[request_id]
        if epoch <= fence.epoch:
            return
        fence.epoch = epoch
        for export in self._live.values():
            if export.handle.request_id == request_id:
                self._changed(export)

    def _fenced(self, export: Export, epoch: int) -> bool:
        return epoch < self._fences[export.handle.request_id].epoch

    def verify_locked(self, export: Export, epoch: int) -> None:
        """Raise unless `epoch` may read this export right now. Called under the lock."""
        if export.end is not None:
            raise type(export.end)(export.end.message)  # each reader its own instance
        if self._fenced(export, epoch):
            raise KVStale(f"epoch {epoch} of request {export.handle.request_id} is over")
        if not self._leases.held(export.handle.export_seq, self._clock.monotonic()):
            raise KVStale(LEASE_OVER)

    def _published(self, export: Export) -> None:
        """Count a change, and wake readers only if a whole burst is published.

        Sending takes time from the core that computes token 1, and a switch of threads costs more
        than the bytes of a small layer. The rest is sent after token 1.
        """
        export.version += 1
        if export.published_bytes >= export.wake_at:
            export.urgent += 1
            export.wake_at = math.inf  # readers that go on waiting set it again
            export.changed.notify_all()

    def _changed(self, export: Export) -> None:
        export.version += 1
        export.urgent += 1
        export.changed.notify_all()

    def _close(self, export: Export, end: KVError) -> bool:
        """Let no new read begin. Return True if the caller must free the export. Called under the
        lock.
        """
        export.end = end
        self._leases.drop(export.handle.export_seq)
        self._changed(export)
        self._draining[export.handle.export_seq] = export
        return self._freeable(export, self._clock.monotonic())

    def begin_read(self, export: Export, epoch: int) -> None:
        with self._lock:
            self.verify_locked(export, epoch)
            export.readers += 1

    def end_read(self, export: Export) -> None:
        with self._lock:
            export.readers -= 1
            free_now = self._freeable(export, self._clock.monotonic())
        if free_now:
            self._free(export)

    def _free(self, export: Export) -> None:
        """Free the export. Runs once per export: only for the caller to which `_freeable` returned
        True.
        """
        handle = export.handle
        with self._lock:
            del self._draining[handle.export_seq]
            fence = self._fences[handle.request_id]
            fence.num_exports -= 1
            if fence.num_exports == 0:
                del self._fences[handle.request_id]
        why = export.end.message if export.end else "released"
        log.debug("request %s: export %d freed: %s", handle.request_id, handle.export_seq, why)
        try:
            self._on_released(handle, export.blocks, why)
        finally:
            export.freed.set_result(None)


class Reader:
    """The access of one conversation to one export, for one epoch."""

    def __init__(self, table: ExportTable, export: Export, epoch: int) -> None:
        self.handle = export.handle
        self.blocks = export.blocks
        self.num_bytes = export.num_bytes
        self._table = table
        self._export = export
        self._epoch = epoch
        self._closed = False
        self._urgent = 0  # as of the last snapshot
        self._taken_bytes = 0

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def completed_at(self) -> float | None:
        return self._export.completed_at

    def close(self) -> None:
        """Wake the thread that waits for progress: the conversation is over. Any thread."""
        with self._export.changed:
            self._closed = True
            self._export.changed.notify_all()

    def wait(self, seen: int | None, timeout_s: float, burst_bytes: int = 0) -> Snapshot | None:
        """Wait for progress after version `seen`.

        Return None after `timeout_s` without progress, or once closed. Progress of fewer than
        `burst_bytes` does not count until the export is complete. Raises KVStale or KVLost if the
        export is released, lapsed or fenced.
        """
        export, table = self._export, self._table
        with export.changed:

            def due() -> bool:
                if self._closed or export.end is not None:
                    return True
                enough = self._taken_bytes + burst_bytes
                if export.version != seen and (
                    export.urgent != self._urgent or export.published_bytes >= enough
                ):
                    return True
                export.wake_at = min(export.wake_at, enough)
                return False

            export.changed.wait_for(due, timeout_s)
            table.verify_locked(export, self._epoch)
            if self._closed or export.version == seen:
                return None
            self._urgent, self._taken_bytes = export.urgent, export.published_bytes
            return Snapshot(export.version, tuple(export.upto), export.first_tokens)

    def promise(self) -> None:
        """Call ExportTable.promise. Raises the errors of `wait`."""
        self._table.promise(self._export, self._epoch)

    def verify(self) -> None:
        """Raise unless the lease is held and the epoch is current right now."""
        with self._export.changed:
            self._table.verify_locked(self._export, self._epoch)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Keep the blocks from being freed inside the context. Raises the errors of `wait`."""
        self._table.begin_read(self._export, self._epoch)
        try:
            yield
        finally:
            self._table.end_read(self._export)
