"""NodeShell: what prefill and decode nodes share. It joins engine thread, KV connector and role.

Life: NodeShell(parts) -> start(address) -> sessions come and go -> drain() -> stop(). On the engine
thread, the role sees each StepReport at once. The report then goes to the event loop, where it
becomes ONE message per router session: this router's tokens and failures, the load if it changed,
the block events. Methods run on the event loop unless they say otherwise. gRPC is in service.py;
what a role does with a request is in prefill_node/ and decode_node/.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from dataclasses import replace
from functools import partial
from typing import Any

import baton
from baton.engine.core.assembly import assemble
from baton.engine.core.engine import Engine
from baton.engine.core.replay import precision_of
from baton.engine.state.stats import EngineStats, KVUsage
from baton.engine.thread import EngineThread, StepReport
from baton.node.control import NodeControl
from baton.node.hand_on import HandOn
from baton.node.metrics import NodeFigures, NodeMetrics, with_counters
from baton.node.progress import EngineProgress, ProgressAnswer
from baton.node.requests import NodeRequest, RequestTable, StepNews, failure
from baton.node.role import NodeParts, RoleContext
from baton.node.session import RouterSession
from baton.protocol.errors import (
    BatonError,
    DeadlineExceeded,
    Fenced,
    InternalError,
    InvalidRequest,
    NodeLost,
    Overloaded,
    Unavailable,
)
from baton.protocol.events import BlockEvent, NodeStep
from baton.protocol.handles import KVHandle, NodeLoad, NodeRecord
from baton.protocol.kv_spec import BlockLists
from baton.protocol.messages import (
    AbortRequest,
    ControlNode,
    DrainNode,
    Migrate,
    Prefilled,
    ReleaseExport,
    RenewExport,
    RouterMessage,
    SessionHello,
    StopSample,
    Submission,
    SubmitDecode,
    SubmitEncode,
    SubmitPool,
    SubmitPrefill,
)
from baton.runtime.log import request_context
from kv_transfer.row_fetches import RowFetches

log = logging.getLogger(__name__)


class NodeShell:
    """One node: its sessions, its requests, and the paths between them and the engine."""

    def __init__(self, parts: NodeParts) -> None:
        self.config = parts.config
        self.timing = parts.timing
        self.clock = parts.clock
        self.node_id = parts.node_id
        self.kind = parts.role
        self.boot_id = parts.boot_id
        self.requests = RequestTable()
        self.draining = False
        self._loop = asyncio.get_running_loop()
        self._address = ""
        self._sessions: set[RouterSession] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._kv_usage = KVUsage()
        self.progress = EngineProgress(parts.clock, parts.config.stall_s)
        self._quiet = asyncio.Event()  # set whenever a request or an export has ended
        self._stopped = False
        self._group = parts.group
        self.tracing = parts.tracing
        self.connector = parts.make_connector(self._on_released)
        self._model = parts.engine.config.model_name  # looks at the disk: not at each heartbeat
        self.metrics = NodeMetrics(self._model, parts.node_id, parts.role.value, self.scrape)
        self.rows = RowFetches(parts.make_row_connector)
        self.role = parts.make_role(
            RoleContext(
                connector=self.connector,
                loop=self._loop,
                config=parts.config,
                timing=parts.timing,
                clock=parts.clock,
                spawn=self._spawn,
                observe_fetch=self.metrics.observe_fetch,
                rows=self.rows,
                traced=self.tracing is not None,
            ),
            lambda hooks: EngineThread(assemble(parts.engine, hooks, parts.clock), self._on_step),
        )
        self.thread = self.role.thread
        self.engine = self.thread.engine
        self._engine_load = self.engine.current_load()
        self._engine_stats = self.engine.stats.copy()
        self.control = NodeControl(self, self.engine)
        self._leaving = HandOn(self.thread, self.connector, self.role, self._spawn)

    @property
    def sessions(self) -> frozenset[RouterSession]:
        return frozenset(self._sessions)

    # ---- life ----

    async def start(self, address: str) -> None:
        """Start connector and engine. `address`: where routers reach this node (HOST:PORT)."""
        self._address = address
        await self.connector.start()
        self.thread.start()

    def begin_drain(self) -> None:
        """Take no new requests from now on, and report that to the routers. May be called twice."""
        if not self.draining:
            self.draining = True
            self.connector.drain()
            log.info("draining: %d requests are running", len(self.requests))
            self.send_load()

    async def drain(self) -> None:
        """Take no new requests; wait until the node is empty, then until routers have read
        everything.

        A node is empty when its requests have ended or moved and its exports were fetched. It waits
        for that at most `drain_s`.
        """
        self.begin_drain()
        try:
            async with asyncio.timeout(self.config.drain_s):
                await self.until_quiet()
        except TimeoutError:
            log.warning(
                "drain ended with %d requests and %d exports",
                len(self.requests),
                self.connector.active_exports,
            )
            return
        await self._part()

    async def until_quiet(self) -> None:
        """Wait until there is no request here, and no export that somebody may fetch."""
        while self._tasks or self.connector.active_exports:
            self._quiet.clear()
            await self._quiet.wait()

    async def _part(self) -> None:
        """Tell routers that nothing follows, and wait until they end their sessions. If this side
        ended them, its last messages might be lost."""
        sessions = list(self._sessions)
        for session in sessions:
            session.send(NodeStep(last=True))
        try:
            async with asyncio.timeout(self.timing.connect_s):
                await asyncio.gather(*(session.wait_cut() for session in sessions))
        except TimeoutError:
            log.warning("a router did not read this node's last words")

    async def stop(self) -> None:
        """Cut all sessions, abort all requests, stop connector and engine. May be called twice."""
        if self._stopped:
            return
        self._stopped = True
        self.draining = True
        for session in list(self._sessions):
            session.cut(Unavailable("the node is stopping"))
            self.detach(session)
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=self.timing.connect_s)
        await self.control.stop()
        await self.rows.stop()
        await self.connector.stop()
        await asyncio.to_thread(self.thread.stop)

    # ---- what others ask of a node ----

    def record(self) -> NodeRecord:
        """Return this node's record as of now."""
        info, config = self.engine.info, self.engine.config
        adapters = self.control.adapters
        return NodeRecord(
            node_id=self.node_id,
            boot_id=self.boot_id,
            role=self.kind,
            address=self._address,
            model=self._model,
            model_digest=info.digest,
            block_size=self.engine.pool.block_size,
            max_model_len=info.max_model_len,
            vocab_size=info.vocab_size,
            endpoint=self.connector.endpoint(),
            load=self.load(),
            version=baton.__version__,
            adapters=adapters.held,
            leaving_adapters=adapters.leaving,
            eos_token_ids=info.eos_token_ids,
            max_num_seqs=config.max_num_seqs,
            precision=precision_of(info, config),
            deterministic=config.deterministic,
            group=self._group[0],
            rank=self._group[1],
            encodes=info.encodes,
            needs_rows=info.sees and not config.vision_tower,
        )

    def load(self) -> NodeLoad:
        """Return the engine's load at its last step, with the values that only the node knows."""
        return replace(
            with_counters(self._engine_load, self._engine_stats, self.connector),
            fetching=self.role.fetching,
            draining=self.draining,
            stalled=self.progress.stalled,
            pause=self.control.pause,
            asleep=self.control.asleep,
            kv_token_bytes=self.engine.info.kv_token_bytes,
        )

    def send_load(self, *, beat: bool = False) -> None:
        """Send the load with all counters. With `beat` it goes to all routers, which think that a
        silent node hangs; else to those that were sent another load last."""
        load, now = self.load(), self.clock.monotonic()
        for session in self._sessions:
            if beat or load != session.last_load:
                session.send(NodeStep(load=load, flows=self.connector.stats.flows(now)))

    def ask_engine(self) -> None:
        """Ask the engine for load and counters; during a long step, send the last known ones."""
        if self.progress.ask(self.engine.stats.num_layers):
            self.thread.post(self._answer)
        else:
            self.send_load(beat=True)

    def scrape(self) -> NodeFigures:
        """Return everything that /metrics shows, as of the last step or beat. Any thread."""
        stats, exports = self.connector.stats, self.connector.active_exports
        cache = (self.engine.pool.block_size, self.engine.info.kv_dtype)
        return NodeFigures(self.load(), self._engine_stats, stats, exports, self._kv_usage, *cache)

    # ---- sessions ----

    def attach(self, session: RouterSession) -> None:
        """Begin to send everything to a router that has said hello and got the record."""
        if self._stopped:
            session.cut(Unavailable("the node is stopping"))
            return
        self._sessions.add(session)
        self.control.attached(session)
        self.thread.post(lambda engine: self._snapshot(engine, session))
        log.info("router %s connected", session.router_id)

    def detach(self, session: RouterSession) -> None:
        """End a session: abort its requests. Finished exports keep their lease."""
        if session not in self._sessions:
            return
        self._sessions.discard(session)
        session.cut(NodeLost("the session is over"))
        entries = self.requests.of(session)
        for entry in entries:
            entry.cancel()
        log.info("router %s is gone, %d requests aborted", session.router_id, len(entries))

    def receive(self, session: RouterSession, message: RouterMessage) -> None:
        """Act on one message of a router. Raises InvalidRequest if it breaks the protocol."""
        match message:
            case SubmitPrefill() | SubmitDecode() | SubmitPool() | SubmitEncode():
                self._submit(session, message)
            case RenewExport():
                self._spawn(self._leaving.renew(message.handle))
            case ReleaseExport():
                self._spawn(self._leaving.release(message.handle, message.why))
            case DrainNode():
                self.begin_drain()
            case ControlNode():
                self.control.act(session, message)
            case AbortRequest() | Prefilled() | Migrate() | StopSample():
                self._change(message)
            case SessionHello():
                raise InvalidRequest("a second hello on one session", field="hello")

    def _change(self, message: AbortRequest | Prefilled | Migrate | StopSample) -> None:
        """Act on a message about one request; do nothing if the request is not here."""
        request_id, epoch = message.request_id, message.epoch
        if isinstance(message, AbortRequest):
            self._leaving.forget(message)
        if (entry := self.requests.find_upto(request_id, epoch)) is None:
            return
        exact = entry.request.epoch == epoch
        match message:
            case AbortRequest():
                entry.cancel()
            case StopSample():
                entry.stop(message.sample)
                self.thread.post(lambda e: e.stop_sample(request_id, epoch, message.sample))
            case Prefilled() if exact:
                entry.prefilled.set()
            case Migrate() if exact and not entry.leaving:
                entry.leaving = True
                self._spawn(self._leaving.leave(entry))
            case _:
                pass  # the request is of a newer epoch, or is leaving already

    def _submit(self, session: RouterSession, message: Submission) -> None:
        request = message.request
        handle = message.handle if isinstance(message, SubmitDecode) else None
        try:
            if self.draining:
                raise Unavailable("the node is draining")
            if self.control.asleep:
                raise Unavailable("the node is asleep")
            if len(self.requests) >= self.config.max_requests:
                raise Overloaded(f"the node has {self.config.max_requests} requests")
            self.role.check(message)
            entry = NodeRequest(request, handle, session)
            entry.pool = message if isinstance(message, SubmitPool) else None
            if isinstance(message, SubmitPrefill | SubmitDecode):
                entry.encoded = message.encoded
            if self.tracing is not None:
                entry.spans = self.tracing.begin(request, handle is not None)
            if not (isinstance(message, SubmitDecode) and message.prefilling):
                entry.prefilled.set()
            older = self.requests.add(entry)
        except BatonError as error:
            session.send(NodeStep(failed=(failure(request, error),)))
            return
        if older is not None:
            error = Fenced(f"epoch {request.epoch} of request {request.id} took over")
            older.send(NodeStep(failed=(failure(older.request, error),)))
            older.cancel()
        entry.task = self._loop.create_task(self._serve(entry, older))
        # Not in _serve: a task that is cancelled before it began runs none of its own code.
        entry.task.add_done_callback(lambda _: self._over(entry))
        self._keep(entry.task)

    def _over(self, entry: NodeRequest) -> None:
        self.requests.remove(entry)
        if entry.spans is not None:
            entry.spans.end(entry.cancelled)

    async def _serve(self, entry: NodeRequest, older: NodeRequest | None) -> None:
        """Serve one request from submission to last event, and report its end exactly once."""
        limit = asyncio.timeout(self._seconds_left(entry.request.deadline))
        with request_context(entry.request.id):
            try:
                async with limit:
                    if older is not None and older.task is not None:
                        await asyncio.wait([older.task])
                    await self.role.serve(entry)
            except BatonError as error:
                log.info("failed: %s: %s", error.code, error.message)
                self._fail(entry, error)
            except Exception as error:
                if isinstance(error, TimeoutError) and limit.expired():
                    self._fail(entry, DeadlineExceeded("the request's deadline is over"))
                    return
                log.exception("failed")
                self._fail(entry, InternalError("internal error"))

    def _fail(self, entry: NodeRequest, error: BatonError) -> None:
        if entry.spans is not None:
            entry.spans.error = error.code
        reported = entry.ended.done() and entry.ended.exception() is None
        if not reported:
            entry.send(NodeStep(failed=(failure(entry.request, error),)))

    def _seconds_left(self, deadline: float | None) -> float | None:
        return None if deadline is None else max(0.0, deadline - self.clock.monotonic())

    # ---- tasks ----

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        self._keep(self._loop.create_task(work))

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._quiet.set()
        if not task.cancelled() and task.exception() is not None:
            log.error("a task of the node failed", exc_info=task.exception())

    # ---- from the engine thread ----

    def _on_step(self, report: StepReport) -> None:
        self.role.on_step(report)
        stats = self.engine.stats.copy()
        self._loop.call_soon_threadsafe(self._deliver, report, stats)

    def _answer(self, engine: Engine) -> None:
        state = (
            ProgressAnswer.of(engine, held=self.thread.held),
            engine.current_load(),
            engine.stats.copy(),
        )
        self._loop.call_soon_threadsafe(self._answered, *state, engine.kv_usage())

    def report_blocks(self, engine: Engine) -> None:
        """Send changes of the prefix map now, between steps. Engine thread."""
        events = tuple(engine.take_block_events())
        self._loop.call_soon_threadsafe(self._send, StepNews(events))

    def _snapshot(self, engine: Engine, session: RouterSession) -> None:
        # Both are taken together and delivered in the order of the steps, so no event is sent twice
        # or missed.
        pending = engine.take_block_events()
        everything = engine.all_block_events()
        self._loop.call_soon_threadsafe(self._synchronise, session, pending, everything)

    def _on_released(self, handle: KVHandle, blocks: BlockLists, why: str) -> None:
        """Unpin the blocks of an export that nobody reads any more. Any thread."""
        log.debug("request %s: export released: %s", handle.request_id, why)
        if self.tracing is not None:
            self.tracing.released(handle, why)
        self.thread.post(lambda engine: self._unpin(engine, blocks, handle))

    def _unpin(self, engine: Engine, blocks: BlockLists, handle: KVHandle) -> None:
        engine.unpin(blocks)
        self._loop.call_soon_threadsafe(self._freed, handle)

    # ---- back on the event loop ----

    def _answered(
        self, answer: ProgressAnswer, load: NodeLoad, stats: EngineStats, usage: KVUsage
    ) -> None:
        self.progress.answered(answer, self.connector.active_exports + self.role.fetching > 0)
        self._engine_load, self._engine_stats, self._kv_usage = load, stats, usage
        self.send_load(beat=True)

    def _freed(self, handle: KVHandle) -> None:
        self._leaving.freed(handle)
        self._quiet.set()
        self.role.blocks_freed()

    def _synchronise(
        self, session: RouterSession, pending: list[BlockEvent], everything: list[BlockEvent]
    ) -> None:
        self._send(StepNews(tuple(pending)))
        session.synced = True
        session.send(NodeStep(load=self.load(), block_events=tuple(everything)))

    def _deliver(self, report: StepReport, stats: EngineStats) -> None:
        """Send one step's results: a message to each session that they concern."""
        self._engine_load, self._engine_stats = report.load, stats
        news = StepNews(tuple(report.block_events))
        news.add_timings(report.begun, self.requests, self.clock.monotonic())
        for event in report.events:
            entry = self.requests.find(event.request_id, event.epoch)
            if entry is None:  # aborted while the step ran
                self.role.written((event,))
                continue
            news.tokens[entry.session].append(event)
            if entry.spans is not None:
                entry.spans.saw(event)
            if self.role.ends(entry, event):
                entry.end()
        for failed in report.failed:
            entry = self.requests.find(failed.request_id, failed.epoch)
            if entry is not None:
                news.failures[entry.session].append(failed)
                if entry.spans is not None:
                    entry.spans.error = failed.code
                entry.end()
        self._send(news)
        self.role.blocks_freed()

    def _send(self, news: StepNews) -> None:
        load = self.load()
        for session in self._sessions | news.sessions:
            step = news.message(session, load)
            if step is not None:
                session.send(step, partial(self.role.written, step.tokens) if step.tokens else None)
