"""Routers without nodes that keep a real log: scripted tokens, real ledgers, one shared store."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
import msgspec

from baton.protocol.clock import Clock, SystemClock
from baton.protocol.errors import Cancelled, StoreUnavailable
from baton.protocol.events import TokenEvent
from baton.protocol.request import Request, RequestState
from baton.runtime.timing import Timing
from router.api.grpc.inference import GrpcServer
from router.config import RouterConfig
from router.metrics.router import RouterMetrics
from router.models import Models, ServedModel
from router.request.aborts import Aborts
from router.request.gate.gate import Gate
from router.request.trace import RequestTrace
from router.resumable.adoption import Adopter
from router.resumable.runs import RunParts, Runs
from router.server.app import create_app
from router.server.http_guard import HttpLimits
from router.services import RouterServices
from router.store.base import (
    NO_FIELDS,
    SWEEP_LIMIT,
    Claimed,
    LogEntry,
    Move,
    OnAppended,
    RequestRecord,
    RequestStore,
    Swept,
    WriteStatus,
)
from router.store.documents import Documents
from router.store.guard import StoreGuard
from router.store.memory_store import MemoryStore, MemoryTables
from router.store.redis_links import RedisServers
from router.store.redis_store import RedisStore
from tests.front.fakes import (
    CHAT_TEMPLATE,
    TOKENIZER,
    FakeDispatcher,
    FakeRegistry,
    listening,
)
from tests.waiting import end

PATIENCE_S = 30.0
# Longer than this process ever stands still: a lease ends when a test says so (HeldRouter.lapse).
TIMING = Timing(heartbeat_s=0.02, router_lease_s=600.0)


@dataclass
class AheadClock:
    """SystemClock, so many seconds ahead."""

    ahead_s: float = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead_s


StoreOf = Callable[[str, Timing, Clock], RequestStore]


class CutStore:
    """One router's way to a store that others use too; it can be cut."""

    def __init__(self, inner: RequestStore) -> None:
        self._inner = inner
        self.away = False
        self._beating = asyncio.Lock()
        self._claimed: set[str] = set()

    @property
    def name(self) -> str:
        return self._inner.name

    @property
    def documents(self) -> Documents:
        return self._reached().documents

    def _reached(self) -> RequestStore:
        if self.away:
            raise StoreUnavailable("cut off")
        return self._inner

    async def start(self) -> None:
        await self._reached().start()

    async def stop(self) -> None:
        await self._inner.stop()

    async def lapse(self) -> None:
        """End the leases of this router's requests; no heartbeat is on its way any more."""
        async with self._beating:
            await self._inner.release(self._claimed)

    async def claim(
        self, request_id: str, fields: Mapping[str, str] = NO_FIELDS
    ) -> RequestRecord | None:
        self._claimed.add(request_id)
        return await self._reached().claim(request_id, fields)

    def post_claim(self, request_id: str, fields: Mapping[str, str], on_answer: Claimed) -> None:
        self._claimed.add(request_id)
        if self.away:
            on_answer(StoreUnavailable("cut off"))
        else:
            self._inner.post_claim(request_id, fields, on_answer)

    async def move(self, move: Move) -> WriteStatus:
        return await self._reached().move(move)

    def post(self, move: Move, on_answer: Callable[[WriteStatus | StoreUnavailable], None]) -> None:
        if self.away:
            on_answer(StoreUnavailable("cut off"))
        else:
            self._inner.post(move, on_answer)

    async def finish(self, move: Move) -> WriteStatus:
        return await self._reached().finish(move)

    async def append(self, entries: Sequence[LogEntry], *, safe: bool = False) -> list[WriteStatus]:
        return await self._reached().append(entries, safe=safe)

    def post_append(self, entries: Sequence[LogEntry], on_answer: OnAppended) -> None:
        if self.away:
            on_answer(entries, StoreUnavailable("cut off"))
        else:
            self._inner.post_append(entries, on_answer)

    async def beat(self, held: Collection[str]) -> list[str]:
        async with self._beating:
            return await self._reached().beat(held)

    async def sweep(self, limit: int = SWEEP_LIMIT) -> list[Swept]:
        return await self._reached().sweep(limit)

    async def read(self, request_id: str) -> RequestRecord | None:
        return await self._reached().read(request_id)

    async def read_log(self, request_id: str) -> list[LogEntry]:
        return await self._reached().read_log(request_id)

    async def tail(
        self, request_id: str, cursor: str, timeout_s: float
    ) -> tuple[list[LogEntry], str]:
        return await self._reached().tail(request_id, cursor, timeout_s)

    async def follow(self, request_id: str) -> None:
        await self._reached().follow(request_id)

    async def release(self, request_ids: Collection[str]) -> None:
        await self._reached().release(request_ids)

    async def counts(self) -> dict[RequestState, int]:
        return await self._reached().counts()


