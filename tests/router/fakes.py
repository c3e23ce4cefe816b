"""Fakes for the router's tests: a clock, nodes scripted by the test, a router around them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import grpc
import grpc.aio

from baton.node.service import router_messages
from baton.protocol import messages, wire
from baton.protocol.clock import SystemClock
from baton.protocol.errors import StoreUnavailable
from baton.protocol.events import HandleReady, NodeStep, RequestFailed, Subscribed, TokenEvent
from baton.protocol.handles import Endpoint, KVHandle, LaneAddress, NodeLoad, NodeRecord, Role
from baton.protocol.kv_spec import PoolFormat
from baton.protocol.request import FinishReason, Request
from baton.protocol.sampling import SamplingParams
from baton.runtime.rotation.deployment_secret import fixed
from baton.runtime.timing import Timing, server_options
from protos import node_pb2_grpc
from router.events import EventRing
from router.nodes.attachments import StepLog
from router.nodes.directory import ModelOf, NodeDirectory, only_model
from router.nodes.policy import PolicySettings
from router.nodes.registry import NodeRegistry, RegistryParts
from router.request.dispatch_parts import DispatchParts
from router.request.dispatcher import Dispatcher
from router.request.timeline import TimelineRing
from router.store.base import RequestStore
from router.store.guard import StoreGuard
from router.store.memory_store import MemoryStore
from tests.timelines import assert_whole

M = TypeVar("M")
MOST_TIMELINES = 10_000
PATIENCE_S = 30.0  # bounds every wait of a test
FAST = Timing(
    heartbeat_s=0.1, connect_s=2.0, kv_lease_s=10.0, ping_interval_s=30.0, ping_timeout_s=30.0
)


class FakeClock:
    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def monotonic(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


def make_record(node_id: str, role: Role, **changes: Any) -> NodeRecord:
    endpoint = Endpoint(
        boot_id=f"boot-{node_id}",
        layout_fingerprint="layout",
        format=PoolFormat(block_size=4, dtype="float32"),
        lanes=(LaneAddress("grpc", "127.0.0.1:1"),),
    )
    record = NodeRecord(
        node_id=node_id,
        boot_id=endpoint.boot_id,
        role=role,
        address="127.0.0.1:1",
        model="tiny",
        model_digest="digest",
        block_size=4,
        max_model_len=256,
        vocab_size=100,
        endpoint=endpoint,
        load=NodeLoad(free_blocks=64, total_blocks=64),
        eos_token_ids=(2,),
    )
    return replace(record, **changes)


class FakeNode(node_pb2_grpc.NodeServicer):
    """A node that does as its test says: notes what it is sent, sends what it is told to."""

    def __init__(self, record: NodeRecord, secret: str = "") -> None:
        self.record = record
        self.secret = secret
        self.heard: list[messages.RouterMessage] = []
        self.sessions = 0
        self.refusals: asyncio.Queue[None] = asyncio.Queue()  # routers without the secret
        self.left = asyncio.Event()  # a session has ended
        self._news = asyncio.Event()
        self._unread: asyncio.Queue[messages.RouterMessage] = asyncio.Queue()
        self._outbox: asyncio.Queue[NodeRecord | NodeStep | None] = asyncio.Queue()
        self._server = grpc.aio.server(options=server_options(FAST))
        node_pb2_grpc.add_NodeServicer_to_server(self, self._server)
        self._last_words = "cut"
        self.address = ""

    async def start(self, port: int = 0) -> None:
        number = self._server.add_insecure_port(f"127.0.0.1:{port}")
        self.address = f"127.0.0.1:{number}"
        self.record = replace(self.record, address=self.address)
        await self._server.start()

    async def stop(self) -> None:
        """Abruptly, as kill -9 looks from the outside."""
        await self._server.stop(None)

    async def Session(self, request_iterator: Any, context: Any) -> None:
        hello = wire.router_message_from_wire(await context.read(), SystemClock())
        assert isinstance(hello, messages.SessionHello)
        mac = dict(context.invocation_metadata())[messages.SECRET_METADATA]
        if mac != messages.session_mac(self.secret, hello.router_id):
            self.refusals.put_nowait(None)
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "wrong secret")
        self.sessions += 1
        self._outbox = asyncio.Queue()
        await context.write(wire.node_message_to_wire(self.record))
        writer = asyncio.create_task(self._write(context))
        try:
            while (message := await context.read()) is not grpc.aio.EOF:
                for one in router_messages(message):
                    heard = wire.router_message_from_wire(one, SystemClock())
                    self.heard.append(heard)
                    self._news.set()
                    self._news = asyncio.Event()
                    self._unread.put_nowait(heard)
        finally:
            self.left.set()
            writer.cancel()
            await asyncio.gather(writer, return_exceptions=True)

    async def _write(self, context: Any) -> None:
        while (step := await self._outbox.get()) is not None:
            await context.write(wire.node_message_to_wire(step))
        await context.abort(grpc.StatusCode.UNAVAILABLE, self._last_words)

    # ---- for scripts ----

    def cut(self, words: str = "cut") -> None:
        """Break the session, go on living. `words`: what the router's gRPC makes of it."""
        self._last_words = words
        self._outbox.put_nowait(None)

    def say(self, **step: Any) -> None:
        self.say_raw(NodeStep(**step))

    def say_raw(self, message: NodeRecord | NodeStep) -> None:
        self._outbox.put_nowait(message)

    async def hear(self, kind: type[M]) -> M:
        """The next message of this kind; others are passed over."""
        async with asyncio.timeout(PATIENCE_S):
            while not isinstance(message := await self._unread.get(), kind):
                pass
        return message

    async def has_heard(self, kind: type[M]) -> FakeNode:
        """Itself, once it was sent a message of this kind (which stays unread)."""
        while not self.heard_of(kind):
            await self._news.wait()
        return self

    def heard_of(self, kind: type[M]) -> list[M]:
        return [message for message in self.heard if isinstance(message, kind)]

    def tokens(self, request: Request, position: int, *ids: int, **more: Any) -> None:
        event = TokenEvent(request.id, request.epoch, position, ids, **more)
        self.say(tokens=(event,))

    def finish(self, request: Request, position: int, *ids: int) -> None:
        self.tokens(request, position, *ids, finish_reason=FinishReason.LENGTH)

    def subscribe(self, request: Request) -> None:
        self.say(subscribed=(Subscribed(request.id, request.epoch),))

    def fail(
        self, request: Request, code: str, *, retryable: bool, epoch: int | None = None
    ) -> None:
        number = request.epoch if epoch is None else epoch
        self.say(failed=(RequestFailed(request.id, number, code, f"says {code}", retryable),))

    def export(self, request: Request, seq: int = 1, lease_ms: int = 10_000) -> KVHandle:
        handle = KVHandle(
            boot_id=self.record.boot_id,
            export_seq=seq,
            request_id=request.id,
            epoch=request.epoch,
            num_tokens=len(request.known_ids),
            secret=b"s",
            endpoint=self.record.endpoint,
            lease_ms=lease_ms,
        )
        self.say(handles=(HandleReady(request.id, request.epoch, handle),))
        return handle


