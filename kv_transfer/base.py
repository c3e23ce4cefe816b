"""The seams of KV transfer: what a connector is, what it sees of a pool, and what a lane must do.

Not here: any behaviour. Connector: connector.py. Pools: layout.py. Lanes: memory.py,
grpc_stream.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from baton.events import FirstToken
from baton.handles import Endpoint, KVHandle, LaneAddress
from baton.kv_spec import BlockLists, LayerSpec, PoolFormat
from baton.request import Request


class KVMemory(Protocol):
    """What a connector sees of a KV pool. `blocks` hold a sequence's tokens in order, a list per
    layer group; [start, end) are token indices of that sequence."""

    @property
    def layers(self) -> tuple[LayerSpec, ...]: ...

    @property
    def format(self) -> PoolFormat: ...

    def read(self, layer: int, blocks: BlockLists, start: int, end: int) -> Sequence[memoryview]:
        """K fragments, then V fragments of tokens [start, end), token-major; zeros for tokens that
        are not held, since no layer of their group can see them.

        On CPU views into the pool, valid only while the blocks are pinned; else host copies.
        """
        ...

    def write(
        self, layer: int, blocks: BlockLists, start: int, end: int, payload: memoryview
    ) -> None:
        """Put what `read` of the peer gave into tokens [start, end), as far as they are held;
        touches nothing else."""
        ...


@dataclass(frozen=True, slots=True)
class KVReady:
    """A verified hand-over: KV of [start_token, num_tokens) lies in the destination blocks."""

    num_tokens: int
    first_tokens: tuple[FirstToken, ...]
    num_bytes: int
    seconds: float


class KVConnector(Protocol):
    """One per node process; both halves. Implemented by connector.Connector."""

    def endpoint(self) -> Endpoint:
        """Boot id, lanes with addresses, layout. Only after start()."""
        ...

    @property
    def export_bytes(self) -> int:
        """KV bytes of the exports whose blocks are not free yet."""
        ...

    def room_for(self, num_bytes: int) -> bool:
        """Whether so many more bytes of exports fit the budget now. Any thread; never blocks."""
        ...

    def export(
        self, request: Request, sample: int, blocks: BlockLists, num_tokens: int
    ) -> KVHandle:
        """Offer `blocks` (pinned by the caller until on_released) under a lease, BEFORE the forward
        pass. Any thread; never blocks."""
        ...

    def publish(self, handle: KVHandle, layer: int, upto_token: int) -> bool:
        """KV of `layer` holds tokens [0, upto_token) now. Extends the lease. False = released or
        expired: stop computing. Any thread; never blocks."""
        ...

    def complete(self, handle: KVHandle, first_tokens: Sequence[FirstToken]) -> None:
        """What END carries; after the last publish. Any thread; never blocks."""
        ...

    async def fetch(
        self, handle: KVHandle, epoch: int, dst_blocks: BlockLists, start_token: int = 0
    ) -> KVReady:
        """Write tokens [start_token, handle.num_tokens) into `dst_blocks`, keeping the lease.

        However it ends, nothing touches `dst_blocks` afterwards. Only a return makes them usable.
        Raises KVStale, KVLost, KVCorrupt, KVTimeout; KVRefused if the two may never exchange KV.
        """
        ...

    async def renew(self, handle: KVHandle, epoch: int | None = None) -> None:
        """Extend the lease, speaking for `epoch` (default: the handle's).

        Raises KVStale, KVLost, KVTimeout.
        """
        ...

    async def release(self, handle: KVHandle, why: str, epoch: int | None = None) -> None:
        """End the export; idempotent, either side. Returns when nobody touches the blocks, or, on
        the other side, when the exporter cannot be reached (the lease frees them)."""
        ...

    async def start(self) -> None: ...

    async def stop(self) -> None: ...


OnReleased: TypeAlias = Callable[[KVHandle, BlockLists, str], None]


class Wire(Protocol):
    """The fetching end of one conversation. All methods but `cancel` belong to one thread."""

    def send(self, frame: bytes) -> None:
        """Raises KVLost."""
        ...

    def receive(self) -> bytes | None:
        """The next frame, None after the exporter's last. Blocks. Raises KVLost, KVTimeout."""
        ...

    def finish(self) -> None:
        """Say no more; what was sent still arrives. Idempotent."""
        ...

    def cancel(self) -> None:
        """Break the conversation from any thread: a blocked `receive` raises KVLost. Idempotent."""
        ...


class Incoming(Protocol):
    """The exporting end of one conversation, seen from the generator that serves it."""

    def receive(self, timeout_s: float) -> bytes | None:
        """The fetcher's next frame; None when it has said all, is gone, or is silent too long."""
        ...

    def on_closed(self, callback: Callable[[], None]) -> None:
        """Call back, from any thread, when the conversation is over; at once if it is already."""
        ...


Serve: TypeAlias = Callable[[str, Incoming], Iterator[bytes]]  # (lane name, conversation) -> frames


class Lane(Protocol):
    """One way for frames between two processes. Threads of its own, never an event loop's."""

    @property
    def name(self) -> str: ...

    def start(self, boot_id: str, serve: Serve) -> LaneAddress:
        """Begin to accept; every conversation runs `serve` on a thread of this lane."""
        ...

    def open(self, address: str) -> Wire:
        """Begin a conversation; a peer that is not there shows in `receive` as KVLost."""
        ...

    def stop(self) -> None:
        """Break all conversations of both directions and give back every thread. Idempotent."""
        ...
