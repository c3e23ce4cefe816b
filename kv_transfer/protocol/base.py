"""The interfaces of KV transfer: what a connector does, what it sees of a pool, what a lane must
do.

They have no behaviour. The connector is in connector.py, pools in layout.py, each lane in a file of
its own.
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

# where a sequence lies in a pool; only kv_transfer/pool looks inside
Blocks: TypeAlias = BlockLists


@dataclass(frozen=True, slots=True)
class Payload:
    """KV bytes in wire order: K, then V, then (int8) K's and V's scales of a token range,
    token-major.

    `heads`: which of the whole model's KV heads these are; None = all that the pool holds.
    """

    data: memoryview
    dtype: str
    heads: range | None = None


class KVMemory(Protocol):
    """What a connector sees of a KV pool.

    `blocks` hold a sequence's tokens in order, a list per layer group. [start, end) are token
    indices of that sequence, all held. `heads` are indices of the whole model's KV heads.
    """

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        """The layers of the whole model, before tensor parallelism."""
        ...

    @property
    def format(self) -> PoolFormat: ...

    @property
    def windowed(self) -> bool:
        """True if the pool keeps of a sliding-window layer only what later tokens see."""
        ...

    def heads(self, layer: int) -> range:
        """Return the KV heads that this pool holds, as indices of the whole model."""
        ...

    def read(
        self, layer: int, blocks: Blocks, start: int, end: int, heads: range | None = None
    ) -> Sequence[memoryview]:
        """Return fragments of tokens [start, end) in Payload's order, of the pool's dtype.

        `heads`: a part of the heads that the pool holds; None = all. On CPU the fragments are views
        into the pool, valid only while the blocks are pinned; otherwise they are host copies.
        """
        ...

    def write(self, layer: int, blocks: Blocks, start: int, end: int, payload: Payload) -> None:
        """Write `payload` as tokens [start, end), converted to the pool's dtype.

        Touches nothing else. Raises KVCorrupt if the payload's length is wrong.
        """
        ...

    def read_state(self, layer: int, blocks: Blocks, start: int, end: int) -> Sequence[memoryview]:
        """Return fragments of bytes [start, end) of the recurrent state that the layer keeps of the
        sequence: the inputs of its convolution, then its matrices. Valid as those of `read`.
        """
        ...

    def write_state(self, layer: int, blocks: Blocks, start: int, data: Buffer) -> None:
        """Write `data` as these bytes, from `start` on. It has landed when this returns."""
        ...

    def views(
        self, layer: int, blocks: Blocks, start: int, end: int, heads: range
    ) -> Sequence[memoryview] | None:
        """Return writable views in Payload's order into which the pool's own bytes can be received.

        None where there are no such views (a device pool, slices of rows).
        """
        ...

    def group(self, layer: int) -> int:
        """Return the index of the block list in which the layer's KV lies."""
        ...

    def tables(self, blocks: Blocks) -> tuple[tuple[int, ...], ...]:
        """Return the block tables that BLOCKS carries, one per layer group."""
        ...

    def written(self, layer: int, blocks: Blocks, upto: int) -> None:
        """Note that tokens [0, upto) of `layer`, and its recurrent state behind them, have been
        given to the device; they are published next.

        Called on the engine thread; never blocks.
        """
        ...

    def landed(self) -> None:
        """Order the engine's next work after all that this thread has written.

        Called on the thread of a conversation that has called `write`, when the conversation is
        over, whatever its outcome; never blocks.
        """
        ...


class HeldExport(Protocol):
    """An export that stays pinned on the exporter, its lease renewed, until it is let go."""

    async def lost(self) -> None:
        """Return when the lease cannot be kept any longer: whoever uses the blocks must stop."""
        ...

    def wanted(self) -> bool:
        """Whether the exporter needs its blocks back soon. Any thread; cheap.

        True if it is short of blocks, or drains, or nobody renews the lease any more.
        """
        ...

    def safe(self) -> bool:
        """Whether the exporter's blocks still hold the export. Any thread.

        True if the exporter has promised it for longer than now, or is dead. A reader asks before
        and after it reads.
        """
        ...

    async def release(self) -> None:
        """Release the export. Idempotent; never raises KVError.

        If the exporter is out of reach, the end of the lease frees the blocks.
        """
        ...


