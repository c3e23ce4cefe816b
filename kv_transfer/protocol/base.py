"""The seams of KV transfer: what a connector is, what it sees of a pool, and what a lane must do.

Not here: any behaviour. Connector: connector.py. Pools: layout.py. Lanes: a file each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Protocol, TypeAlias, runtime_checkable

from baton.engine.memory.layer_groups import LayerGroups, group_layers
from baton.protocol.errors import KVRefused
from baton.protocol.events import FirstToken
from baton.protocol.handles import Endpoint, KVHandle, LaneAddress
from baton.protocol.kv_spec import BlockLists, LayerSpec, PoolFormat
from baton.protocol.request import Request
from kv_transfer.protocol.frames import Buffer
from kv_transfer.protocol.shares import heads_of

Blocks: TypeAlias = BlockLists  # where a sequence lies in a pool; only layout.py looks inside


@dataclass(frozen=True, slots=True)
class Payload:
    """KV bytes as they travel: K, then V, then (int8) K's and V's scales of a token range, each
    token-major. `heads`: which of the whole model's KV heads; None = all that the pool holds."""

    data: memoryview
    dtype: str
    heads: range | None = None


class KVMemory(Protocol):
    """What a connector sees of a KV pool. `blocks` hold a sequence's tokens in order, a list per
    layer group; [start, end) are token indices of that sequence, all held; `heads` are indices of
    the whole model's KV heads."""

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        """Of the whole model, before tensor parallelism."""
        ...

    @property
    def format(self) -> PoolFormat: ...

    @property
    def windowed(self) -> bool:
        """The pool keeps of a sliding-window layer only what later tokens still see."""
        ...

    def heads(self, layer: int) -> range:
        """The whole model's KV heads that this pool holds."""
        ...

    def read(
        self, layer: int, blocks: Blocks, start: int, end: int, heads: range | None = None
    ) -> Sequence[memoryview]:
        """Fragments of tokens [start, end) in Payload's order, of the pool's dtype. `heads`: a part
        of what the pool holds, None = all.

        On CPU views into the pool, valid only while the blocks are pinned; else host copies.
        """
        ...

    def write(self, layer: int, blocks: Blocks, start: int, end: int, payload: Payload) -> None:
        """Put `payload` into tokens [start, end), converted to the pool's dtype; touches nothing
        else. Raises KVCorrupt if its length is wrong."""
        ...

    def views(
        self, layer: int, blocks: Blocks, start: int, end: int, heads: range
    ) -> Sequence[memoryview] | None:
        """Writable views in Payload's order that the pool's own bytes can be received into; None
        where there are none (a device pool, slices of rows)."""
        ...

    def group(self, layer: int) -> int:
        """Which of a sequence's block lists the layer's KV lies in."""
        ...

    def tables(self, blocks: Blocks) -> tuple[tuple[int, ...], ...]:
        """The block tables that BLOCKS carries, one per layer group."""
        ...

    def written(self, layer: int, blocks: Blocks, upto: int) -> None:
        """Tokens [0, upto) of `layer` have been given to the device, and are published next.
        Engine thread; never blocks."""
        ...

    def landed(self) -> None:
        """A conversation whose thread has called `write` is over, whatever its outcome: work that
        the engine enqueues from now on comes after those writes. Called on that thread; never
        blocks."""
        ...


class HeldExport(Protocol):
    """An export that stays pinned on the exporter, its lease renewed, until it is let go."""

    async def lost(self) -> None:
        """Returns when the lease cannot be kept any longer: whoever uses the blocks must stop."""
        ...

    def wanted(self) -> bool:
        """Whether the exporter needs its blocks back soon: it is short of blocks, or drains, or
        nobody renews the lease any more. Any thread; cheap."""
        ...

    def safe(self) -> bool:
        """Whether the exporter's blocks still hold the export: it has promised that beyond this
        moment, or it is dead. A reader asks before and after it reads. Any thread."""
        ...

    async def release(self) -> None:
        """Let go. Idempotent; never raises KVError: if the exporter is out of reach, the lease
        frees the blocks."""
        ...


@dataclass(frozen=True, slots=True)
class KVReady:
    """A verified hand-over: KV of [start_token, num_tokens) lies in the destination blocks.

    `held`: what the caller of fetch(hold=True) releases once it does not need the exporter's blocks
    any more; None if the export has been acknowledged. `adopted`: after fetch(adopt=True) the ids
    of all pages, which lie in the exporter's pool; they may be read while `held` is safe.
    """

    num_tokens: int
    first_tokens: tuple[FirstToken, ...]
    num_bytes: int
    seconds: float
    held: HeldExport | None = None
    adopted: tuple[int, ...] = ()


