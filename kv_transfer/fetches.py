"""The fetching half of a connector on the event loop: lanes, ranks, retries, leases, deadlines.

A fetch is one conversation with every exporting rank that has KV for this rank, each on a thread of
the data plane (fetcher.py). The fetch is complete when all conversations are; when one fails, all
are broken off. However a call ends, no thread touches the blocks afterwards.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import OrderedDict
from collections.abc import Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from baton.protocol.clock import Clock
from baton.protocol.errors import KVCorrupt, KVError, KVLost, KVRefused, KVStale, KVTimeout
from baton.protocol.events import FirstToken
from baton.protocol.handles import Endpoint, KVHandle, LaneAddress
from baton.runtime.config import AUTO
from baton.runtime.timing import Timing
from kv_transfer.fetcher import Conversation, Fetched, Fetcher, grouped
from kv_transfer.links import LinkSpeeds
from kv_transfer.loans import HeldFetch, Promise, end_task
from kv_transfer.protocol.base import Blocks, KVReady, Lane
from kv_transfer.protocol.fetch_session import Intent, WantedExport
from kv_transfer.protocol.lending import LendingLane, Loan
from kv_transfer.protocol.messages import DIRECT, INT8, RAW
from kv_transfer.protocol.shares import first_sent, meets, rows_bytes, share
from kv_transfer.stats import NO_LANE

log = logging.getLogger(__name__)

MAX_FETCHES: Final = 64  # conversations in flight; most of them wait for a prefill
# renewals and releases in flight; they have threads of their own, not those of fetches
MAX_CONTROL: Final = 8
MAX_CHOICES: Final = 4096  # codecs chosen by precision_of for fetches that have not begun


@dataclass(frozen=True, slots=True)
class FetchCall:
    """The arguments of KVConnector.fetch."""

    handle: KVHandle
    epoch: int
    blocks: Blocks
    start_token: int
    hold: bool
    adopt: bool = False


def ranks_of(handle: KVHandle) -> list[KVHandle]:
    """Return the handle for each exporting rank; all ranks share the export's number and secret."""
    ranks = handle.endpoint.ranks
    if not ranks:
        return [handle]
    return [replace(handle, boot_id=rank.boot_id, endpoint=rank) for rank in ranks]


