"""Runs: the resumable requests under way on this router, and how any request is found again.

    begin    a new request: admitted, claimed with its canonical form, run by a task of its own
    adopt    one whose router is gone (resumable/adoption.py): the same, from what its log has
    find     by its owner and name: one that runs here, or the record of any other

Readers come and go without a task noticing; once nobody has read for its grace, it is cancelled. A
Run computes nothing and shows nothing itself: it drives the dispatcher, finds stop strings in the
text, and ends what its readers read (router/resumable/replay.py). All on one event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from hmac import compare_digest
from typing import Final, Protocol

from baton.protocol.clock import Clock
from baton.protocol.errors import (
    BatonError,
    Cancelled,
    InvalidRequest,
    Unavailable,
    UnsupportedFeature,
)
from baton.protocol.events import TokenEvent
from baton.protocol.request import Request, RequestState
from baton.runtime.log import request_context
from router.config import MAX_KEPT_MB
from router.metrics.resumable import Reading, RunStats
from router.metrics.router import RouterMetrics
from router.request.completion import CallRunner, Completion
from router.request.failures import as_baton_error, log_failure
from router.request.trace import RequestTrace
from router.resumable.canonical import Canonical, canonical_of, record_id
from router.resumable.follower import Follower
from router.resumable.kept import KeptBodies
from router.resumable.replay import Told
from router.resumable.run_log import RunLog
from router.store.base import ALIAS, RequestRecord, Swept
from router.store.guard import StoreGuard
from router.store.log_details import output_ids_of

logger = logging.getLogger(__name__)
AWAY: Final = "the store is away: resumable requests must wait for it"


class RunDispatch(Protocol):
    """What a run needs of router/request/dispatcher.py."""

    def run(
        self, request: Request, trace: RequestTrace, *, admitted: bool = False
    ) -> AsyncGenerator[TokenEvent, None]: ...
    def stop_sample(self, request_id: str, sample: int) -> None: ...


@dataclass(frozen=True, slots=True)
class RunParts:
    """Parts of RouterServices."""

    dispatcher: RunDispatch
    store: StoreGuard
    metrics: RouterMetrics
    clock: Clock
    stats: RunStats = field(default_factory=RunStats)
    max_kept_mb: int = MAX_KEPT_MB  # of bodies, for each key


class Source:
    """A completion's RunDispatch: what an adopted request's log has, then what nodes compute.

    `dispatched`: the dispatcher has the request, so it also records its end.
    """

    def __init__(self, dispatcher: RunDispatch, told: Told, epoch: int | None) -> None:
        self._dispatcher = dispatcher
        self._known = list(told.tokens)
        self._ended = set(told.ended)
        self._num_samples = told.num_samples
        self._epoch = epoch  # None: a new request
        self.dispatched = False

    async def run(self, request: Request, trace: RequestTrace) -> AsyncGenerator[TokenEvent, None]:
        for token in self._known:
            yield token.event
        if len(self._ended) == self._num_samples:
            return
        self.dispatched = True
        if self._epoch is not None:
            outputs = output_ids_of(self._known, self._num_samples)
            ended = tuple(sorted(self._ended))
            request = replace(request, output_ids=outputs, epoch=self._epoch, ended=ended)
        live = self._dispatcher.run(request, trace, admitted=self._epoch is not None)
        async with aclosing(live) as events:
            async for event in events:
                yield event

    def stop_sample(self, request_id: str, sample: int) -> None:
        self._ended.add(sample)
        if self.dispatched:
            self._dispatcher.stop_sample(request_id, sample)


class Run:
    """One resumable request of this router. `epoch`: of an adopted one.

    The life: start() -> readers come and go -> it ends, or abandon() or leave() ends it.
    """

    def __init__(
        self, canonical: Canonical, completion: Completion, log: RunLog, parts: RunParts
    ) -> None:
        self.canonical = canonical
        self.log = log
        self.told = log.told
        self.failure: BatonError | None = None
        self.epoch: int | None = None
        self._completion = completion
        self._parts = parts
        self._readers = 0
        self._timer: asyncio.TimerHandle | None = None
        self._looking: asyncio.Task[None] | None = None
        self._left = False
        self._task: asyncio.Task[None] | None = None

    @property
    def id(self) -> str:
        return self.canonical.request.id

    @property
    def taken(self) -> bool:
        """It was never begun: another router has a request of this id."""
        failure = self.failure
        return isinstance(failure, InvalidRequest) and failure.field == "request_id"

    def start(self, over: Callable[[], object], settle: Callable[[], Awaitable[None]]) -> None:
        """Run it in a task of its own: `settle` once its end is told, `over` when nothing of it is
        left to do. Its grace begins with `wait_for_readers`."""
        self._task = asyncio.create_task(self._live(settle), name=f"run {self.id}")
        self._task.add_done_callback(lambda _: self._over(over))

    def wait_for_readers(self) -> None:
        """From now on somebody must read it, or its grace runs out."""
        self._watch()

    async def accepted(self, wait_s: float | None = None) -> None:
        """Until it is recorded, or has failed before that; for `wait_s` at most."""
        if self.log.opened.is_set():
            return
        waiter = asyncio.ensure_future(self.log.opened.wait())
        assert self._task is not None, "it was started"
        try:
            both = {waiter, self._task}
            await asyncio.wait(both, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiter.cancel()

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[Told]:
        """Somebody reads it."""
        self._readers += 1
        try:
            yield self.told
        finally:
            self._readers -= 1
            self._watch()

    def abandon(self) -> None:
        """Cancel it: nobody wants it any more."""
        if self._task is not None:
            self._task.cancel()

    async def leave(self) -> None:
        """Stop it here without an end: it is, or will be, another router's."""
        self._left = True
        self.told.cut()
        self.abandon()
        if self._task is not None:
            await asyncio.wait({self._task})

    # ---- its task ----

    async def _live(self, settle: Callable[[], Awaitable[None]]) -> None:
        with request_context(self.id):
            try:
                await self._drive()
            except asyncio.CancelledError:
                self.failure = Cancelled("the request was cancelled")
            except Exception as error:  # noqa: BLE001  every failure becomes the stream's end
                self.failure = as_baton_error(error)
                log_failure(self.failure, error)
            await self._end()
            if self.told.closed:
                await settle()

    async def _drive(self) -> None:
        parts, completion = self._parts, self._completion
        source = Source(parts.dispatcher, self.told, self.epoch)
        runner = CallRunner(source, parts.metrics, parts.clock)
        async with aclosing(completion.deltas(runner)) as deltas:
            async for _ in deltas:
                pass  # readers make text by themselves
        if completion.trace.aborted:
            self.failure = Cancelled("the request was aborted")
        ledger = parts.store.ledgers.get(self.id)
        if not source.dispatched and ledger is not None:
            # All of it was in the log: only the end had not been recorded.
            await ledger.move(RequestState.DECODE)
            tokens = str(completion.completion_tokens)
            await ledger.finish(RequestState.FINISHED, output_tokens=tokens)

    async def _end(self) -> None:
        """Tell readers the end, once nobody can tell another one."""
        log = self.log
        if self._left or log.lost:
            self.told.cut()
        elif not log.opened.is_set():
            self.told.close(self.failure)  # it was never taken on
        elif await log.until_written(settled=self.failure is not None):
            self.told.close(self.failure)
        else:
            self.told.cut()

    def _over(self, ended: Callable[[], object]) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if not self.told.closed:
            self.told.cut()
        ended()

    # ---- nobody reads ----

    def _watch(self, grace_s: float | None = None) -> None:
        """Set the timer anew."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._readers == 0 and self._task is not None and not self._task.done():
            wait_s = self.canonical.grace_s if grace_s is None else grace_s
            self._timer = asyncio.get_running_loop().call_later(wait_s, self._look)

    def _look(self) -> None:
        self._looking = asyncio.create_task(self._abandon_unread(), name=f"grace {self.id}")

    async def _abandon_unread(self) -> None:
        """The grace is over, unless somebody follows it through another router."""
        record = await self._parts.store.call(lambda store: store.read(self.id))
        if self._readers:
            return
        idle_s = None if record is None else record.idle_s
        grace_s = self.canonical.grace_s
        if idle_s is not None and idle_s < grace_s:
            self._watch(grace_s - idle_s)
        else:
            logger.info("request %s: nobody has read it for %g s", self.id, grace_s)
            self._parts.stats.abandoned += 1
            self.abandon()


@dataclass(frozen=True, slots=True)
class Found:
    """A resumable request, wherever it runs. `reading()` gives what its readers may see. `new`: it
    was begun by this very call."""

    canonical: Canonical
    body_digest: str
    reading: Callable[[], AbstractAsyncContextManager[Told]]
    new: bool = False


class Runs:
    """All of one router. The life: made -> used -> stop()."""

    def __init__(self, parts: RunParts) -> None:
        self._parts = parts
        self._runs: dict[str, Run] = {}
        self._aliases: dict[str, str] = {}  # of these -> their ids
        self._leaving: set[asyncio.Task[None]] = set()
        self._kept = KeptBodies(parts.clock, parts.max_kept_mb << 20)
        self.readers = RouterMetrics()  # of replays: a request counts once, by its run
        self.builders: dict[str, Callable[[Canonical], Awaitable[Completion]]] = {}
        self.enders: dict[str, Callable[[Found], Awaitable[None]]] = {}  # told of ends here
        parts.store.watchers.append(self._after_heartbeat)

    @property
    def clock(self) -> Clock:
        return self._parts.clock

    @property
    def stats(self) -> RunStats:
        return self._parts.stats

    @property
    def num_live(self) -> int:
        return len(self._runs)

    @asynccontextmanager
    async def reading(self, found: Found, *, resumed: bool) -> AsyncIterator[Told]:
        """What a reader may see, counted; `resumed`: it goes on after an event."""
        start = Reading.FIRST if found.new else Reading.REPLAY
        self.stats.readings[Reading.RESUMED if resumed else start] += 1
        self.stats.readers += 1
        try:
            async with found.reading() as told:
                yield told
        finally:
            self.stats.readers -= 1

    def waits(self, request_id: str) -> bool:
        """It is this router's, and not recorded yet: it waits for room."""
        run = self._runs.get(request_id)
        return run is not None and not run.log.opened.is_set()

    def check_open(self) -> None:
        """Raise Unavailable while no resumable request can be taken on."""
        if self._parts.store.stats.away:
            raise Unavailable(AWAY)

    async def find(self, owner: str, name: str) -> Found | None:
        """The request of that owner and name; None if there is none. Raises Unavailable."""
        return await self._find(owner, record_id(owner, name))

    async def _find(self, owner: str, request_id: str) -> Found | None:
        store = self._parts.store
        run = self._run_of(request_id)
        if run is not None:
            await run.accepted()
            if run.log.opened.is_set() and not store.holds_leases:
                raise Unavailable(AWAY)  # it may be another router's by now
            if not run.taken:
                return _found(run)
        record = await store.call(lambda store: store.read(request_id))
        self.check_open()
        canonical = None if record is None else canonical_of(record, self.clock)
        if record is None or canonical is None or not compare_digest(canonical.owner, owner):
            return None
        return Found(canonical, canonical.body_digest, lambda: self._following(record, canonical))

    async def begin(
        self,
        canonical: Canonical,
        completion: Completion,
        fields: dict[str, str],
        wait_s: float | None = None,
    ) -> Found:
        """Take a new request on, or find it, if somebody asked for the same in this moment, here or
        at another router.

        Returns when it is recorded, or refused: then its readers are told so. With `wait_s` it need
        not be by then, and its grace does not begin before somebody has read it. Raises
        UnsupportedFeature for what is not kept, Overloaded if too much is, Unavailable.
        """
        if canonical.request.params.prompt_logprobs is not None:
            message = "log-probabilities of the prompt are not kept for resumable requests"
            raise UnsupportedFeature(message, field="prompt_logprobs")
        also = fields.get(ALIAS, canonical.request.id)
        rival = self._run_of(canonical.request.id) or self._run_of(also)
        run = rival or Run(canonical, completion, _run_log(canonical, fields), self._parts)
        if rival is None:
            self._kept.begin(canonical.owner, len(canonical.body))
            self._parts.store.expect(run.id, run.log)
            self._start(run, also, lambda: self._body_over(run))
        await run.accepted(wait_s)
        if wait_s is None:
            run.wait_for_readers()
        if not run.taken:
            self.stats.begun += rival is None and run.log.opened.is_set()
            return replace(_found(run), new=rival is None)
        owner = canonical.owner
        found = await self._find(owner, also) or await self._find(owner, canonical.request.id)
        if found is None:
            raise Unavailable("the request was just taken by another router: ask again")
        return found

    async def adopt(self, record: RequestRecord, canonical: Canonical) -> bool:
        """Go on with a request just claimed. False: not here, and it is given up again."""
        store, request_id = self._parts.store, record.id
        log = _run_log(canonical, {})
        store.adopt(record, log)
        entries = await store.call(lambda store: store.read_log(request_id))
        try:
            if entries is None:
                raise Unavailable(AWAY)
            completion = await self.builders[canonical.api](canonical)
        except (BatonError, KeyError) as error:
            logger.warning("request %s cannot be adopted here: %r", request_id, error)
            store.forget(request_id)
            self.stats.not_adopted += 1
            await store.release([request_id])
            return False
        log.told.add(entries)
        run = Run(canonical, completion, log, self._parts)
        run.epoch = record.epoch
        self._start(run, record.fields.get(ALIAS, run.id))
        run.wait_for_readers()
        tokens = log.told.num_tokens
        self.stats.adopted += 1
        self.stats.adopted_tokens += tokens
        logger.info("request %s adopted: epoch %d, %d tokens", request_id, record.epoch, tokens)
        return True

    async def stop(self) -> None:
        """Give everything up, so that other routers go on with it. Twice is safe."""
        runs = list(self._runs.values())
        await self._parts.store.release([run.id for run in runs])
        await asyncio.gather(*(run.leave() for run in runs), *self._leaving)

    # ---- inside ----

    def _run_of(self, request_id: str) -> Run | None:
        """What runs here under that id or alias."""
        return self._runs.get(self._aliases.get(request_id, request_id))

    def _body_over(self, run: Run) -> None:
        """A request that was begun here has ended: the store keeps its body, or has none."""
        kept = run.log.kept and run.log.opened.is_set()
        self._kept.end(run.canonical.owner, len(run.canonical.body), kept=kept)

    def _start(self, run: Run, also: str, over: Callable[[], object] = lambda: None) -> None:
        def ended() -> None:
            over()
            self._aliases.pop(also, None)
            self._parts.store.forget(run.id)
            if self._runs.get(run.id) is run:
                del self._runs[run.id]

        async def settle() -> None:
            ender = self.enders.get(run.canonical.api)
            try:
                if ender is not None:
                    await ender(_found(run))
            except BatonError as error:
                logger.warning("request %s: its end is not kept: %s", run.id, error.message)

        self._runs[run.id] = run
        self._aliases[also] = run.id
        run.start(ended, settle)

    @asynccontextmanager
    async def _following(self, record: RequestRecord, canonical: Canonical) -> AsyncIterator[Told]:
        told = Told(canonical.request.params.num_outputs)
        follower = Follower(self._parts.store, record, told)
        task = asyncio.create_task(follower.run(), name=f"follow {record.id}")
        try:
            yield told
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    def _after_heartbeat(self, _: Sequence[Swept]) -> None:
        """Leave what was lost; without leases, show nothing more of anything."""
        held = self._parts.store.holds_leases
        for run in list(self._runs.values()):
            if run.log.lost:
                logger.warning("request %s is another router's now", run.id)
                self.stats.lost += 1
                task = asyncio.create_task(run.leave())
                self._leaving.add(task)
                task.add_done_callback(self._leaving.discard)
            elif not held and run.log.opened.is_set():
                run.told.cut()


def _found(run: Run) -> Found:
    return Found(run.canonical, run.canonical.body_digest, run.reading)


def _run_log(canonical: Canonical, fields: dict[str, str]) -> RunLog:
    return RunLog(Told(canonical.request.params.num_outputs), fields)
