"""Both halves of a node's KV exchange: exports its own blocks, fetches other nodes'.

Life: start() opens the lanes and watches the leases; export/publish/complete run on the engine's
thread and never block; fetch/renew/release run on the event loop and keep bytes off it (threads of
the data plane); stop() releases every export and breaks every conversation.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final

from baton.clock import Clock
from baton.errors import (
    ConfigError,
    InternalError,
    KVCorrupt,
    KVError,
    KVLost,
    KVRefused,
    KVStale,
    KVTimeout,
)
from baton.events import FirstToken
from baton.handles import Endpoint, KVHandle, LaneAddress
from baton.kv_spec import BlockLists
from baton.request import Request
from baton.timing import Timing
from kv_transfer.base import KVMemory, KVReady, Lane, OnReleased
from kv_transfer.exporter import Exporter
from kv_transfer.exports import ExportTable
from kv_transfer.fetcher import Conversation, Fetched, Fetcher
from kv_transfer.identity import Identity
from kv_transfer.leases import Leases
from kv_transfer.messages import SECRET_BYTES
from kv_transfer.session import Intent, Wanted, tokens_per_frame
from kv_transfer.stats import TransferStats

log = logging.getLogger(__name__)

MAX_FETCHES: Final = 64  # conversations in flight; most of them wait for a prefill
MAX_CONTROL: Final = 8  # renewals and releases in flight: never queued behind fetches


@dataclass(eq=False, repr=False)
class Connector:
    """base.KVConnector.

    `lanes`: best first; they are also all that is used. `boot_id`: hex of 16 random bytes, new at
    every start. `fingerprint`: baton.kv_spec.layout_fingerprint. `secret`: the deployment's.
    `on_released(handle, blocks, why)` fires exactly once per export, on any thread, when nobody
    touches its blocks any more; it must not block.
    """

    memory: KVMemory
    boot_id: str
    fingerprint: str
    secret: bytes
    lanes: Sequence[Lane]
    timing: Timing
    clock: Clock
    on_released: OnReleased
    stats: TransferStats = field(default_factory=TransferStats, init=False)

    def __post_init__(self) -> None:
        for index, layer in enumerate(self.memory.layers):
            if tokens_per_frame(layer, self.memory.format.dtype) == 0:
                raise ConfigError(f"KV of one token of layer {index} exceeds a frame")
        identity = Identity(self.boot_id, self.fingerprint, self.memory.format, self.secret)
        self._table = ExportTable(
            len(self.memory.layers), Leases(self.timing.kv_lease_s), self.clock, self.on_released
        )
        self._exporter = Exporter(
            identity, self.memory, self._table, self.timing, self.clock, self.stats
        )
        self._fetcher = Fetcher(identity, self.memory, self.stats)
        self._endpoint: Endpoint | None = None
        self._stopping = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lease_task: asyncio.Task[None] | None = None
        self._exported = asyncio.Event()
        self._data_threads = ThreadPoolExecutor(MAX_FETCHES, thread_name_prefix="kv-fetch")
        self._control_threads = ThreadPoolExecutor(MAX_CONTROL, thread_name_prefix="kv-control")

    # ---- life ----------------------------------------------------------------------------------
    async def start(self) -> None:
        """Open the lanes. Raises ConfigError if one cannot be; those opened are closed again."""
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
        """Release every export, break every conversation. Idempotent."""
        if self._lease_task is not None:
            self._lease_task.cancel()
            await asyncio.wait([self._lease_task])
            self._lease_task = None
        self._stopping = True  # before the sweep: a later export releases itself
        freed = self._table.release_all(KVLost("exporter stops"))
        await asyncio.to_thread(self._stop_lanes)
        if freed:
            await asyncio.wait([asyncio.wrap_future(future) for future in freed])
        for threads in (self._data_threads, self._control_threads):
            await asyncio.to_thread(threads.shutdown)

    def _stop_lanes(self) -> None:
        for lane in self.lanes:
            lane.stop()

    def endpoint(self) -> Endpoint:
        if self._endpoint is None:
            raise InternalError("the connector has not been started")
        return self._endpoint

    @property
    def active_exports(self) -> int:
        """Exports whose blocks are not free yet."""
        return self._table.num_exports

    @property
    def export_bytes(self) -> int:
        """KV bytes of the active exports, as they travel."""
        return self._table.export_bytes

    # ---- exporting -----------------------------------------------------------------------------
    def room_for(self, num_bytes: int) -> bool:
        return True

    def export(
        self, request: Request, sample: int, blocks: BlockLists, num_tokens: int
    ) -> KVHandle:
        self._check_cover(blocks, num_tokens)
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
        dtype = self.memory.format.dtype
        token_bytes = sum(layer.token_bytes(dtype) for layer in self.memory.layers)
        self._table.add(handle, blocks, num_tokens * token_bytes)
        self.stats.exported()
        if self._stopping:
            self._table.release(handle.export_seq, KVLost("exporter stops"))
        elif self._loop is not None:
            self._loop.call_soon_threadsafe(self._exported.set)
        return handle

    def publish(self, handle: KVHandle, layer: int, upto_token: int) -> bool:
        return self._table.publish(handle.export_seq, layer, upto_token)

    def complete(self, handle: KVHandle, first_tokens: Sequence[FirstToken]) -> None:
        self._table.complete(handle.export_seq, first_tokens)

    def expire(self, now: float) -> int:
        """Release what has lapsed by `now` (monotonic seconds); how many. For the lease watch."""
        count = self._table.expire(now)
        if count:
            self.stats.expired(count)
            log.info("%d KV leases have ended unclaimed", count)
        return count

    async def _watch_leases(self) -> None:
        """Sleep until the next lease can end. Renewals only move that later, exports wake us."""
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

    # ---- fetching ------------------------------------------------------------------------------
    async def fetch(
        self, handle: KVHandle, epoch: int, dst_blocks: BlockLists, start_token: int = 0
    ) -> KVReady:
        self._check_cover(dst_blocks, handle.num_tokens)
        timeout_ms = round(self.timing.request_s * 1000)
        wanted = Wanted(handle, epoch, Intent.FETCH, start_token, timeout_ms)
        started = self.clock.monotonic()
        try:
            fetched = await self._fetch_with_retry(wanted, dst_blocks)
        except KVError as error:
            self.stats.failed(error.code)
            log.info("request %s: KV fetch failed: %s", handle.request_id, error)
            raise
        assert fetched.end is not None
        seconds = self.clock.monotonic() - started
        self.stats.fetched(seconds)
        return KVReady(fetched.end.num_tokens, fetched.end.first_tokens, fetched.num_bytes, seconds)

    def _check_cover(self, blocks: BlockLists, num_tokens: int) -> None:
        count = min(held.end for held in blocks)
        if count * self.memory.format.block_size < num_tokens:
            raise InternalError(f"{count} blocks do not hold {num_tokens} tokens")

    async def renew(self, handle: KVHandle, epoch: int | None = None) -> None:
        epoch = handle.epoch if epoch is None else epoch
        if handle.boot_id == self.boot_id:
            self._table.renew(handle.export_seq, handle.secret, epoch)
            return
        await self._converse(self._control_threads, Wanted(handle, epoch, Intent.RENEW), ())

    async def release(self, handle: KVHandle, why: str, epoch: int | None = None) -> None:
        if handle.boot_id == self.boot_id:
            freed = self._table.release(handle.export_seq, KVStale(why))
            if freed is not None:
                await asyncio.shield(asyncio.wrap_future(freed))
            return
        wanted = Wanted(handle, handle.epoch if epoch is None else epoch, Intent.RELEASE)
        try:
            await self._converse(self._control_threads, wanted, ())
        except KVError as error:
            # Gone already, taken over by a newer epoch, or out of reach: the lease frees it.
            log.debug("request %s: release (%s): %s", handle.request_id, why, error)

    async def _fetch_with_retry(self, wanted: Wanted, blocks: BlockLists) -> Fetched:
        """One re-fetch after a corrupt frame, from the start: cheaper than a prefill."""
        renewal = asyncio.create_task(self._keep_lease(wanted), name="kv-renew")
        try:
            try:
                return await self._converse(self._data_threads, wanted, blocks)
            except KVCorrupt as error:
                self.stats.retried()
                log.warning("request %s: fetching again: %s", wanted.handle.request_id, error)
            return await self._converse(self._data_threads, wanted, blocks)
        finally:
            renewal.cancel()
            await asyncio.wait([renewal])

    async def _keep_lease(self, wanted: Wanted) -> None:
        """Hold the lease while the fetch waits for the prefill; failures show in the fetch."""
        while True:
            await asyncio.sleep(wanted.handle.lease_ms / 3000)
            try:
                await self.renew(wanted.handle, wanted.epoch)
            except KVError as error:
                log.debug("request %s: renewal: %s", wanted.handle.request_id, error)

    def _choose_lane(self, handle: KVHandle) -> tuple[Lane, str]:
        offered = {lane.name: lane.address for lane in handle.endpoint.lanes}
        for lane in self.lanes:
            if lane.name in offered:
                return lane, offered[lane.name]
        raise KVRefused(f"no common lane: {sorted(offered)} offered")

    async def _converse(
        self, threads: ThreadPoolExecutor, wanted: Wanted, blocks: BlockLists
    ) -> Fetched:
        """Hold one conversation on a thread. However it ends, the thread has left the blocks."""
        lane, address = self._choose_lane(wanted.handle)
        conversation = Conversation(self._fetcher, lane, address, wanted, blocks)
        progress_s = self.timing.kv_progress_s
        try:
            async with asyncio.timeout(None) as deadline:
                progress = _Progress(asyncio.get_running_loop(), deadline, progress_s)
                running = threads.submit(conversation.run, progress.made)
                finished = asyncio.wrap_future(running)
                try:
                    await asyncio.wait([finished])
                except asyncio.CancelledError:
                    conversation.cancel()
                    running.cancel()  # if it still waits for a thread
                    await _settled(finished)
                    raise
                finally:
                    progress.watched = False
            return finished.result()
        except TimeoutError as error:
            raise KVTimeout(f"no progress for {progress_s} s on lane {lane.name}") from error


@dataclass(slots=True)
class _Progress:
    """Moves a deadline of the event loop each time a data-plane thread gets on."""

    loop: asyncio.AbstractEventLoop
    deadline: asyncio.Timeout
    progress_s: float
    watched: bool = True

    def made(self) -> None:
        """Any thread."""
        with contextlib.suppress(RuntimeError):  # the loop has been closed: nobody waits any more
            self.loop.call_soon_threadsafe(self._extend)

    def _extend(self) -> None:
        if self.watched and not self.deadline.expired():
            self.deadline.reschedule(self.loop.time() + self.progress_s)


async def _settled(finished: asyncio.Future[Fetched]) -> None:
    """Wait until the thread has left the blocks, whatever happens; the caller re-raises."""
    while not finished.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait([finished])
    if not finished.cancelled():
        finished.exception()  # seen: the cancellation is what the caller reports