class Fetches:
    """All fetches of a node. `lanes`: those that may be used. `wire_codec`: one of
    links.WIRE_CODECS.
    """

    def __init__(
        self, shared: Fetcher, lanes: Sequence[Lane], timing: Timing, clock: Clock, wire_codec: str
    ) -> None:
        self._shared = shared
        self._lanes = lanes
        self._timing = timing
        self._clock = clock
        self._wire_codec = wire_codec
        self.links = LinkSpeeds()
        self._choices: OrderedDict[tuple[str, int], str] = OrderedDict()
        self._background: set[asyncio.Task[None]] = set()
        self._held: set[HeldFetch] = set()
        self._data_threads = ThreadPoolExecutor(MAX_FETCHES, thread_name_prefix="kv-fetch")
        self._control_threads = ThreadPoolExecutor(MAX_CONTROL, thread_name_prefix="kv-control")

    async def stop(self) -> None:
        """Abandon every fetch and end every thread. Call it after the lanes have stopped.
        Idempotent.
        """
        self._shared.wires.close()
        for held in list(self._held):
            await held.abandon()
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        for threads in (self._data_threads, self._control_threads):
            await asyncio.to_thread(threads.shutdown)

    # ---- precision -----------------------------------------------------------------------------
    def precision_of(self, handle: KVHandle) -> str | None:
        """See base.KVConnector.precision_of. It also fixes the codec of the fetch that follows."""
        codec = self._choose_codec(handle)
        self._choices[handle.boot_id, handle.export_seq] = codec
        if len(self._choices) > MAX_CHOICES:
            self._choices.popitem(last=False)
        theirs, ours = handle.endpoint.format.dtype, self._shared.memory.format.dtype
        if codec == RAW:
            return None if theirs == ours else f"{theirs}>{ours}"
        return f"{theirs}>{codec}>{ours}" if ours != codec else f"{theirs}>{ours}"

    def _choose_codec(self, handle: KVHandle) -> str:
        theirs = handle.endpoint.format
        lanes = self._common(ranks_of(handle)[0].endpoint)
        # int8 KV is sent unchanged, and bytes that cross no wire need not be made smaller.
        direct = bool(lanes) and lanes[0][0].direct
        if direct or theirs.dtype == INT8 or INT8 not in theirs.codecs:
            return RAW
        if self._wire_codec == AUTO:
            return self.links.codec(handle.boot_id)
        return self._wire_codec

    # ---- adoption ------------------------------------------------------------------------------
    def adopts(self, handle: KVHandle) -> bool:
        """See base.KVConnector.adopts."""
        theirs, ours = handle.endpoint.format, self._shared.memory.format
        alike = (theirs.block_size, theirs.dtype) == (ours.block_size, ours.dtype)
        windowed = any(layer.window for layer in self._shared.memory.layers)
        if not alike or windowed:
            return False
        single = not handle.endpoint.ranks and theirs.tp_size == ours.tp_size == 1
        common = self._common(handle.endpoint)
        if not single or not common:
            return False
        lane, address = common[0]
        return isinstance(lane, LendingLane) and lane.lends(address)

    def follows_prefill(self, handle: KVHandle, small_bytes: int) -> bool:
        """See base.KVConnector.follows_prefill: true for few bytes that the exporter must send
        itself.
        """
        common = self._common(ranks_of(handle)[0].endpoint)
        sent = bool(common) and not common[0][0].direct
        states = sum(spec.state_bytes for spec in self._shared.memory.layers)
        return sent and self._kv_bytes(handle) + states <= small_bytes

    async def _borrow(
        self, call: FetchCall, fetched: Fetched, promise: Promise, started: float
    ) -> Loan:
        """Return a loan of the export's pages, which may be read from then on. Raises KVError."""
        handle, remote, end = call.handle, fetched.remote, fetched.end
        if end is not None and end.lease_ms >= handle.lease_ms:
            promise.renewed(started)
        lane = next((lane for lane in self._lanes if lane.name == fetched.lane), None)
        offered = (each for each in handle.endpoint.lanes if each.name == fetched.lane)
        address = next(offered, None)
        if not isinstance(lane, LendingLane) or remote is None or address is None:
            raise KVLost("the exporter's pages are out of reach")
        count = -(-handle.num_tokens // self._shared.memory.format.block_size)
        (table,) = remote.tables
        if len(table) < count:
            raise KVCorrupt(f"{len(table)} blocks for {count} pages")
        loan = lane.borrow(address, table[:count])
        promise.covers(loan)
        if promise.is_long():
            return loan
        try:  # END came so late that little is left of the lease that FETCH began
            asked_at = self._clock.monotonic()
            await self.renew(handle, call.epoch)
        except BaseException:
            loan.end()
            raise
        promise.renewed(asked_at)
        return loan

    # ---- fetch ---------------------------------------------------------------------------------
    async def fetch(self, call: FetchCall) -> KVReady:
        """See base.KVConnector.fetch."""
        handle = call.handle
        if call.adopt:  # an adoption fetches only where the pages lie, once all of them are written
            call = replace(call, start_token=handle.num_tokens)
        started = self._clock.monotonic()
        promise = Promise(self._clock, handle.lease_ms / 1000)
        renewal = asyncio.create_task(
            self._keep_lease(handle, call.epoch, promise), name="kv-renew"
        )
        try:
            parts, loan = await self._deliver(call, promise, started)
        except BaseException:
            await end_task(renewal)
            raise
        seconds = self._clock.monotonic() - started
        num_bytes = sum(part.num_bytes for part in parts)
        moved = num_bytes + (self._kv_bytes(handle) if call.adopt else 0)
        self._count(call, parts, num_bytes, moved, seconds)
        held = None
        if call.hold or call.adopt:
            let_go = partial(self.let_go, handle, call.epoch)
            held = HeldFetch(renewal, promise, loan, let_go, self._held.discard)
            self._held.add(held)
        else:
            await end_task(renewal)
            if len(ranks_of(handle)) > 1:
                self._spawn(self.let_go(handle, call.epoch))
        adopted = () if loan is None else loan.ids
        first_tokens = _first_tokens(parts)
        lane = parts[0].lane
        arrivals = [part.arrivals for part in parts]
        layers = grouped(arrivals, len(self._shared.memory.layers), started)
        return KVReady(handle.num_tokens, first_tokens, moved, seconds, held, adopted, lane, layers)

    async def _deliver(
        self, call: FetchCall, promise: Promise, started: float
    ) -> tuple[list[Fetched], Loan | None]:
        """Return what each rank has sent and, for an adoption, the loan. Counts and re-raises a
        KVError.
        """
        try:
            parts = await self._fetch_with_retry(call)
            loan = await self._borrow(call, parts[0], promise, started) if call.adopt else None
        except KVError as error:
            self._shared.stats.failed(error.code)
            peer, lanes = call.handle.boot_id, call.handle.endpoint.lanes
            lane = lanes[0].name if lanes else NO_LANE
            self._shared.stats.peer_failed(peer, lane, self._clock.monotonic())
            log.info("request %s: KV fetch failed: %s", call.handle.request_id, error)
            raise
        return parts, loan

    def _count(
        self, call: FetchCall, parts: Sequence[Fetched], num_bytes: int, moved: int, seconds: float
    ) -> None:
        """Count a fetch that succeeded, and record the speed of its link. `moved`: with the bytes
        of adopted pages."""
        stats, lane = self._shared.stats, parts[0].lane
        stats.skipped(self._bytes_out_of_sight(call))
        peer = call.handle.boot_id
        waited_ms = max((part.end.waited_ms for part in parts if part.end), default=0)
        stats.fetched(lane, seconds, peer, self._clock.monotonic(), moved, waited_ms / 1000)
        if call.adopt:
            stats.adopted(lane, moved - num_bytes)
        else:
            self.links.observe(peer, num_bytes, seconds - waited_ms / 1000)

    async def _fetch_with_retry(self, call: FetchCall) -> list[Fetched]:
        """Fetch; after a corrupt frame fetch once more from the start, which is cheaper than a
        prefill.
        """
        key = (call.handle.boot_id, call.handle.export_seq)
        chosen = self._choices.pop(key, None)
        codec = RAW if call.adopt else chosen or self._choose_codec(call.handle)
        try:
            return await self._fetch_parts(call, codec)
        except KVCorrupt as error:
            self._shared.stats.retried(error.lane)
            log.warning("request %s: fetching again: %s", call.handle.request_id, error)
        return await self._fetch_parts(call, codec)

    async def _fetch_parts(self, call: FetchCall, codec: str) -> list[Fetched]:
        """Fetch from every rank that has KV for this one, at once. If one fails, break off all."""
        memory = self._shared.memory
        ranks = ranks_of(call.handle)
        sources = [r for r in ranks if meets(memory.layers, r.endpoint.format, memory.format)]
        wanted = WantedExport(
            call.handle,
            call.epoch,
            Intent.FETCH,
            call.start_token,
            round(self._timing.request_s * 1000),
            codec,
            windowed=memory.windowed,
            # With several ranks, none may free its blocks before all have delivered.
            hold=call.hold or call.adopt or len(ranks) > 1,
            part=memory.format.tp_size > 1,
            adopt=call.adopt,
        )
        conversations = [
            self._converse(self._data_threads, replace(wanted, handle=source), call.blocks)
            for source in sources
        ]
        if len(conversations) == 1:  # the usual case: it needs no task of its own
            return [await conversations[0]]
        return await _all_or_none(conversations)

    def _kv_bytes(self, handle: KVHandle) -> int:
        dtype = handle.endpoint.format.dtype
        layers = self._shared.memory.layers
        return handle.num_tokens * sum(rows_bytes(s, s.kv_heads, dtype) for s in layers)

    def _bytes_out_of_sight(self, call: FetchCall) -> int:
        memory = self._shared.memory
        if not memory.windowed:
            return 0
        num_bytes = 0
        for spec in memory.layers:
            first = first_sent(spec, call.start_token, call.handle.num_tokens, windowed=True)
            for rank in ranks_of(call.handle):
                heads = share(spec, rank.endpoint.format, memory.format)
                row = rows_bytes(spec, len(heads), rank.endpoint.format.dtype)
                num_bytes += row * (first - call.start_token)
        return num_bytes

    # ---- leases and releases -------------------------------------------------------------------
    async def renew(self, handle: KVHandle, epoch: int) -> None:
        """Renew the lease at this one exporting rank. Raises KVStale, KVLost, KVTimeout."""
        await self._converse(self._control_threads, WantedExport(handle, epoch, Intent.RENEW), ())

    async def release(self, handle: KVHandle, epoch: int, why: str, part: bool = False) -> None:
        """Release the export at this one exporting rank; log a KVError instead of raising it.

        With `part` the exporter frees the blocks only once all ranks of our group have released
        them.
        """
        wanted = WantedExport(handle, epoch, Intent.RELEASE, part=part)
        try:
            await self._converse(self._control_threads, wanted, ())
        except KVError as error:
            # The export is gone, taken over by a newer epoch, or out of reach: then the lease frees
            # it.
            log.debug("request %s: release (%s): %s", handle.request_id, why, error)

    async def let_go(self, handle: KVHandle, epoch: int) -> None:
        """End a fetch that held its ranks: release each exporting rank that sent us KV. Our rank 0
        also releases the exporting ranks that no rank of our group needed.
        """
        memory = self._shared.memory
        part = memory.format.tp_size > 1
        letting_go: list[Coroutine[Any, Any, None]] = []
        for rank in ranks_of(handle):
            theirs = rank.endpoint.format
            if meets(memory.layers, theirs, memory.format):
                letting_go.append(self.release(rank, epoch, "fetched", part))
            elif memory.format.tp_rank == 0 and not any(
                meets(memory.layers, theirs, replace(memory.format, tp_rank=r))
                for r in range(memory.format.tp_size)
            ):
                letting_go.append(self.release(rank, epoch, "not needed"))
        await asyncio.gather(*letting_go)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work, name="kv-acknowledge")
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _keep_lease(self, handle: KVHandle, epoch: int, promise: Promise) -> None:
        """Renew the lease at all ranks each third of it; return when it is lost."""
        ranks = ranks_of(handle)
        lease_s = handle.lease_ms / 1000
        renewed_at = self._clock.monotonic()
        while self._clock.monotonic() - renewed_at < lease_s:
            await asyncio.sleep(lease_s / 3)
            asked_at = self._clock.monotonic()
            renewals = (self.renew(rank, epoch) for rank in ranks)
            errors = await asyncio.gather(*renewals, return_exceptions=True)
            for error in errors:
                if error is not None:
                    log.debug("request %s: renewal: %s", handle.request_id, error)
            if any(isinstance(error, KVStale | KVRefused) for error in errors):
                return
            if not any(errors):
                renewed_at = asked_at
                promise.renewed(asked_at)

    # ---- one conversation ----------------------------------------------------------------------
    def _common(self, endpoint: Endpoint) -> list[tuple[Lane, LaneAddress]]:
        """Return the lanes that lead to `endpoint`, in the exporter's order, as it knows its memory
        best.
        """
        ours = {lane.name: lane for lane in self._lanes}
        return [
            (lane, address)
            for address in endpoint.lanes
            if (lane := ours.get(address.name)) is not None and lane.reaches(address)
        ]

    async def _converse(
        self, threads: ThreadPoolExecutor, wanted: WantedExport, blocks: Blocks
    ) -> Fetched:
        """Hold one conversation over the best lane that reaches the exporter."""
        endpoint = wanted.handle.endpoint
        common = self._common(endpoint)
        if not common:
            offered = sorted(address.name for address in endpoint.lanes)
            if any(lane.name in offered for lane in self._lanes):
                raise KVLost(f"the exporter is out of reach by {offered}")
            raise KVRefused(f"no common lane: {offered} offered")
        *better, last = common
        for lane, address in better:
            conversation = self._conversation(lane, address, wanted, blocks)
            try:
                return await self._hold(threads, conversation, lane)
            except (KVLost, KVRefused) as error:
                if not conversation.elsewhere:
                    raise
                now, peer = self._clock.monotonic(), wanted.handle.boot_id
                self._shared.stats.fell_back(lane.name, peer, now)
                log.info("lane %s gives way to the next: %s", lane.name, error)
        return await self._hold(threads, self._conversation(*last, wanted, blocks), last[0])

    def _conversation(
        self, lane: Lane, address: LaneAddress, wanted: WantedExport, blocks: Blocks
    ) -> Conversation:
        if lane.direct and wanted.intent is Intent.FETCH:
            return Conversation(self._shared, lane, address, replace(wanted, codec=DIRECT), blocks)
        wanted = replace(wanted, adopt=False)
        return Conversation(self._shared, lane, address, wanted, blocks)

    async def _hold(
        self, threads: ThreadPoolExecutor, conversation: Conversation, lane: Lane
    ) -> Fetched:
        """Hold one conversation on a thread. However it ends, that thread touches the blocks no
        more.
        """
        progress, patience_s = _Progress(), self._timing.kv_progress_s
        running = threads.submit(conversation.run, progress.made)
        finished = asyncio.wrap_future(running)
        try:
            if not await progress.until(finished, patience_s):
                raise TimeoutError
            return finished.result()
        except KVCorrupt as error:
            error.lane = lane.name
            raise
        except TimeoutError as error:
            raise KVTimeout(f"no progress for {patience_s} s on lane {lane.name}") from error
        finally:
            if not finished.done():
                conversation.cancel()
                running.cancel()  # in case it still waits for a thread
                await _settled(finished)