class DyingStore(CutStore):
    """Its router dies when it is about to record the end of a request."""

    async def finish(self, move: Move) -> WriteStatus:
        self.away = True
        return await super().finish(move)


class RestartingStore(CutStore):
    """It is away when the first end is to be recorded. `ends`: what it answered to later ones."""

    def __init__(self, inner: RequestStore) -> None:
        super().__init__(inner)
        self.ends: list[WriteStatus] = []
        self._restarted = False

    async def finish(self, move: Move) -> WriteStatus:
        self.away |= not self._restarted
        self._restarted = True
        status = await super().finish(move)
        self.ends.append(status)
        return status


def store_of(
    place: MemoryTables | str | StoreOf, owner: str, timing: Timing, clock: Clock | None = None
) -> RequestStore:
    """The store of one router: in shared tables, in the Redis of that URL, or one's own."""
    clock = clock or SystemClock()
    if callable(place):
        return place(owner, timing, clock)
    if isinstance(place, str):
        return RedisStore(RedisServers.of(place, PATIENCE_S), owner, timing, clock, PATIENCE_S)
    return MemoryStore(owner, timing, clock, place)


@dataclass
class LoggedDispatcher:
    """FakeDispatcher's tokens on a request's real way: recorded, logged, then shown.

    `gates`: a token is computed once its gate is open; without one, at once. `steps`: every token
    computed here. A resumed request goes on at its next position.
    """

    guard: StoreGuard
    script: FakeDispatcher = field(default_factory=FakeDispatcher)
    held_at: int | None = None
    go: asyncio.Event = field(default_factory=asyncio.Event)
    holding: asyncio.Event = field(default_factory=asyncio.Event)
    steps: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    epochs: list[int] = field(default_factory=list[int])
    stopped: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])
    running: dict[str, tuple[Request, RequestTrace]] = field(
        default_factory=dict[str, tuple[Request, RequestTrace]]
    )
    aborted: bool = False
    traces: list[RequestTrace] = field(default_factory=list[RequestTrace])

    @property
    def gate(self) -> Gate:
        return self.script.gate

    async def run(
        self, request: Request, trace: RequestTrace, *, admitted: bool = False
    ) -> AsyncGenerator[TokenEvent, None]:
        ledger = await self.guard.open(request, {})
        assert ledger.epoch == request.epoch, "an adopted request has its record's epoch"
        self.epochs.append(ledger.epoch)
        self.traces.append(trace)
        self.running[request.id] = request, trace
        outcome = RequestState.CANCELLED
        try:
            await ledger.move(RequestState.DECODE)
            async with contextlib.aclosing(self.script.run(request, trace)) as events:
                async for event in events:
                    if not self._is_new(request, event):
                        continue
                    if self.held_at is not None and event.position >= self.held_at:
                        self.holding.set()
                        await self.go.wait()
                    if self.aborted:
                        raise Cancelled("the request was cancelled")
                    told = msgspec.structs.replace(event, epoch=ledger.epoch)
                    self.steps.append((event.sample, event.position))
                    await self.guard.append([told])
                    yield told
            outcome = RequestState.FINISHED
        except GeneratorExit:
            outcome = RequestState.FINISHED if trace.text_stop else RequestState.CANCELLED
            raise
        except (asyncio.CancelledError, Cancelled):
            raise
        except Exception:
            outcome = RequestState.FAILED
            raise
        finally:
            del self.running[request.id]
            if outcome is RequestState.FAILED:
                await ledger.finish(outcome, error="node_lost", message="scripted")
            else:
                await ledger.finish(outcome)

    @staticmethod
    def _is_new(request: Request, event: TokenEvent) -> bool:
        if event.sample in request.ended:
            return False
        known = request.output_ids[event.sample] if event.sample < len(request.output_ids) else ()
        return event.position >= len(known)

    def live(self) -> list[tuple[Request, RequestTrace]]:
        return list(self.running.values())

    def waiting(self) -> list[tuple[Request, RequestTrace]]:
        return []

    def abort(self, request_id: str, by_operator: bool = False) -> bool:
        """End a request that is held, as Dispatcher would."""
        found = request_id in self.running
        if found:
            self.aborted = True
            self.go.set()
        return found

    def stop_sample(self, request_id: str, sample: int) -> None:
        self.stopped.append((request_id, sample))
        self.script.stop_sample(request_id, sample)


