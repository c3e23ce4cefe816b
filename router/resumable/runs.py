"""Runs: the resumable requests under way on this router, and how any request is found again.

    begin    takes on a new request: claims it with its canonical form, runs it in its own task
    adopt    goes on with a request whose router is gone (resumable/adoption.py), from its log
    find     finds a request by owner and name: one that runs here, or any other by its record

A request runs on while readers come and go. When nobody has read it for its grace, it is cancelled.
A Run shows no tokens itself: it drives the dispatcher, finds stop strings in the text, and ends its
readers (router/resumable/replay.py). All on one event loop.
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
    """What a run needs of the dispatcher (router/request/dispatcher.py)."""

    def run(
        self, request: Request, trace: RequestTrace, *, admitted: bool = False
    ) -> AsyncGenerator[TokenEvent, None]: ...
    def stop_sample(self, request_id: str, sample: int) -> None: ...


@dataclass(frozen=True, slots=True)
class RunParts:
    """What all runs of a router share; parts of RouterServices."""

    dispatcher: RunDispatch
    store: StoreGuard
    metrics: RouterMetrics
    clock: Clock
    stats: RunStats = field(default_factory=RunStats)
    max_kept_mb: int = MAX_KEPT_MB  # most MiB of bodies that the store keeps for each key


class Source:
    """A completion's RunDispatch: yields the logged tokens of an adopted request, then new ones.

    `dispatched`: the dispatcher has got the request, so the dispatcher records its end.
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
    """One resumable request that runs on this router.

    `epoch`: its epoch at the adoption, None if it began here. `failure`: the error with which it
    ended, if any. The life: start() -> readers come and go -> it ends, or abandon() or leave() ends
    it.
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
        completion.trace.log_appends = log.appends
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
        """Whether the run failed to begin because its id is in use, perhaps on another router."""
        failure = self.failure
        return isinstance(failure, InvalidRequest) and failure.field == "request_id"

    def start(self, over: Callable[[], object], settle: Callable[[], Awaitable[None]]) -> None:
        """Run the request in its own task.

        `settle` is awaited once readers have its end; `over` is called when the task is done. Its
        grace begins with `wait_for_readers`.
        """
        self._task = asyncio.create_task(self._live(settle), name=f"run {self.id}")
        self._task.add_done_callback(lambda _: self._over(over))

    def wait_for_readers(self) -> None:
        """Begin the grace: if nobody reads the request within it, the request is cancelled."""
        self._watch()

    async def accepted(self, wait_s: float | None = None) -> None:
        """Wait until the request is recorded or has failed before that, for `wait_s` at most."""
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
        """A context in which somebody reads the request."""
        self._readers += 1
        try:
            yield self.told
        finally:
            self._readers -= 1
            self._watch()

    def abandon(self) -> None:
        """Cancel the request: nobody wants it any more."""
        if self._task is not None:
            self._task.cancel()

    async def leave(self) -> None:
        """Stop running the request here without recording an end: another router goes on."""
        self._left = self._completion.trace.left = True
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
            # The log had all tokens of the adopted request: only its end was not recorded.
            await ledger.move(RequestState.DECODE)
            tokens = str(completion.completion_tokens)
            await ledger.finish(RequestState.FINISHED, output_tokens=tokens)

    async def _end(self) -> None:
        """End the readers: with the request's end once that is final, else with StreamCut."""
        log = self.log
        if self._left or log.lost:
            self.told.cut()
        elif not log.opened.is_set():
            self.told.close(self.failure)  # the request was refused before it was recorded
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
        """Set the timer of the grace anew, if nobody reads and the request still runs."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._readers == 0 and self._task is not None and not self._task.done():
            wait_s = self.canonical.grace_s if grace_s is None else grace_s
            self._timer = asyncio.get_running_loop().call_later(wait_s, self._look)

    def _look(self) -> None:
        self._looking = asyncio.create_task(self._abandon_unread(), name=f"grace {self.id}")

    async def _abandon_unread(self) -> None:
        """Cancel the request after its grace, unless somebody reads it through another router."""
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
    """A resumable request, wherever it runs.

    `reading()`: a context that gives its tokens to a reader. `new`: this very call began it.
    """

    canonical: Canonical
    body_digest: str
    reading: Callable[[], AbstractAsyncContextManager[Told]]
    new: bool = False


class Runs:
    """All runs of one router. The life: made -> used -> stop()."""

    def __init__(self, parts: RunParts) -> None:
        self._parts = parts
        self._runs: dict[str, Run] = {}
        self._aliases: dict[str, str] = {}  # alias -> id, of the runs
        self._leaving: set[asyncio.Task[None]] = set()
        self._kept = KeptBodies(parts.clock, parts.max_kept_mb << 20)
        self.readers = RouterMetrics()  # for replays: a request counts only once, by its run
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
        """A context that gives a reader the tokens of a request, and counts the reader.

        `resumed`: the reader goes on after an event that it has seen.
        """
        start = Reading.FIRST if found.new else Reading.REPLAY
        self.stats.readings[Reading.RESUMED if resumed else start] += 1
        self.stats.readers += 1
        try:
            async with found.reading() as told:
                yield told
        finally:
            self.stats.readers -= 1

    def waits(self, request_id: str) -> bool:
        """Whether this router has the request but has not recorded it: it waits for room."""
        run = self._runs.get(request_id)
        return run is not None and not run.log.opened.is_set()

    def check_open(self) -> None:
        """Raise Unavailable while the store is away: then no resumable request can begin."""
        if self._parts.store.stats.away:
            raise Unavailable(AWAY)

    async def find(self, owner: str, name: str) -> Found | None:
        """Return the request of this owner and name; None if there is none. Raises Unavailable."""
        return await self._find(owner, record_id(owner, name))

    async def _find(self, owner: str, request_id: str) -> Found | None:
        store = self._parts.store
        run = self._run_of(request_id)
        if run is not None:
            await run.accepted()
            if run.log.opened.is_set() and not store.holds_leases:
                raise Unavailable(AWAY)  # another router may have the request by now
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
        """Begin a new request; or find it, if the same one has just been begun here or elsewhere.

        Returns when the request is recorded or refused; readers get the refusal. With `wait_s`,
        returns after this time at the latest, and the grace begins only after a first reader.
        Raises UnsupportedFeature for prompt log-probabilities, Overloaded if the key has too many
        bodies in the store, and Unavailable.
        """
        if canonical.request.params.prompt_logprobs is not None:
            message = "log-probabilities of the prompt are not kept for resumable requests"
            raise UnsupportedFeature(message, field="prompt_logprobs")
        also = fields.get(ALIAS, canonical.request.id)
        rival = self._run_of(canonical.request.id) or self._run_of(also)
        run = rival or Run(canonical, completion, self._run_log(canonical, fields), self._parts)
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
        """Go on with a request that was just claimed.

        Releases the claim and returns False if this router cannot continue the request.
        """
        store, request_id = self._parts.store, record.id
        log = self._run_log(canonical, {})
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
        completion.trace.adopted_at = self.clock.monotonic()
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
        """Give all requests up, so that other routers go on with them. May be called twice."""
        runs = list(self._runs.values())
        await self._parts.store.release([run.id for run in runs])
        await asyncio.gather(*(run.leave() for run in runs), *self._leaving)

    # ---- inside ----

    def _run_log(self, canonical: Canonical, fields: dict[str, str]) -> RunLog:
        return RunLog(Told(canonical.request.params.num_outputs), self.clock, fields)

    def _run_of(self, request_id: str) -> Run | None:
        """Return the run with this id or alias; None if there is none here."""
        return self._runs.get(self._aliases.get(request_id, request_id))

    def _body_over(self, run: Run) -> None:
        """Note for KeptBodies that a request which began here has ended."""
        kept = run.log.kept and run.log.opened.is_set()
        self._kept.end(run.canonical.owner, len(run.canonical.body), kept=kept)

    def _start(self, run: Run, also: str, over: Callable[[], object] = lambda: None) -> None:
        def ended() -> None:
            over()
            self.stats.lost += run.log.lost  # also if it ended before anybody made it leave
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
        """Leave the requests that were lost. Cut all readers if the leases have run out."""
        held = self._parts.store.holds_leases
        for run in list(self._runs.values()):
            if run.log.lost:
                logger.warning("request %s is another router's now", run.id)
                task = asyncio.create_task(run.leave())
                self._leaving.add(task)
                task.add_done_callback(self._leaving.discard)
            elif not held and run.log.opened.is_set():
                run.told.cut()


def _found(run: Run) -> Found:
    return Found(run.canonical, run.canonical.body_digest, run.reading)