@dataclass(slots=True)
class _Progress:
    """When a thread of the data plane last made progress; `at` is None before its first."""

    at: float | None = None

    def made(self) -> None:
        """Record progress without waking the event loop, which would take the interpreter from this
        thread. Any thread.
        """
        self.at = time.monotonic()

    async def until(self, finished: asyncio.Future[Any], patience_s: float) -> bool:
        """Wait for the end of `finished`. Return False after `patience_s` without progress."""
        left_s = patience_s
        while left_s > 0:
            await asyncio.wait([finished], timeout=left_s)
            if finished.done():
                return True
            left_s = patience_s - (0.0 if self.at is None else time.monotonic() - self.at)
        return False


def _first_tokens(parts: Sequence[Fetched]) -> tuple[FirstToken, ...]:
    """Return the first tokens of the first END that carries any: those of all ranks are equal."""
    ends = (part.end for part in parts if part.end is not None)
    return next((end.first_tokens for end in ends if end.first_tokens), ())


async def _all_or_none(conversations: Sequence[Coroutine[Any, Any, Fetched]]) -> list[Fetched]:
    """Run the conversations at the same time; return their results in the same order.

    If one fails, cancel the others and raise its error. When this function has returned or raised,
    also after a cancellation, no thread of a conversation reads or writes KV blocks any more.
    """
    tasks = [asyncio.create_task(conversation) for conversation in conversations]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        pending = [task for task in tasks if not task.done()]
        for task in pending:
            task.cancel()
        if pending:
            await _settled(asyncio.gather(*pending, return_exceptions=True))
        for task in tasks:
            if not task.cancelled():
                task.exception()  # so that asyncio does not report the errors that are not raised
    for task in tasks:
        if not task.cancelled():
            task.result()  # raises the error that broke off the others
    return [task.result() for task in tasks]


async def _settled(finished: asyncio.Future[Any]) -> None:
    """Wait until the threads have left the blocks, even if cancelled; the caller re-raises."""
    while not finished.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait([finished])
    if not finished.cancelled():
        # retrieved, so that asyncio does not report it: the caller is cancelled
        finished.exception()
