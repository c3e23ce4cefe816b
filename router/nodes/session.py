"""NodeSession: this router's one stream to one node; all messages of the two go through it.

The life: run() connects -> Hello both ways, `admit` checks the node's record -> messages -> the
stream breaks -> every attached request gets SessionLost -> back-off -> again, until run() is
cancelled. The next session of the node knows nothing of the broken one. Above: no protobuf.

Waiting steps are taken together; their events go to the requests (router/nodes/attachments.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import grpc
import grpc.aio

from baton.protocol import messages, wire
from baton.protocol.clock import Clock, SystemClock
from baton.protocol.errors import BatonError, ConfigError, InvalidRequest, NodeLost
from baton.protocol.events import NodeStep
from baton.protocol.handles import NodeLoad, NodeRecord
from baton.runtime.rotation.deployment_secret import Secrets
from baton.runtime.timing import Timing, channel_options
from protos import node_pb2
from router.events import EventRing
from router.nodes.attachments import (
    Attachments,
    Attempt,
    SessionLost,
    StepLog,
    in_order,
    suspects,
)
from router.nodes.flows import FlowBook
from router.nodes.health import NodeHealth, Watchdog
from router.nodes.orders import Orders
from router.nodes.policy import NodeSnapshot
from router.nodes.prefix_index import PrefixIndex

logger = logging.getLogger(__name__)
FIRST_BACKOFF_S: Final = 0.1
LAST_BACKOFF_S: Final = 2.0
UNTAKEN_STEPS: Final = 16  # steps that are read and not routed; beyond that the node must wait
PING: Final = "ping timeout"  # gRPC's words for a peer that does not answer
SESSION_METHOD: Final = "/baton.node.v1.Node/Session"
BATCH_BYTES: Final = 1 << 20  # no message is added to a batch of this size


@dataclass(frozen=True, slots=True)
class SessionContext:
    """What all sessions share. `admit` raises ConfigError for a node that must not serve."""

    router_id: str
    secrets: Secrets
    timing: Timing
    clock: Clock
    log: StepLog
    admit: Callable[[str, NodeRecord], None]
    changed: Callable[[], None]  # a session came up or went down, or a node began to drain
    lost: Callable[[NodeRecord], None] = lambda _: None  # the node's session went down
    reported: Callable[[], None] = lambda: None  # a step has been routed
    credentials: Callable[[], grpc.ChannelCredentials] | None = None  # None: without TLS
    health: NodeHealth = field(default_factory=lambda: NodeHealth(SystemClock()))
    events: EventRing = field(default_factory=EventRing)


class NodeSession:
    def __init__(self, address: str, context: SessionContext) -> None:
        self.address = address
        self._context = context
        self._record: NodeRecord | None = None
        self._load = NodeLoad()
        self.boot_id: str | None = None  # the node's incarnation; None while not connected
        self.keys: tuple[str, ...] = (address,)  # the node's names in router/nodes/health.py
        self.refused = ""  # why this router does not use the node
        self._attached = Attachments(context.log, context.health.stats)
        self._outbox: deque[messages.RouterMessage] = deque()
        self._writer: asyncio.Future[None] | None = None  # what the writing task waits for
        self._wake = asyncio.Event()
        self._drained = False  # the node has sent its last step
        self._snapshot: NodeSnapshot | None = None  # None: something has changed since
        self._doubted = False  # the node hung, and has reported no load since
        stall_s = context.timing.stall_s
        self._watchdog = Watchdog(context.clock, stall_s, lambda: bool(self._attached.by_id))
        self.prefix = PrefixIndex()
        self.orders = Orders(self.send)
        self.flows = FlowBook(context.clock)

    # ---- what it knows ----

    @property
    def connected(self) -> bool:
        """Whether Hellos were exchanged and the stream has not broken since."""
        return self.boot_id is not None

    @property
    def record(self) -> NodeRecord | None:
        """The node's record as the node sent it last; None until its first Hello."""
        return self._record

    @property
    def _name(self) -> str:
        return self.address if self._record is None else self._record.node_id

    @property
    def load(self) -> NodeLoad:
        return self._load

    @property
    def stalled(self) -> bool:
        """Whether its engine makes no progress: it said so, or was silent and told no load then."""
        return self._doubted or self._load.stalled

    @property
    def takes_requests(self) -> bool:
        """Whether the node is connected, neither drains nor sleeps, and its engine progresses."""
        load = self._load
        return self.boot_id is not None and not (load.draining or load.asleep or self.stalled)

    @property
    def assigned(self) -> int:
        return len(self._attached.by_id)

    @property
    def assigned_tokens(self) -> int:
        """Prompt tokens that this router's requests still have to compute there."""
        return self._attached.tokens

    @property
    def unreported_tokens(self) -> int:
        """Those of `assigned_tokens` that were sent since the node last reported its load."""
        return self._attached.unreported_tokens

    @property
    def suspects(self) -> set[str]:
        """Ids of the requests that the node may have died of, if it has died."""
        return suspects(self._attached.by_id.values(), self._load.running + self._load.waiting)

    def snapshot(self, record: NodeRecord, model: str = "") -> NodeSnapshot:
        """Return the node's snapshot for the policy; computed only after a change."""
        known = self._snapshot
        if known is None or known.assigned_tokens != self._attached.tokens:  # a prompt is computed
            self._snapshot = known = NodeSnapshot(  # not `replace`, which is three times as slow
                node_id=record.node_id,
                boot_id=record.boot_id,
                role=record.role,
                model_digest=record.model_digest,
                fingerprint=record.endpoint.layout_fingerprint,
                block_size=record.block_size,
                kv_dtype=record.endpoint.format.dtype,
                adapters=record.adapters,
                max_num_seqs=record.max_num_seqs,
                needs_rows=record.needs_rows,
                model=model,
                load=self._load,
                prefix=self.prefix.hashes,
                checkpoints=self.prefix.checkpoints,
                assigned=len(self._attached.by_id),
                assigned_tokens=self._attached.tokens,
                unreported_tokens=self._attached.unreported_tokens,
                pooling=self._attached.pooling,
                shunned=self.stalled,
            )
        return known

    # ---- requests ----

    def attach(self, attempt: Attempt) -> None:
        """Route the events of a request to `attempt` from now on.

        Raises NodeLost when the session is down.
        """
        if self.boot_id is None:
            raise NodeLost(f"node {self.address} is not connected")
        attempt.session, attempt.boot_id = self, self.boot_id
        self._snapshot = None
        if not self._attached.by_id:
            self._watchdog.heard()  # a node without requests may have been silent until now
        self._attached.add(attempt)

    def detach(self, request_id: str) -> None:
        """Route no more events to the request. A second call does nothing."""
        self._snapshot = None
        # A load report never contains a request that the node refused, and an idle node reports no
        # load. So the room that became free is reported here. This comes last, because `reported`
        # reads the state of this session.
        if self._attached.remove(request_id):
            self._context.reported()

    def send(self, message: messages.RouterMessage) -> None:
        """Queue a message to the node; drop it if the session is down."""
        if self.boot_id is not None:
            self._outbox.append(message)
            if self._writer is not None and not self._writer.done():
                self._writer.set_result(None)

    # ---- the stream ----

    def wake(self) -> None:
        """Try to connect now, without back-off: the node is probably back."""
        self._wake.set()

    async def run(self) -> None:
        """Keep the session up until cancelled."""
        backoff = FIRST_BACKOFF_S
        while True:
            self._wake.clear()
            reason = await self._connect_and_serve()
            if self.boot_id is not None:
                backoff = FIRST_BACKOFF_S
            self._lose(reason)
            # Jitter: many routers do not come back to a restarted node in the same instant.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(backoff * (0.5 + random.random() / 2)):
                    await self._wake.wait()
            backoff = min(2 * backoff, LAST_BACKOFF_S)

    async def _connect_and_serve(self) -> str:
        """Run one session with the node, from connect to end; return why it ended, for the log.

        An error of the connection is part of that text and is not raised.
        """
        try:
            async with self._call() as call:
                await self._hello(call)
                await self._converse(call)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNAUTHENTICATED:
                logger.error("node %s refuses this router: %s", self.address, error.details())
            return f"{error.code().name}: {error.details()}"
        except ConfigError as error:
            if error.message != self.refused:
                logger.error("node %s is refused: %s", self.address, error.message)
                self._context.events.note("node-refused", error.message, node=self.address)
            self.refused = error.message
            return error.message
        except InvalidRequest as error:
            logger.error("node %s breaks the protocol: %s", self.address, error.message)
            return error.message
        except (TimeoutError, BatonError, OSError) as error:
            return f"{type(error).__name__}: {error}"
        except Exception as error:  # a bug here must not strand the attached requests
            logger.exception("session with node %s failed", self.address)
            return f"{type(error).__name__}: {error}"
        return "the node ended the session"

    @contextlib.asynccontextmanager
    async def _call(self) -> AsyncIterator[Any]:
        timing = self._context.timing
        # The global pool would share its connection back-off between attempts.
        options = [*channel_options(timing), ("grpc.use_local_subchannel_pool", 1)]
        proof = messages.session_metadata(self._context.secrets()[0], self._context.router_id)
        async with self._channel(options) as channel:
            async with asyncio.timeout(timing.connect_s):
                await channel.channel_ready()
            # NodeStub's call, but for the serializer: messages are given as bytes.
            session = channel.stream_stream(
                SESSION_METHOD, response_deserializer=node_pb2.NodeMessage.FromString
            )
            call = session(metadata=proof)
            try:
                yield call
            finally:  # `call.cancel()` does nothing once a write has failed in gRPC's core
                call._cython_call.cancel("the session is over")

    def _channel(self, options: Sequence[tuple[str, int]]) -> Any:
        if (credentials := self._context.credentials) is None:
            return grpc.aio.insecure_channel(self.address, options=options)
        return grpc.aio.secure_channel(self.address, credentials(), options=options)

    async def _hello(self, call: Any) -> None:
        """Exchange Hellos and check the node's record; then the session is up.

        Raises ConfigError, InvalidRequest or NodeLost if it cannot be.
        """
        hello = messages.SessionHello(self._context.router_id)
        async with asyncio.timeout(self._context.timing.connect_s):
            await call.write(
                wire.router_messages_to_bytes([hello], self._context.clock, BATCH_BYTES)
            )
            first = await call.read()
        if first is grpc.aio.EOF:
            raise NodeLost("the node sent no hello")
        record = wire.node_message_from_wire(first)
        if not isinstance(record, NodeRecord):
            raise InvalidRequest("the first message is no hello", field="hello")
        self._context.admit(self.address, record)
        self._record = record
        self._load = record.load
        self._snapshot = None
        self.refused = ""
        self.keys = (self.address, record.node_id)
        self._outbox.clear()
        self._drained = False
        self.prefix.clear()
        self._watchdog.heard()
        self.boot_id = record.boot_id
        logger.info("%s node %s is up at %s", record.role.value, record.node_id, self.address)
        text = f"{record.role.value} node is up at {self.address}"
        self._context.events.note("node-joined", text, node=record.node_id)
        self._context.changed()

    async def _converse(self, call: Any) -> None:
        """Read and write until the stream ends or the node has drained.

        If an error ended the stream, all steps read before are routed first; then it is raised.
        """
        steps: asyncio.Queue[NodeStep | BaseException | None] = asyncio.Queue(UNTAKEN_STEPS)
        tasks = [
            asyncio.create_task(self._write(call)),
            asyncio.create_task(_read_steps(call, steps)),
            asyncio.create_task(self._watch(steps)),
        ]
        try:
            ended = False
            while not ended:
                # Steps that came while the last ones were logged share one call to the log.
                batch = [await steps.get()]
                batch += [steps.get_nowait() for _ in range(steps.qsize())]
                ended = await self._take_all(batch)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _watch(self, steps: asyncio.Queue[NodeStep | BaseException | None]) -> None:
        """End the session when the node is silent for too long, so that its requests go on on
        other nodes."""
        await self._watchdog.bite()
        if steps.empty():  # else the node is not silent: this router is behind
            steps.put_nowait(self._hangs(f"silent for {self._context.timing.stall_s:g} s"))

    def _hangs(self, how: str) -> NodeLost:
        self._doubted, self._snapshot = True, None
        return NodeLost(f"the node makes no progress: {how}")

    async def _take_all(self, batch: Sequence[NodeStep | BaseException | None]) -> bool:
        """Route the steps that were read, in order. Return True after the last step of the stream.

        Raises the error that ended the reading, and NodeLost if the node reports that it hangs.
        """
        steps = [item for item in batch if isinstance(item, NodeStep)]
        self._watchdog.heard()
        for step in steps:
            self._note(step)
        await self._attached.show([event for step in steps for event in in_order(step)])
        if any(step.last for step in steps):
            self._drained = True
            return True
        if steps:
            self._context.reported()
        if self._load.stalled and self._attached.by_id:
            raise self._hangs("it says so itself")
        last = batch[-1]
        if isinstance(last, BaseException):
            raise last
        return last is None

    async def _write(self, call: Any) -> None:
        """Send the messages of the outbox, in order.

        All messages that wait go as one batch, because each write costs about 0.1 ms. When a write
        fails, the stream has broken, and the reader ends the session.
        """
        clock = self._context.clock
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            while True:
                while not self._outbox:
                    self._writer = asyncio.get_running_loop().create_future()
                    await self._writer
                await asyncio.sleep(0)  # messages of the same turn of the loop go along
                batch = (self._outbox.popleft() for _ in range(len(self._outbox)))
                await call.write(wire.router_messages_to_bytes(batch, clock, BATCH_BYTES))

    def _note(self, step: NodeStep) -> None:
        """Take what a step reports of the node itself: load, adapters, orders, block events."""
        if step.load is not None:
            before, drained = self.takes_requests, self._load.draining
            self._load = step.load
            self._doubted = False
            self._snapshot = None
            self._attached.load_reported()
            if before != self.takes_requests:
                self._context.changed()
            if step.load.draining and not drained:
                self._context.events.note("drain", "takes no new requests", node=self._name)
        if step.flows:
            self.flows.note(step.flows)
        if step.controlled:
            self.orders.answered(step.controlled)
        if step.adapters is not None and self._record is not None:
            held, leaving = step.adapters.held, step.adapters.leaving
            self._record = replace(self._record, adapters=held, leaving_adapters=leaving)
            self._snapshot = None
            self._context.changed()
        if step.failed or step.tokens:
            self._context.health.heard(self.keys, step)
        if step.block_events:
            self.prefix.apply(step.block_events_seq, step.block_events)

    def _lose(self, reason: str) -> None:
        """Mark the session as down, detach all requests, and deliver SessionLost to each."""
        was_connected, self.boot_id = self.boot_id is not None, None
        self.prefix.clear()
        self.flows.clear()
        blamed = set[str]() if self._drained else self.suspects
        attached = self._attached.clear()
        self._snapshot = None
        node_id = self._name
        self.orders.lost(NodeLost(f"node {node_id} is lost"))
        if was_connected and self._record is not None:
            self._context.lost(self._record)
            self._context.changed()
        if was_connected and not self._drained:
            self._context.health.died(self.keys, stalled=self._doubted)
        for attempt in attached:
            suspect = attempt.request_id in blamed
            lost = SessionLost(
                node_id, reason, self._drained, PING in reason, self._doubted, suspect
            )
            attempt.deliver(lost)
        if was_connected and self._drained:
            logger.info("node %s at %s has drained", node_id, self.address)
            self._context.events.note("drain", "has drained and left", node=node_id)
        elif was_connected:
            logger.warning(
                "node %s at %s is lost with %d requests: %s",
                node_id, self.address, len(attached), reason,
            )  # fmt: skip
            text = f"lost with {len(attached)} requests: {reason}"
            self._context.events.note("node-lost", text, node=node_id)


async def _read_steps(call: Any, steps: asyncio.Queue[NodeStep | BaseException | None]) -> None:
    """Put the node's steps into `steps`; at the end None, or the error that broke the stream."""
    try:
        while (message := await call.read()) is not grpc.aio.EOF:
            step = wire.node_message_from_wire(message)
            if not isinstance(step, NodeStep):
                raise InvalidRequest("a second hello", field="hello")
            await steps.put(step)
    except Exception as error:  # noqa: BLE001  raised where the steps are taken
        await steps.put(error)
    else:
        await steps.put(None)