@dataclass
class HeldRouter:
    """One router with its HTTP client; `beats` is its heartbeat task."""

    store: CutStore
    guard: StoreGuard
    dispatcher: LoggedDispatcher
    runs: Runs
    adopter: Adopter
    http: httpx.AsyncClient
    grpc: GrpcServer
    grpc_address: str
    beats: asyncio.Task[None]

    async def lapse(self) -> None:
        """Cut it off from the store for as long as its leases last: another may sweep them."""
        self.store.away = True
        await self.store.lapse()
        self.guard.lease_until = 0.0

    async def die(self) -> None:
        """As kill -9 looks from outside, and some time later: no beat, no append, no end, no call
        any more, and no lease."""
        self.store.away = True
        await end(self.beats)
        await self.lapse()
        await self.grpc.stop(0)


class Reader:
    """One streamed answer, read in the background. `events`: (id, name, data) as they came.

    `cut`: the connection broke before the body's end.
    """

    def __init__(self, http: httpx.AsyncClient, method: str, url: str, **more: Any) -> None:
        self.events: list[tuple[str, str, str]] = []
        self.status = 0
        self.headers = httpx.Headers()
        self.body = b""
        self.cut = False
        self._news = asyncio.Event()
        self.task = asyncio.create_task(self._read(http, method, url, more))

    async def _read(self, http: httpx.AsyncClient, method: str, url: str, more: Any) -> None:
        try:
            async with http.stream(method, url, **more) as reply:
                self.status, self.headers = reply.status_code, reply.headers
                pending = b""
                async for piece in reply.aiter_raw():
                    self.body += piece
                    *whole, pending = (pending + piece).split(b"\n\n")
                    self.events += map(_event, whole)
                    self._tell()
        except (httpx.RemoteProtocolError, httpx.ReadError):
            self.cut = True
        finally:
            self._tell()

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    async def at_least(self, count: int) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while len(self.events) < count:
                assert not self.task.done(), "the stream ended early"
                await self._news.wait()

    async def done(self) -> list[tuple[str, str, str]]:
        async with asyncio.timeout(PATIENCE_S):
            await self.task
        return self.events

    async def leave(self) -> None:
        """The client goes away."""
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


def _event(raw: bytes) -> tuple[str, str, str]:
    lines = [line.partition(": ") for line in raw.decode().split("\n")]
    fields = {name: value for name, _, value in lines}
    return fields.get("id", ""), fields.get("event", ""), fields["data"]


@contextlib.asynccontextmanager
async def held_router(
    name: str,
    place: MemoryTables | str | StoreOf,
    kind: type[CutStore] = CutStore,
    timing: Timing = TIMING,
    others: Mapping[str, Any] | None = None,
    **config: Any,
) -> AsyncIterator[HeldRouter]:
    """A router called `name` over the store at `place`, on free ports of its own. `others`: parts
    of its services that are not the usual ones."""
    clock, store_clock = SystemClock(), AheadClock()
    store = kind(store_of(place, name, timing, store_clock))
    guard = StoreGuard(store, timing)
    dispatcher = LoggedDispatcher(guard, FakeDispatcher(answer="abcdefghijk"))
    metrics = RouterMetrics()
    options = replace(RouterConfig(request_timeout_s=20.0, grpc_port=0), **config)
    kept_mb = options.max_resumable_mb
    runs = Runs(RunParts(dispatcher, guard, metrics, clock, max_kept_mb=kept_mb))
    parts: dict[str, Any] = {
        "config": options,
        "dispatcher": dispatcher,
        "registry": FakeRegistry(),
        "store": guard,
        "models": Models(ServedModel(options, TOKENIZER, CHAT_TEMPLATE)),
        "metrics": metrics,
        "aborts": Aborts(dispatcher),
        "clock": clock,
        "runs": runs,
    }
    services = RouterServices(**(parts | dict(others or {})))
    await guard.start()
    store_clock.ahead_s = 2 * timing.router_lease_s  # it has been connected long enough to sweep
    adopter = Adopter(runs, guard, lambda: services.ready)
    grpc = GrpcServer(services)
    address = f"127.0.0.1:{grpc.bind()}"
    await grpc.start()
    beats = asyncio.create_task(guard.run())
    async with listening(create_app(services), HttpLimits()) as port:
        url = f"http://127.0.0.1:{port}"
        async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=PATIENCE_S) as http:
            yield HeldRouter(store, guard, dispatcher, runs, adopter, http, grpc, address, beats)
        async with asyncio.timeout(PATIENCE_S):
            await end(beats)
            await grpc.stop(0)
            await adopter.stop()
            await runs.stop()
            await guard.stop()