class FakeDirectory:
    """The records that a test puts in it."""

    def __init__(self, known: Sequence[NodeRecord] = ()) -> None:
        self.known = list(known)
        self.away = False

    async def records(self) -> list[NodeRecord]:
        if self.away:
            raise StoreUnavailable("away")
        return self.known


@dataclass
class FakeRouter:
    """Everything of a router but its front doors."""

    store: RequestStore
    guard: StoreGuard
    registry: NodeRegistry
    dispatcher: Dispatcher
    events: EventRing = field(default_factory=EventRing)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            await self.registry.wait_until(condition)

    async def logged(self, request_id: str) -> list[int]:
        """The tokens in a request's log, when those that are shown have been written, too."""
        if (ledger := self.guard.ledgers.get(request_id)) is not None:
            await ledger.settle()
        return [token for it in await self.store.read_log(request_id) for token in it.token_ids]


@dataclass(frozen=True)
class RouterSetup:
    """How a test's router differs from the plain one."""

    settings: PolicySettings = field(default_factory=PolicySettings)
    secret: str = ""
    max_live: int = 100
    log: StepLog | None = None
    directory: NodeDirectory | None = None
    timing: Timing = FAST
    node_wait_s: float = 0.2
    exact: bool = False
    slow_request_s: float = 0.0
    model_of: ModelOf = only_model


@contextlib.asynccontextmanager
async def running_router(
    nodes: Sequence[FakeNode],
    store: RequestStore | None = None,
    *,
    wait: bool = True,
    **changes: Any,
) -> AsyncIterator[FakeRouter]:
    """A router connected to all `nodes` (already started); `changes` are RouterSetup's fields."""
    setup = RouterSetup(**changes)
    clock = SystemClock()
    kept = store or MemoryStore("router", FAST, clock)
    events = EventRing()
    guard = StoreGuard(kept, FAST, events)
    registry = NodeRegistry(
        RegistryParts(
            router_id="router",
            secrets=fixed(setup.secret),
            timing=setup.timing,
            clock=clock,
            log=setup.log or guard,
            addresses={node.address: node.record.role for node in nodes},
            directory=setup.directory,
            store_away=lambda: guard.stats.away,
            node_wait_s=setup.node_wait_s,
            exact=setup.exact,
            events=events,
            model_of=setup.model_of,
        )
    )
    parts = DispatchParts(
        registry,
        guard,
        clock,
        setup.settings,
        max_live=setup.max_live,
        timeout_s=30.0,
        events=events,
        slow_request_s=setup.slow_request_s,
        timelines=TimelineRing(MOST_TIMELINES),
    )
    router = FakeRouter(kept, guard, registry, Dispatcher(parts), events)
    await guard.start()
    await registry.start()
    try:
        if wait:
            await router.until(lambda: len(registry.records()) == len(nodes))
        yield router
    finally:
        await router.dispatcher.stop()
        await registry.stop()
        await guard.stop()
        for entry in parts.timelines.newest():
            assert_whole(entry)


@contextlib.asynccontextmanager
async def fake_nodes(*names: str) -> AsyncIterator[list[FakeNode]]:
    """Started nodes; the first letter of a name is its role: p or d."""
    roles = {"p": Role.PREFILL, "d": Role.DECODE}
    nodes = [FakeNode(make_record(name, roles[name[0]])) for name in names]
    for node in nodes:
        await node.start()
    try:
        yield nodes
    finally:
        for node in nodes:
            await node.stop()


def make_request(request_id: str = "r", prompt: int = 10, max_tokens: int = 8) -> Request:
    return Request(
        request_id,
        tuple(range(10, 10 + prompt)),
        SamplingParams(temperature=0.0, seed=1, max_tokens=max_tokens),
    )