class KVConnector(Protocol):
    """One per node process; both halves. Implemented by connector.Connector."""

    def endpoint(self) -> Endpoint:
        """Boot id, lanes with addresses, layout. Only after start()."""
        ...

    def export(self, request: Request, sample: int, blocks: Blocks, num_tokens: int) -> KVHandle:
        """Offer `blocks` (pinned by the caller until on_released) under a lease, BEFORE the forward
        pass. Any thread; never blocks."""
        ...

    @property
    def export_bytes(self) -> int:
        """KV bytes of the exports whose blocks are not free yet."""
        ...

    def bytes_of(self, num_tokens: int) -> int:
        """KV bytes of an export of so many tokens: what room_for wants to know."""
        ...

    def room_for(self, num_bytes: int) -> bool:
        """Whether an export of `num_bytes` more keeps within the byte budget; one always does.
        Any thread."""
        ...

    def publish(self, handle: KVHandle, layer: int, upto_token: int) -> bool:
        """KV of `layer` holds tokens [0, upto_token) now. Extends the lease. False = released or
        expired: stop computing. Any thread; never blocks."""
        ...

    def complete(self, handle: KVHandle, first_tokens: Sequence[FirstToken]) -> None:
        """What END carries; after the last publish. Any thread; never blocks."""
        ...

    async def fetch(
        self,
        handle: KVHandle,
        epoch: int,
        dst_blocks: Blocks,
        start_token: int = 0,
        hold: bool = False,
        adopt: bool = False,
    ) -> KVReady:
        """Write tokens [start_token, handle.num_tokens) into `dst_blocks`, keeping the lease.

        However it ends, nothing touches `dst_blocks` afterwards. Only a return makes them usable.
        `hold`: do not acknowledge; the export stays until KVReady.held is released. `adopt` (if
        `adopts` says so; implies `hold`): say where all pages lie, and write none.
        Raises KVStale, KVLost, KVCorrupt, KVTimeout; KVRefused if the two may never exchange KV.
        """
        ...

    def want_back(self, wanted: bool) -> None:
        """Announce to peers that have adopted our blocks whether we are short of blocks. Any
        thread; cheap."""
        ...

    def adopts(self, handle: KVHandle) -> bool:
        """Whether the exporter's full pages can be used where they lie, as if they were ours."""
        ...

    def follows_prefill(self, handle: KVHandle) -> bool:
        """Whether a fetch gains nothing by beginning before token 1. Then it should not even ask
        its exporter, which has the token to compute."""
        ...

    def precision_of(self, handle: KVHandle) -> str | None:
        """How the KV that a fetch of `handle` writes differs from KV computed here: None if in no
        bit, else a tag that salts prefix hashes, e.g. "bfloat16>int8"."""
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


OnReleased: TypeAlias = Callable[[KVHandle, Blocks, str], None]


# ---- lanes --------------------------------------------------------------------------------------
# A lane carries parcels: one or more whole frames, joined (frames.split cuts them apart again). It
# may look into them or not, may split a parcel between two frames, and must keep the order.
class Wire(Protocol):
    """The fetching end of a connection, which holds one conversation after the other. All methods
    but `cancel` belong to one thread at a time."""

    def send(self, parcel: bytes) -> None:
        """Raises KVLost."""
        ...

    def receive(self) -> Buffer | None:
        """The next parcel, valid until the next call; None after the exporter's last. Blocks.
        Raises KVLost, KVTimeout."""
        ...

    def finish(self) -> None:
        """End our direction; frames already sent still arrive. Only `cancel` may follow.
        Idempotent."""
        ...

    def cancel(self) -> None:
        """Break the connection from any thread: a blocked `receive` raises KVLost. Idempotent."""
        ...


@runtime_checkable
class ScatterWire(Wire, Protocol):
    """A wire that can put payloads where they belong without a copy in between."""

    def receive_header(self) -> bytes | None:
        """The next frame's 48 bytes, as `receive`. Its payload must be taken next."""
        ...

    def receive_into(self, views: Sequence[memoryview]) -> None:
        """The payload of that frame, which fills `views` exactly. Raises KVLost, KVTimeout."""
        ...


@dataclass(frozen=True, slots=True)
class KVSpan:
    """Tokens [start, end) of `heads` of one layer; heads are the whole model's, contiguous."""

    layer: int
    start: int
    end: int
    heads: range