@dataclass(frozen=True, slots=True)
class KVReady:
    """A verified hand-over: KV of [start_token, num_tokens) lies in the destination blocks, the
    recurrent state behind num_tokens in the slot that they name.

    `held`: what the caller of fetch(hold=True) releases when it does not need the exporter's blocks
    any more; None if the export has been acknowledged. `adopted`: after fetch(adopt=True) the ids
    of all pages, which lie in the exporter's pool; they may be read while `held` is safe.
    `num_bytes`: those that were copied, or that the adopted pages hold. `lane`: the name of the
    lane. `layers`: how the fetch went on over the layers, as `NodeSpan.layers` tells it; adopted
    pages are not read, so they are not in it.
    """

    num_tokens: int
    first_tokens: tuple[FirstToken, ...]
    num_bytes: int
    seconds: float
    held: HeldExport | None = None
    adopted: tuple[int, ...] = ()
    lane: str = ""
    layers: tuple[int, ...] = ()


class KVConnector(Protocol):
    """Exports and fetches KV for one node process. Implemented by connector.Connector."""

    def endpoint(self) -> Endpoint:
        """Return boot id, lanes with their addresses, and layout. Only after start()."""
        ...

    def export(self, request: Request, sample: int, blocks: Blocks, num_tokens: int) -> KVHandle:
        """Offer `blocks` under a lease, BEFORE the forward pass. Any thread; never blocks.

        The caller keeps `blocks` pinned until on_released.
        """
        ...

    @property
    def export_bytes(self) -> int:
        """KV bytes of the exports whose blocks are not free yet."""
        ...

    def bytes_of(self, num_tokens: int) -> int:
        """Return the KV bytes of an export of `num_tokens` tokens, the argument that room_for
        takes.
        """
        ...

    def room_for(self, num_bytes: int) -> bool:
        """Whether one more export of `num_bytes` keeps within the byte budget. Any thread."""
        ...

    def publish(self, handle: KVHandle, layer: int, upto_token: int) -> bool:
        """Note that `layer` holds the KV of tokens [0, upto_token) and the recurrent state behind
        them, and extend the lease.

        Return False if the export is released or expired: then stop computing. Any thread; never
        blocks.
        """
        ...

    def complete(self, handle: KVHandle, first_tokens: Sequence[FirstToken]) -> None:
        """Give END its first tokens, after the last publish. Any thread; never blocks."""
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
        """Write tokens [start_token, handle.num_tokens) into `dst_blocks`, and the recurrent state
        into the slot that these name, keeping the lease.

        However it ends, nothing touches `dst_blocks` afterwards. Only a return makes them usable.
        `hold`: do not acknowledge; the export stays until KVReady.held is released. `adopt` (only
        if `adopts` is true; implies `hold`): return where all pages lie, and write the state alone.
        Raises KVStale, KVLost, KVCorrupt, KVTimeout; KVRefused if the two may never exchange KV.
        """
        ...

    def want_back(self, wanted: bool) -> None:
        """Tell peers that have adopted our blocks whether we are short of blocks. Any thread;
        cheap.
        """
        ...

    def adopts(self, handle: KVHandle) -> bool:
        """Whether the exporter's full pages can be used where they lie, like our own."""
        ...

    def follows_prefill(self, handle: KVHandle) -> bool:
        """Whether a fetch gains nothing by beginning before token 1.

        If so, the node should not even contact the exporter, which has the token to compute.
        """
        ...

    def precision_of(self, handle: KVHandle) -> str | None:
        """Return a tag that salts prefix hashes, e.g. "bfloat16>int8"; None if the KV is exact.

        Exact means: the KV that a fetch of `handle` writes equals KV computed here in every bit.
        """
        ...

    async def renew(self, handle: KVHandle, epoch: int | None = None) -> None:
        """Extend the lease for `epoch` (default: the handle's).

        Raises KVStale, KVLost, KVTimeout.
        """
        ...

    async def release(self, handle: KVHandle, why: str, epoch: int | None = None) -> None:
        """End the export. Idempotent; the exporter and the fetcher may call it.

        Returns when nobody touches the blocks. A fetcher that cannot reach the exporter returns all
        the same; then the end of the lease frees the blocks.
        """
        ...

    async def start(self) -> None: ...

    async def stop(self) -> None: ...


OnReleased: TypeAlias = Callable[[KVHandle, Blocks, str], None]


# ---- lanes --------------------------------------------------------------------------------------
# A lane carries parcels: one or more whole frames, joined (frames.split cuts them apart again). It
# may look into them or not, may split a parcel between two frames, and must keep the order.
class Wire(Protocol):
    """The fetching end of a connection, which holds one conversation after the other.

    All methods but `cancel` belong to one thread at a time.
    """

    def send(self, parcel: bytes) -> None:
        """Send a parcel. Raises KVLost."""
        ...

    def receive(self) -> Buffer | None:
        """Wait for the next parcel and return it; it is valid until the next call.

        Return None after the exporter's last parcel. Raises KVLost, KVTimeout.
        """
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
    """A wire that receives payloads straight into their destination, without a copy in between."""

    def receive_header(self) -> bytes | None:
        """Return the next frame's 48 bytes, or None after the last; call `receive_into` next."""
        ...

    def receive_into(self, views: Sequence[memoryview]) -> None:
        """Receive that frame's payload, which fills `views` exactly. Raises KVLost, KVTimeout."""
        ...


