"""The connector of a node: it exports the node's own KV blocks and fetches those of other nodes.

start() opens the lanes and begins to watch the leases. export, publish and complete run on the
engine's thread and never block. fetch, renew and release run on the event loop; threads of the data
plane move the bytes. stop() releases every export and breaks every conversation.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from baton.protocol.clock import Clock
from baton.protocol.errors import ConfigError, InternalError, KVLost, KVStale
from baton.protocol.events import FirstToken
from baton.protocol.handles import Endpoint, KVHandle, LaneAddress
from baton.protocol.request import Request
from baton.runtime.rotation.deployment_secret import Secrets
from baton.runtime.timing import Timing
from kv_transfer.exporter import Exporter
from kv_transfer.exports import ExportTable
from kv_transfer.fetcher import Fetcher
from kv_transfer.fetches import FetchCall, Fetches, ranks_of
from kv_transfer.lanes.wires import WirePool
from kv_transfer.links import WIRE_CODECS, LinkSpeeds
from kv_transfer.protocol.base import Blocks, KVMemory, KVReady, Lane, OnReleased
from kv_transfer.protocol.frames import MAX_PAYLOAD
from kv_transfer.protocol.identity import Identity
from kv_transfer.protocol.leases import Leases
from kv_transfer.protocol.lending import LendingLane
from kv_transfer.protocol.messages import RAW, SECRET_BYTES
from kv_transfer.protocol.shares import rows_bytes, tokens_per_frame
from kv_transfer.stats import TransferStats

log = logging.getLogger(__name__)

SMALL_BURSTS = 8
IDLE_FACTOR = 2  # progress deadlines that a connection is kept for; the exporter waits for three


@dataclass(frozen=True, slots=True)
class TransferOptions:
    """What an operator may choose about KV transfers.

    `wire_codec`: raw, int8, or auto (int8 to peers behind a slow link). `max_export_bytes`: the
    budget that room_for checks; None means the size of the pool. `burst_bytes`: while a prefill
    runs, its KV is sent in bursts of at least this size. An export of only a few bursts is sent
    after token 1. `adopt`: read an exporter's pages where they lie, if a lane can do that.
    """

    wire_codec: str = RAW
    max_export_bytes: int | None = None
    burst_bytes: int = MAX_PAYLOAD
    adopt: bool = False

    @property
    def small_bytes(self) -> int:
        """The largest export that is sent only after token 1 (8 MiB: 3 ms of a Unix socket).

        Sending such an export earlier would take these milliseconds from the core that computes
        token 1.
        """
        return SMALL_BURSTS * self.burst_bytes


@dataclass(eq=False, repr=False)
class Connector:
    """Implements base.KVConnector.

    `lanes`: the lanes to use, best first; no other lane is used. `boot_id`: hex of 16 random bytes,
    new at every start. `fingerprint`: see baton.protocol.kv_spec.layout_fingerprint. `secrets`:
    those of the deployment. `on_released(handle, blocks, why)` is called exactly once per export,
    on any thread, when nobody reads its blocks any more; it must not block.
    """

    memory: KVMemory
    boot_id: str
    fingerprint: str
    secrets: Secrets
    lanes: Sequence[Lane]
    timing: Timing
    clock: Clock
    on_released: OnReleased
    options: TransferOptions = TransferOptions()
    stats: TransferStats = field(default_factory=TransferStats, init=False)

    def __post_init__(self) -> None:
        memory, options = self.memory, self.options
        dtype = memory.format.dtype
        counts = [len(memory.heads(layer)) for layer in range(len(memory.layers))]
        for index, layer in enumerate(memory.layers):
            if tokens_per_frame(layer, counts[index], dtype) == 0:
                raise ConfigError(f"KV of one token of layer {index} exceeds a frame")
        if options.wire_codec not in WIRE_CODECS:
            known = ", ".join(WIRE_CODECS)
            raise ConfigError(
                f"no codec {options.wire_codec!r}; there are {known}", field="kv_wire_codec"
            )
        self._layer_bytes = [
            rows_bytes(layer, count, dtype)
            for layer, count in zip(memory.layers, counts, strict=True)
        ]
        identity = Identity(self.boot_id, self.fingerprint, memory.format, self.secrets)
        self._state_bytes = [layer.state_bytes for layer in memory.layers]
        self._table = ExportTable(
            self._layer_bytes, Leases(self.timing.kv_lease_s), self.clock, self.on_released
        )
        self._exporter = Exporter(
            identity,
            memory,
            self._table,
            self.timing,
            self.clock,
            self.stats,
            direct=frozenset(lane.name for lane in self.lanes if lane.direct),
            burst_bytes=options.burst_bytes,
            small_bytes=options.small_bytes,
        )
        self._wires = WirePool(self.clock, IDLE_FACTOR * self.timing.kv_progress_s)
        self._fetches = Fetches(
            Fetcher(identity, memory, self.stats, self._wires, self.clock),
            self.lanes,
            self.timing,
            self.clock,
            options.wire_codec,
        )
        self._endpoint: Endpoint | None = None
        self._stopping = False
        self._draining = False
        self._want_lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lease_task: asyncio.Task[None] | None = None
        self._exported = asyncio.Event()

    # ---- life ----------------------------------------------------------------------------------
    async def start(self) -> None:
        """Open the lanes. If a lane cannot be opened, close those already open and raise
        ConfigError.
        """
        self._loop = asyncio.get_running_loop()
        addresses: list[LaneAddress] = []
        try:
            for lane in self.lanes:
                address = await asyncio.to_thread(lane.start, self.boot_id, self._exporter.serve)
                addresses.append(address)
        except ConfigError:
            await asyncio.to_thread(self._stop_lanes)
            raise
        self._endpoint = Endpoint(
            self.boot_id, self.fingerprint, self.memory.format, tuple(addresses)
        )
        self._lease_task = asyncio.create_task(self._watch_leases(), name="kv-leases")

    async def stop(self) -> None:
        """Release every export and break every conversation. Idempotent."""
        if self._lease_task is not None:
            self._lease_task.cancel()
            await asyncio.wait([self._lease_task])
            self._lease_task = None
        self._stopping = True  # before the sweep: a later export releases itself
        freed = self._table.release_all(KVLost("exporter stops"))
        await asyncio.to_thread(self._stop_lanes)
        if freed:
            await asyncio.wait([asyncio.wrap_future(future) for future in freed])
        await self._fetches.stop()

    def _stop_lanes(self) -> None:
        for lane in self.lanes:
            lane.stop()

    def endpoint(self) -> Endpoint:
        if self._endpoint is None:
            raise InternalError("the connector has not been started")
        return self._endpoint

    def join_group(self, ranks: Sequence[Endpoint]) -> None:
        """Make this connector the leader of a tensor-parallel group.

        From then on its endpoint, and so every handle, names the endpoint of each rank in rank
        order. Call it after all ranks have started. Raises InternalError for a model with recurrent
        state: its ranks have one connector, beside the leader (pool/group_memory.py).
        """
        if any(self._state_bytes):
            raise InternalError("ranks with connectors of their own hand over no recurrent state")
        formats = [(rank.format.tp_size, rank.format.tp_rank) for rank in ranks]
        if formats != [(len(ranks), index) for index in range(len(ranks))]:
            raise InternalError(f"not the ranks of one group: {formats}")
        self._endpoint = replace(self.endpoint(), ranks=tuple(ranks))

    @property
    def active_exports(self) -> int:
        """Exports whose blocks are not free yet."""
        return self._table.num_exports

    @property
    def export_bytes(self) -> int:
        """Bytes of KV in all active exports, in the pool's dtype."""
        return self._table.export_bytes

    @property
    def links(self) -> LinkSpeeds:
        """The measured speeds of the links to peers."""
        return self._fetches.links

    # ---- exporting -----------------------------------------------------------------------------
    def room_for(self, num_bytes: int) -> bool:
        """See base.KVConnector.room_for."""
        budget = self.options.max_export_bytes
        used = self._table.export_bytes
        if budget is None or used + num_bytes <= budget:
            return True
        self.stats.no_room()
        return False

    def bytes_of(self, num_tokens: int) -> int:
        """Return the bytes of an export of `num_tokens` tokens, the argument that room_for takes:
        KV and recurrent state.
        """
        return num_tokens * sum(self._layer_bytes) + sum(self._state_bytes)

    def export(self, request: Request, sample: int, blocks: Blocks, num_tokens: int) -> KVHandle:
        handle = KVHandle(
            boot_id=self.boot_id,
            export_seq=self._table.next_sequence(),
            request_id=request.id,
            epoch=request.epoch,
            num_tokens=num_tokens,
            secret=secrets.token_bytes(SECRET_BYTES),
            endpoint=self.endpoint(),
            lease_ms=round(self.timing.kv_lease_s * 1000),
            sample=sample,
        )
        self._offer(handle, blocks)
        return handle

    def export_share(self, handle: KVHandle, blocks: Blocks) -> None:
        """Offer this rank's part of an export whose `handle` the leader of its group has made.

        From then on publish, complete and release accept that handle on this rank as well. Any
        thread.
        """
        self._offer(handle, blocks)

    def _offer(self, handle: KVHandle, blocks: Blocks) -> None:
        self._check_blocks(blocks, handle.num_tokens)
        self._table.add(handle, blocks, self.bytes_of(handle.num_tokens))
        self.stats.exported()
        if self._stopping:
            self._table.release(handle.export_seq, KVLost("exporter stops"))
        elif self._loop is not None:
            self._loop.call_soon_threadsafe(self._exported.set)

    def _check_blocks(self, blocks: Blocks, num_tokens: int) -> None:
        size = self.memory.format.block_size
        for table in self.memory.tables(blocks):
            if len(table) * size < num_tokens:
                raise InternalError(f"{len(table)} blocks do not hold {num_tokens} tokens")
        if any(self._state_bytes) and blocks[0].state_slot is None:
            raise InternalError("the blocks name no slot for the recurrent state")

    def publish(self, handle: KVHandle, layer: int, upto_token: int) -> bool:
        blocks = self._table.blocks_of(handle.export_seq)
        if blocks is None:
            return False
        self.memory.written(layer, blocks, upto_token)
        state_bytes = self._state_bytes[layer] if upto_token == handle.num_tokens else 0
        return self._table.publish(handle.export_seq, layer, upto_token, state_bytes)

    def complete(self, handle: KVHandle, first_tokens: Sequence[FirstToken]) -> None:
        self._table.complete(handle.export_seq, first_tokens)

    def expire(self, now: float) -> int:
        """Release the exports whose lease has lapsed by `now` (monotonic seconds); return their
        number.
        """
        lanes = self._table.expire(now)
        for lane in lanes:
            self.stats.expired(lane)
        if lanes:
            log.info("%d KV leases have ended unclaimed", len(lanes))
        return len(lanes)

    async def _watch_leases(self) -> None:
        """Release lapsed exports forever, sleeping until the next lease can end.

        A renewal only moves that moment back; a new export wakes this task.
        """
        while True:
            self.expire(self.clock.monotonic())
            self._exported.clear()
            expiry = self._table.next_expiry()
            left = None if expiry is None else max(0.0, expiry - self.clock.monotonic())
            try:
                async with asyncio.timeout(left):
                    await self._exported.wait()
            except TimeoutError:
                continue

    def want_back(self, wanted: bool) -> None:
        """See base.KVConnector.want_back."""
        with self._want_lock:
            for lane in self.lanes:
                if isinstance(lane, LendingLane):
                    lane.want_back(wanted or self._draining)

    def let_go(self) -> None:
        """Close old idle connections and unmap the memory of dead peers. Called at each
        heartbeat.
        """
        self._wires.drop_old()
        for lane in self.lanes:
            if isinstance(lane, LendingLane):
                lane.let_go()

    def drain(self) -> None:
        """Ask borrowers to give blocks back from now on, whatever want_back says. Any thread."""
        self._draining = True
        self.want_back(True)

    # ---- fetching ------------------------------------------------------------------------------
    def adopts(self, handle: KVHandle) -> bool:
        """See base.KVConnector.adopts."""
        return self.options.adopt and not self._is_ours(handle) and self._fetches.adopts(handle)

    def follows_prefill(self, handle: KVHandle) -> bool:
        """See base.KVConnector.follows_prefill."""
        small_bytes = self.options.small_bytes
        return not self._is_ours(handle) and self._fetches.follows_prefill(handle, small_bytes)

    def precision_of(self, handle: KVHandle) -> str | None:
        """See base.KVConnector.precision_of."""
        return self._fetches.precision_of(handle)

    async def fetch(
        self,
        handle: KVHandle,
        epoch: int,
        dst_blocks: Blocks,
        start_token: int = 0,
        hold: bool = False,
        adopt: bool = False,
    ) -> KVReady:
        """See base.KVConnector.fetch."""
        self._check_blocks(dst_blocks, handle.num_tokens)
        call = FetchCall(handle, epoch, dst_blocks, start_token, hold, adopt)
        return await self._fetches.fetch(call)

    async def renew(self, handle: KVHandle, epoch: int | None = None) -> None:
        """See base.KVConnector.renew. Renews at every rank of the exporter."""
        epoch = handle.epoch if epoch is None else epoch
        await asyncio.gather(*(self._renew_at(rank, epoch) for rank in ranks_of(handle)))

    async def _renew_at(self, rank: KVHandle, epoch: int) -> None:
        if self._is_ours(rank):
            self._table.renew(rank.export_seq, rank.secret, epoch)
        else:
            await self._fetches.renew(rank, epoch)

    async def release(self, handle: KVHandle, why: str, epoch: int | None = None) -> None:
        """See base.KVConnector.release. Releases at every rank of the exporter.

        If this node is one of those ranks, only this rank's own export is released.
        """
        epoch = handle.epoch if epoch is None else epoch
        ranks = ranks_of(handle)
        own = [rank for rank in ranks if self._is_ours(rank)]
        if own:
            freed = self._table.release(handle.export_seq, KVStale(why))
            if freed is not None:
                await asyncio.shield(asyncio.wrap_future(freed))
            return
        await asyncio.gather(*(self._fetches.release(rank, epoch, why) for rank in ranks))

    def _is_ours(self, rank: KVHandle) -> bool:
        return rank.boot_id == self.boot_id