@dataclass(frozen=True, slots=True)
class Remote:
    """The exporter's end of a direct fetch: how it stores KV, and in which of its blocks the
    sequence lies (one table per layer group). The lane's address says where its memory is."""

    format: PoolFormat
    tables: tuple[tuple[int, ...], ...]

    def table(self, layer: int, ours: KVMemory) -> tuple[int, ...]:
        """The exporter's blocks of the layer. There is one table for all layers, or one per layer
        group as the model and the exporter's format form them; our own grouping plays no part.
        Raises KVRefused for any other number of tables."""
        if len(self.tables) == 1:
            return self.tables[0]
        groups = _groups(ours.layers, self.format)
        if len(self.tables) != groups.num_groups:
            raise KVRefused(f"{len(self.tables)} block tables, not {groups.num_groups}")
        return self.tables[groups.group_of[layer]]


@lru_cache(16)
def _groups(layers: tuple[LayerSpec, ...], pool: PoolFormat) -> LayerGroups:
    """How a pool of that format groups the model's layers."""
    heads = [len(heads_of(spec.kv_heads, pool)) for spec in layers]
    local = [replace(spec, kv_heads=count) for spec, count in zip(layers, heads, strict=True)]
    return group_layers(local, pool.dtype)


@dataclass(frozen=True, slots=True)
class Target:
    """The fetcher's end: what is pulled goes into `blocks` of `memory`."""

    memory: KVMemory
    blocks: Blocks


@runtime_checkable
class DirectWire(Wire, Protocol):
    """A wire of a direct lane: frames say what may be read, `pull` reads it."""

    def pull(self, span: KVSpan, source: Remote, target: Target) -> None:
        """Copy `span` out of the exporter's memory; may still be under way when this returns.
        Raises KVLost, KVRefused (a pair this lane cannot serve)."""
        ...

    def settle(self) -> None:
        """Wait until every pull so far has landed. Raises KVLost, KVTimeout."""
        ...


class Loan(Protocol):
    """Pages of an exporter's pool that we can read in place. Any thread."""

    @property
    def ids(self) -> tuple[int, ...]:
        """As our own pool's views count them."""
        ...

    def orphaned(self) -> bool:
        """Their owner is dead: nobody will ever write them again."""
        ...

    def wanted(self) -> bool:
        """Their owner is short of pages, and would have them back."""
        ...

    def end(self) -> None:
        """They are read no more. Idempotent."""
        ...


@runtime_checkable
class LendingLane(Protocol):
    """A lane to pools of which pages can be used in place."""

    def want_back(self, wanted: bool) -> None:
        """Announce to users of our own pool's pages whether we are short of pages. Any thread."""
        ...

    def let_go(self) -> None:
        """Unmap the memory of dead peers that nobody uses. Any thread, now and then."""
        ...

    def lends(self, address: LaneAddress) -> bool:
        """Whether that pool's pages are laid out as ours are."""
        ...

    def borrow(self, address: LaneAddress, pages: Sequence[int]) -> Loan:
        """Raises KVLost, KVRefused, and KVCorrupt for a page that the pool does not have."""
        ...


class Incoming(Protocol):
    """The exporting end of one connection, seen from the generator that serves it."""

    @property
    def buffer(self) -> memoryview | None:
        """Where a frame may be built, HEADER_BYTES + MAX_PAYLOAD long; it is sent before the
        generator is advanced. None: frames are bytes of their own."""
        ...

    def receive(self, timeout_s: float) -> Buffer | None:
        """The fetcher's next parcel, valid until the next call; None when it has sent all, is gone,
        or is silent for too long."""
        ...

    def on_closed(self, callback: Callable[[], None]) -> None:
        """Call back, from any thread, when the connection is over; at once if it is already."""
        ...


# (lane name, connection) -> parcels
Serve: TypeAlias = Callable[[str, Incoming], Iterator[Buffer]]


class Lane(Protocol):
    """One way for frames between two processes. Threads of its own, never an event loop's."""

    @property
    def name(self) -> str: ...

    @property
    def direct(self) -> bool:
        """KV is read out of the exporter's memory (DirectWire); frames only say when."""
        ...

    def start(self, boot_id: str, serve: Serve) -> LaneAddress:
        """Begin to accept; every connection runs `serve` on a thread of this lane. What never
        changes about this end (paths, strides, keys) goes into the address' attributes."""
        ...

    def reaches(self, address: LaneAddress) -> bool:
        """Whether a peer that announced `address` can be reached this way from here. Cheap."""
        ...

    def open(self, address: LaneAddress) -> Wire:
        """Begin a connection; a peer that is not there shows in `receive` as KVLost."""
        ...

    def stop(self) -> None:
        """Break all connections of both directions and give back every thread. Idempotent."""
        ...