@dataclass(frozen=True, slots=True)
class KVSpan:
    """Tokens [start, end) of `heads` of one layer; heads are the whole model's, contiguous."""

    layer: int
    start: int
    end: int
    heads: range


@dataclass(frozen=True, slots=True)
class StateSpan:
    """Bytes [start, end) of the recurrent state of one layer."""

    layer: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Remote:
    """The exporter's end of a direct fetch.

    `format`: how the exporter stores KV. `tables`: in which of its blocks the sequence lies, one
    table per layer group. The lane's address says where its memory is.
    """

    format: PoolFormat
    tables: tuple[tuple[int, ...], ...]

    def table(self, layer: int, ours: KVMemory) -> tuple[int, ...]:
        """Return the exporter's blocks of the layer.

        There is one table for all layers, or one per layer group as the model and the exporter's
        format form them; our own grouping plays no part. Raises KVRefused for any other number of
        tables.
        """
        if len(self.tables) == 1:
            return self.tables[0]
        groups = _groups(ours.layers, self.format)
        if len(self.tables) != groups.num_groups:
            raise KVRefused(f"{len(self.tables)} block tables, not {groups.num_groups}")
        return self.tables[groups.group_of[layer]]


@lru_cache(16)
def _groups(layers: tuple[LayerSpec, ...], pool: PoolFormat) -> LayerGroups:
    """Return the layer groups that a pool of that format forms of the model's layers."""
    heads = [len(heads_of(spec.kv_heads, pool)) for spec in layers]
    local = [replace(spec, kv_heads=count) for spec, count in zip(layers, heads, strict=True)]
    return group_layers(local, pool.dtype)


@dataclass(frozen=True, slots=True)
class Target:
    """The fetcher's end: pulled KV goes into `blocks` of `memory`."""

    memory: KVMemory
    blocks: Blocks


@runtime_checkable
class DirectWire(Wire, Protocol):
    """A wire of a direct lane: frames say what may be read, `pull` reads it."""

    def pull(self, span: KVSpan, source: Remote, target: Target) -> None:
        """Copy `span` out of the exporter's memory. The copy may still be under way when this
        returns.

        Raises KVLost, KVRefused (a pair of nodes that this lane cannot serve).
        """
        ...

    def settle(self) -> None:
        """Wait until every pull so far has landed. Raises KVLost, KVTimeout."""
        ...


class Incoming(Protocol):
    """The exporting end of one connection, seen from the generator that serves it."""

    @property
    def buffer(self) -> memoryview | None:
        """Memory in which a frame may be built, HEADER_BYTES + MAX_PAYLOAD long; None if there is
        none.

        The frame is sent before the generator is resumed. With None, each frame is a bytes object.
        """
        ...

    def receive(self, timeout_s: float) -> Buffer | None:
        """Return the fetcher's next parcel, valid until the next call.

        None when the fetcher has sent everything, is gone, or is silent for too long.
        """
        ...

    def on_closed(self, callback: Callable[[], None]) -> None:
        """Call `callback`, from any thread, when the connection is over; at once if it is over
        already.
        """
        ...


# (lane name, connection) -> parcels
Serve: TypeAlias = Callable[[str, Incoming], Iterator[Buffer]]


class Lane(Protocol):
    """One way for frames between two processes. It has threads of its own and uses no event
    loop.
    """

    @property
    def name(self) -> str: ...

    @property
    def direct(self) -> bool:
        """True if the fetcher reads KV out of the exporter's memory (DirectWire); frames only say
        when.
        """
        ...

    def start(self, boot_id: str, serve: Serve) -> LaneAddress:
        """Begin to accept; every connection runs `serve` on a thread of this lane. Return the
        address.

        Facts about this end that never change (paths, strides, keys) are attributes of the address.
        """
        ...

    def reaches(self, address: LaneAddress) -> bool:
        """Whether a peer that announced `address` can be reached over this lane. Cheap."""
        ...

    def open(self, address: LaneAddress) -> Wire:
        """Begin a connection; if the peer is not there, `receive` raises KVLost."""
        ...

    def stop(self) -> None:
        """Break all connections of both directions and end every thread. Idempotent."""
        ...
