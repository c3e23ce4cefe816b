"""StagedMemory: a KV pool on a device, reached by the host lanes through pinned buffers.

The engine's thread only marks what it has enqueued. The data plane's threads copy, on streams of
their own, and wait only for the work whose results they copy:

    read    written(): mark on the compute stream -> copy stream waits for that mark
                -> gather into a slot -> host waits for the copy -> views of the slot
    write   payload -> slot -> copy stream waits for the compute stream, once per conversation
                -> scatter into the pool -> landed(): the compute stream waits for all of it

A slot is one pinned buffer of the ring with a copy stream of its own. It is not given out again
while any view of it is alive. If no slot is free, the next copy waits: back-pressure on the data
plane, never on the engine. `DeviceCopies` hides the device; device_copies.py implements it for
CUDA.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Final, Protocol

import torch

from baton.protocol.errors import InternalError, KVTimeout
from baton.protocol.kv_spec import LayerSpec, PoolFormat
from kv_transfer.protocol.base import Blocks, Payload
from kv_transfer.protocol.frames import Buffer

SLOT_BYTES: Final = 4 << 20  # enough for a frame of int8 KV, converted to float32
NUM_SLOTS: Final = 16
MAX_MARKS: Final = 256  # per layer; a reached mark stays until the next one is added


class Mark(Protocol):
    """A point in the work of a device. Any thread."""

    def done(self) -> bool: ...

    def wait(self) -> None:
        """Block this thread until the device has reached the mark."""
        ...


@dataclass(frozen=True, slots=True)
class Places:
    """Tokens of a paged pool: token i lies in row `row[i]` of block `block[i]`; both int64."""

    block: torch.Tensor
    row: torch.Tensor


class DeviceCopies(Protocol):
    """What staging needs of a device. Any thread; no method waits for the device, except
    `Mark.wait`.

    `lane` names a copy stream: copies on one stream keep their order, others may overtake them.
    """

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        """Return host memory [num_bytes] uint8 for copies that run beside other work."""
        ...

    def mark(self) -> Mark:
        """Return the point after all work that the compute stream has been given until now."""
        ...

    def gather(
        self,
        lane: int,
        sources: Sequence[torch.Tensor],
        places: Places,
        host: torch.Tensor,
        after: Mark,
    ) -> Mark:
        """Once `after` is reached, copy the places of each source into `host` (uint8, exactly
        filled).

        The sources come one after the other: tensors [num_blocks, block_size, heads, dim] on the
        device.
        """
        ...

    def scatter(
        self,
        lane: int,
        host: torch.Tensor,
        targets: Sequence[torch.Tensor],
        places: Places,
        after: Mark,
    ) -> Mark:
        """Once `after` is reached, copy `host` into the places of the targets; the reverse of
        `gather`.
        """
        ...

    def hold_compute(self, until: Mark) -> None:
        """Let work that the compute stream gets from now on run after `until`."""
        ...


@dataclass(slots=True, eq=False)
class StagingSlot:
    """One buffer of the ring; belongs to whoever took it until its last view is gone."""

    index: int
    host: torch.Tensor  # [SLOT_BYTES] uint8, pinned
    busy: Mark | None = None  # the last copy from this buffer into the pool


class Ring:
    """A fixed number of slots. Any thread."""

    def __init__(self, copies: DeviceCopies, num_slots: int, slot_bytes: int) -> None:
        # SimpleQueue: a finalizer may call its put() on any thread and under any lock.
        self._free: SimpleQueue[StagingSlot] = SimpleQueue()
        self.slot_bytes = slot_bytes
        for index in range(num_slots):
            self._free.put(StagingSlot(index, copies.host_buffer(slot_bytes)))

    @property
    def num_free(self) -> int:
        return self._free.qsize()

    def take(self, num_bytes: int, timeout_s: float) -> StagingSlot:
        """Return a slot for `num_bytes` whose last copy is over; wait until one is free.

        Raises KVTimeout if none is free for `timeout_s`, InternalError for more bytes than a slot
        holds.
        """
        if num_bytes > self.slot_bytes:
            raise InternalError(f"{num_bytes} bytes do not fit a staging slot")
        try:
            slot = self._free.get(timeout=timeout_s)
        except Empty:
            raise KVTimeout(f"no staging buffer was free for {timeout_s} s") from None
        if slot.busy is not None:
            slot.busy.wait()
            slot.busy = None
        return slot

    def give(self, slot: StagingSlot) -> None:
        self._free.put(slot)

    def lend(self, slot: StagingSlot, num_bytes: int) -> memoryview:
        """Return a view of the slot's first bytes; the slot is free again when the last view is
        gone.
        """
        array = slot.host[:num_bytes].numpy()
        weakref.finalize(array, self._free.put, slot)
        return array.data


@dataclass(frozen=True, slots=True)
class _Written:
    """Tokens [0, upto) of the sequence in `blocks` are in the pool once `mark` is reached.

    The sequence is known by the identity of `blocks`, which is kept alive here: the next sequence
    in the very same blocks has another object, and must not get the marks of this one.
    """

    blocks: Blocks
    upto: int
    mark: Mark


class Marks:
    """The published tokens of each layer, and the point of the device's work at which they are
    written.
    """

    def __init__(self, num_layers: int) -> None:
        self._layers: list[deque[_Written]] = [deque() for _ in range(num_layers)]
        self._lock = threading.Lock()

    def add(self, layer: int, blocks: Blocks, upto: int, mark: Mark) -> None:
        """Add a mark, and forget those that are reached: marks of one stream are reached in order.

        Called by the engine thread.
        """
        with self._lock:
            marks = self._layers[layer]
            while marks and (len(marks) >= MAX_MARKS or marks[0].mark.done()):
                marks.popleft()
            marks.append(_Written(blocks, upto, mark))

    def find(self, layer: int, blocks: Blocks, end: int) -> Mark | None:
        """Return the earliest mark at which tokens [0, end) are written; None if it is unknown or
        forgotten.
        """
        with self._lock:
            for written in self._layers[layer]:
                if written.blocks is blocks and written.upto >= end:
                    return written.mark
        return None


@dataclass(slots=True)
class _StagedConversation(threading.local):
    """What one thread has written since it last called landed()."""

    after: Mark | None = None
    written: list[Mark] = field(default_factory=list[Mark])


class DevicePool(Protocol):
    """A KV pool in device memory, with what layout.py knows of it."""

    @property
    def layers(self) -> tuple[LayerSpec, ...]: ...

    @property
    def format(self) -> PoolFormat: ...

    @property
    def windowed(self) -> bool: ...

    def heads(self, layer: int) -> range: ...

    def group(self, layer: int) -> int: ...

    def tables(self, blocks: Blocks) -> tuple[tuple[int, ...], ...]: ...

    def parts(self, layer: int, heads: range | None) -> Sequence[torch.Tensor]:
        """Return K, V, then any scales of `heads` (None = all here), in the order of the wire.

        Each is [num_blocks, block_size, heads, dim].
        """
        ...

    def places(self, layer: int, blocks: Blocks, start: int, end: int) -> Places:
        """Return where tokens [start, end) lie."""
        ...

    def read_state(self, layer: int, blocks: Blocks, start: int, end: int) -> Sequence[memoryview]:
        """Return host copies of these bytes of a state."""
        ...

    def write_state(self, layer: int, blocks: Blocks, start: int, data: Buffer) -> None:
        """Write these bytes of a state; they have landed when this returns."""
        ...

    def converted(self, layer: int, num_tokens: int, payload: Payload) -> Sequence[memoryview]:
        """Return the payload's fragments in the pool's dtype. Raises KVCorrupt if its length is
        wrong.
        """
        ...


class StagedMemory:
    """Implements base.KVMemory over a pool on a device.

    The engine's thread calls `written`; threads of the data plane call all other methods.
    """

    def __init__(
        self,
        pool: DevicePool,
        copies: DeviceCopies,
        timeout_s: float,
        num_slots: int = NUM_SLOTS,
        slot_bytes: int = SLOT_BYTES,
    ) -> None:
        """`timeout_s`: the longest wait for a slot, after which a transfer fails with KVTimeout."""
        self._pool = pool
        self._copies = copies
        self._timeout_s = timeout_s
        self.ring = Ring(copies, num_slots, slot_bytes)
        self._marks = Marks(len(pool.layers))
        self._conversation = _StagedConversation()

    # ---- what the pool says ----------------------------------------------------------------------
    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        return self._pool.layers

    @property
    def format(self) -> PoolFormat:
        return self._pool.format

    @property
    def windowed(self) -> bool:
        return self._pool.windowed

    def heads(self, layer: int) -> range:
        return self._pool.heads(layer)

    def group(self, layer: int) -> int:
        return self._pool.group(layer)

    def tables(self, blocks: Blocks) -> tuple[tuple[int, ...], ...]:
        return self._pool.tables(blocks)

    def views(
        self, layer: int, blocks: Blocks, start: int, end: int, heads: range
    ) -> Sequence[memoryview] | None:
        """Return None: bytes cannot be received straight into a device."""
        return None

    # ---- out of the pool -------------------------------------------------------------------------
    def written(self, layer: int, blocks: Blocks, upto: int) -> None:
        """Mark that tokens [0, upto) of `layer` have been given to the compute stream.

        Called on the engine thread before any reader may know of them; does not wait.
        """
        self._marks.add(layer, blocks, upto, self._copies.mark())

    def read(
        self, layer: int, blocks: Blocks, start: int, end: int, heads: range | None = None
    ) -> Sequence[memoryview]:
        """Return host views of the parts of tokens [start, end), one after the other.

        Their slot stays taken until all views are gone. Waits for the engine's work and for a slot.
        Raises KVTimeout.
        """
        sources = self._pool.parts(layer, heads)
        places = self._pool.places(layer, blocks, start, end)
        num_bytes = sum(_row_bytes(source) for source in sources) * (end - start)
        # Without a mark of these tokens: wait for all that the engine has enqueued, which is always
        # enough.
        after = self._marks.find(layer, blocks, end) or self._copies.mark()
        slot = self.ring.take(num_bytes, self._timeout_s)
        try:
            host = slot.host[:num_bytes]
            self._copies.gather(slot.index, sources, places, host, after).wait()
        except BaseException:
            self.ring.give(slot)
            raise
        return (self.ring.lend(slot, num_bytes),)

    # ---- into the pool ---------------------------------------------------------------------------
    def write(self, layer: int, blocks: Blocks, start: int, end: int, payload: Payload) -> None:
        """Begin to write `payload` as tokens [start, end); `landed` ends it. Waits for a slot.

        Raises KVCorrupt for a payload of another length, KVTimeout.
        """
        data = self._pool.converted(layer, end - start, payload)
        num_bytes = sum(len(fragment) for fragment in data)
        targets = self._pool.parts(layer, payload.heads)
        places = self._pool.places(layer, blocks, start, end)
        mine = self._conversation
        if mine.after is None:
            # Steps under way may still read these blocks for their earlier owners.
            mine.after = self._copies.mark()
        slot = self.ring.take(num_bytes, self._timeout_s)
        try:
            host = slot.host[:num_bytes]
            _fill(host.numpy().data, data)
            slot.busy = self._copies.scatter(slot.index, host, targets, places, mine.after)
            mine.written.append(slot.busy)
        finally:
            self.ring.give(slot)

    # ---- recurrent state, without the ring -------------------------------------------------------
    def read_state(self, layer: int, blocks: Blocks, start: int, end: int) -> Sequence[memoryview]:
        """See KVMemory. Waits for all that the engine has enqueued, so for the step that wrote the
        state."""
        self._copies.mark().wait()
        return self._pool.read_state(layer, blocks, start, end)

    def write_state(self, layer: int, blocks: Blocks, start: int, data: Buffer) -> None:
        """See KVMemory. Waits for the steps under way, which may still use the slot."""
        self._copies.mark().wait()
        self._pool.write_state(layer, blocks, start, data)

    def landed(self) -> None:
        """Let the engine's next steps run after all that this thread has written. Does not wait.

        If the conversation failed, this also protects the next owners of the blocks from late
        writes.
        """
        mine = self._conversation
        for mark in mine.written:
            if not mark.done():
                self._copies.hold_compute(mark)
        mine.written.clear()
        mine.after = None


def _fill(buffer: memoryview, fragments: Sequence[memoryview]) -> None:
    taken = 0
    for fragment in fragments:
        buffer[taken : taken + len(fragment)] = fragment
        taken += len(fragment)


def _row_bytes(part: torch.Tensor) -> int:
    """Return the bytes of one token in a part [num_blocks, block_size, heads, dim]."""
    return part.shape[2] * part.shape[3] * part.element_size()
