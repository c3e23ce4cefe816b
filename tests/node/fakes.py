"""Nodes in one process over a fake model with real KV, and a raw router client."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import grpc
import grpc.aio
import torch
from torch import Tensor

from baton.engine.config import EngineConfig
from baton.engine.core.active_model import ActiveModel
from baton.engine.core.assembly import EngineParts
from baton.engine.core.engine import Engine
from baton.engine.memory.kv_cache import KVArena
from baton.engine.state.interface import ChunkResult, Sampled, SequenceChunk
from baton.node.config import NodeConfig
from baton.node.main import NodeProcess, NodeProgram, Surroundings
from baton.protocol import wire
from baton.protocol.clock import SystemClock
from baton.protocol.events import NodeStep, RequestFailed, TokenEvent
from baton.protocol.handles import KVHandle, NodeLoad, NodeRecord, Role
from baton.protocol.kv_spec import BlockLists, HeldBlocks
from baton.protocol.messages import (
    AbortRequest,
    ReleaseExport,
    RouterMessage,
    SessionHello,
    SubmitDecode,
    SubmitPrefill,
    session_metadata,
)
from baton.runtime.timing import Timing, channel_options
from decode_node.role import DecodeRole
from kv_transfer.lanes.memory import MemoryFabric, MemoryLane
from kv_transfer.protocol.base import Lane
from prefill_node.role import PrefillRole
from protos import node_pb2, node_pb2_grpc
from tests.fakes import candidates, model_info, next_token, request, token_logprob

PATIENCE_S = 30.0  # a test that waits longer has failed
TIMING = Timing(
    heartbeat_s=0.05, kv_lease_s=60.0, connect_s=5.0, ping_interval_s=30.0, ping_timeout_s=30.0
)
PREFILL = NodeProgram(Role.PREFILL, "", PrefillRole)
DECODE = NodeProgram(Role.DECODE, "", DecodeRole)


class Gate:
    """Holds a thread at `pass_through` while closed; tests wait for it with `reached`."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._open.set()
        self._reached = threading.Event()

    def close(self) -> None:
        self._reached.clear()
        self._open.clear()

    def open(self) -> None:
        self._reached.clear()
        self._open.set()

    def pass_through(self) -> None:
        if not self._open.is_set():
            self._reached.set()
        assert self._open.wait(PATIENCE_S), "nobody opened the gate"

    async def reached(self) -> None:
        assert await asyncio.to_thread(self._reached.wait, PATIENCE_S), "nobody came to the gate"


class ArenaRunner:
    """A Runner whose KV is the token id, written into every layer of the real arena.

    The history of a row is read back from there, so blocks that were transferred wrongly, partly or
    not at all give wrong tokens. `layer_gate` is passed before each layer is announced, `step_gate`
    before each step. `hold_after`: it closes by itself, so that whoever acts on some tokens is in
    time for the next ones, however slow it is.
    """

    def __init__(self, arena: KVArena) -> None:
        self._arena = arena
        self.layer_gate = Gate()
        self.step_gate = Gate()
        self.fail_for: set[str] = set()
        self.num_steps = 0
        self._hold_at: int | None = None

    def hold_after(self, num_steps: int) -> None:
        """Close `step_gate` once that many steps from now were done."""
        self._hold_at = self.num_steps + num_steps

    def run(
        self, chunks: Sequence[SequenceChunk], on_layer: Callable[[int], None] | None = None
    ) -> list[ChunkResult]:
        if self.num_steps == self._hold_at:
            self._hold_at = None
            self.step_gate.close()
        self.step_gate.pass_through()
        self.num_steps += 1
        for chunk in chunks:
            if chunk.request_id in self.fail_for:
                raise RuntimeError("the fake model fails")
        for layer in range(len(self._arena.layers)):
            for chunk in chunks:
                held = chunk.blocks[self._arena.group_of[layer]]
                end = chunk.start + len(chunk.token_ids)
                places = self._places(held, chunk.start, end)
                values = torch.tensor(chunk.token_ids, dtype=torch.float32)[:, None, None]
                for tensor in self._arena.layer(layer):
                    tensor[places] = values.expand(-1, *tensor.shape[2:]).to(tensor.dtype)
            if on_layer is not None:
                self.layer_gate.pass_through()
                on_layer(layer)
        return [ChunkResult(self._sample(chunk)) for chunk in chunks]

    def _places(self, held: HeldBlocks, start: int, end: int) -> tuple[Tensor, Tensor]:
        """Block and offset of each token [start, end)."""
        positions = torch.arange(start, end)
        blocks = positions // self._arena.block_size - held.first
        assert (blocks >= 0).all(), "a hole is used"
        return torch.tensor(held.ids)[blocks], positions % self._arena.block_size

    def _sample(self, chunk: SequenceChunk) -> Sampled | None:
        if chunk.sample is None:
            return None
        end = chunk.start + len(chunk.token_ids)
        history = self._read(chunk.blocks, end)
        if chunk.num_candidates:
            return Sampled((), candidates=candidates(history, chunk.num_candidates))
        samples = chunk.fan_out or (chunk.sample_index,)
        tokens = [next_token(history, chunk.sample, chunk.position, each) for each in samples]
        told = tuple((token_logprob(history, token),) for token in tokens)
        return Sampled(tuple(tokens), told if chunk.sample.logprobs is not None else ())

    def _read(self, blocks: BlockLists, end: int) -> list[int]:
        """The tokens [0, end), as each layer that sees one of them from the last holds it."""
        history = torch.full((end,), torch.nan)
        for layer, spec in enumerate(self._arena.layers):
            start = max(0, end - spec.window) if spec.window else 0
            places = self._places(blocks[self._arena.group_of[layer]], start, end)
            seen = history[start:]
            for tensor in self._arena.layer(layer):
                found = tensor[places].float().flatten(1)
                seen[:] = torch.where(seen.isnan(), found[:, 0], seen)
                assert (found == seen[:, None]).all(), "KV differs between layers, K, V"
        assert not history.isnan().any(), "a token that no layer sees"
        return [int(value) for value in history.tolist()]


@dataclass
class TestNode:
    """One node under test."""

    __test__ = False
    node: NodeProcess
    engine: Engine
    runner: ArenaRunner

    @property
    def total_blocks(self) -> int:
        return self.engine.pool.num_blocks

    async def until_idle(self) -> None:
        """Until every block is free and nothing is exported or fetched; proves the accounting."""
        async with asyncio.timeout(PATIENCE_S):
            while not await self._idle():  # each look is a round trip to the engine thread
                pass
        await self.node.shell.thread.call(lambda engine: engine.check())

    async def _idle(self) -> bool:
        load = await self.node.shell.thread.call(lambda engine: engine.current_load())
        ours = self.node.shell.load()
        work = load.running + load.waiting + ours.fetching + ours.export_bytes
        return work == 0 and load.free_blocks == load.total_blocks


@dataclass
class Setup:
    """How a node is built."""

    num_blocks: int = 64
    block_size: int = 4
    timing: Timing = TIMING
    options: dict[str, Any] = field(default_factory=dict)  # of NodeConfig
    engine_options: dict[str, Any] = field(default_factory=dict)
    model_options: dict[str, Any] = field(default_factory=dict)  # of ModelInfo
    lane: Lane | None = None


@asynccontextmanager
async def running_node(
    program: NodeProgram, fabric: MemoryFabric, setup: Setup | None = None
) -> AsyncIterator[TestNode]:
    setup = setup or Setup()
    info = model_info(**setup.model_options)
    arena = KVArena(info.layers, setup.num_blocks, setup.block_size, info.kv_dtype)
    runner = ArenaRunner(arena)
    config = EngineConfig(model="fake", check_invariants=True, **setup.engine_options)
    parts = EngineParts(config, ActiveModel(runner), arena, info)
    lane = setup.lane or MemoryLane(fabric)
    around = Surroundings(setup.timing, SystemClock(), (lane,))
    node = NodeProcess(program, NodeConfig(**setup.options), parts, around)
    await node.start()
    try:
        yield TestNode(node, node.engine, runner)
    finally:
        runner.layer_gate.open()
        runner.step_gate.open()
        await node.stop()


async def status_of(call: Any) -> str:
    """The name of the status that ends `call`. What is unread is read first: gRPC may keep the
    status back until then.
    """
    with suppress(grpc.aio.AioRpcError):
        while await call.read() is not grpc.aio.EOF:
            pass
    return (await call.code()).name


class RawRouter:
    """The router's end of one session, message by message."""

    def __init__(self, call: Any, record: NodeRecord, router_id: str) -> None:
        self._call = call
        self.record = record
        self.router_id = router_id
        self.steps: list[NodeStep] = []  # everything heard
        self.load = record.load
        self._num_asked = 0

    async def send(self, message: RouterMessage) -> None:
        await self._call.write(wire.router_message_to_wire(message, SystemClock()))

    async def prefill(self, request: Any) -> None:
        await self.send(SubmitPrefill(request))

    async def decode(
        self, request: Any, handle: KVHandle | None = None, *, prefilling: bool = False
    ) -> None:
        await self.send(SubmitDecode(request, handle, prefilling))

    async def abort(self, request_id: str, epoch: int = 1) -> None:
        await self.send(AbortRequest(request_id, epoch))

    async def release(self, handle: KVHandle) -> None:
        await self.send(ReleaseExport(handle, "test"))

    async def heard(self) -> None:
        """Until the node has read what was sent so far: it refuses what another role is asked."""
        self._num_asked += 1
        marker = request(f"marker-{self._num_asked}")
        asked = SubmitDecode if self.record.role is Role.PREFILL else SubmitPrefill
        await self.send(asked(marker))
        await self.failure_of(marker.id)

    async def ending(self) -> str:
        """The gRPC status name with which the node ends this session."""
        async with asyncio.timeout(PATIENCE_S):
            return await status_of(self._call)

    async def next_step(self) -> NodeStep:
        async with asyncio.timeout(PATIENCE_S):
            message = await self._call.read()
        assert message is not grpc.aio.EOF, "the node ended the session"
        step = wire.node_message_from_wire(message)
        assert isinstance(step, NodeStep)
        self.steps.append(step)
        if step.load is not None:
            self.load = step.load
        return step

    async def part(self) -> None:
        """Read to the node's last words, then end the session, as routers do."""
        await self.until(lambda: self.steps and self.steps[-1].last)
        self._call.cancel()

    async def until(self, happened: Callable[[], object]) -> None:
        """Read until `happened()`. Heartbeats come for ever: the bound is on all of them."""
        async with asyncio.timeout(PATIENCE_S):
            while not happened():
                await self.next_step()

    async def until_load(self, wanted: Callable[[NodeLoad], bool]) -> None:
        await self.until(lambda: wanted(self.load))

    def events(self, request_id: str) -> list[TokenEvent]:
        return [e for step in self.steps for e in step.tokens if e.request_id == request_id]

    def tokens(self, request_id: str) -> list[int]:
        return [token for event in self.events(request_id) for token in event.token_ids]

    def sample(self, request_id: str, sample: int) -> list[int]:
        """Tokens of one sample; checks that no position is missing or told twice."""
        events = [event for event in self.events(request_id) if event.sample == sample]
        for before, after in pairwise(events):
            assert before.finish_reason is None, "an event after the end"
            assert after.position == before.position + len(before.token_ids)
        return [token for event in events for token in event.token_ids]

    async def all_ended(self, request_id: str, count: int) -> None:
        """Until so many samples have ended."""
        await self.until(
            lambda: sum(e.finish_reason is not None for e in self.events(request_id)) == count
        )

    def finished(self, request_id: str) -> bool:
        return any(event.finish_reason is not None for event in self.events(request_id))

    def failures(self, request_id: str) -> list[RequestFailed]:
        return [f for step in self.steps for f in step.failed if f.request_id == request_id]

    def handles(self, request_id: str) -> list[KVHandle]:
        return [h.handle for step in self.steps for h in step.handles if h.request_id == request_id]

    def subscribed(self, request_id: str) -> bool:
        return any(s.request_id == request_id for step in self.steps for s in step.subscribed)

    async def handle_of(self, request_id: str) -> KVHandle:
        await self.until(lambda: self.handles(request_id))
        return self.handles(request_id)[0]

    async def failure_of(self, request_id: str) -> RequestFailed:
        await self.until(lambda: self.failures(request_id))
        return self.failures(request_id)[0]

    async def all_tokens(self, request_id: str) -> list[int]:
        """Tokens up to the finish reason; checks that no position is missing or told twice."""
        await self.until(lambda: self.finished(request_id))
        events = self.events(request_id)
        for before, after in pairwise(events):
            assert after.position == before.position + len(before.token_ids)
        return self.tokens(request_id)


async def open_call(
    address: str, metadata: tuple[tuple[str, str | bytes], ...] = ()
) -> tuple[Any, Any]:
    """A channel and a Session call on it."""
    channel = grpc.aio.insecure_channel(address, options=channel_options(TIMING))
    return channel, node_pb2_grpc.NodeStub(channel).Session(metadata=metadata)


@asynccontextmanager
async def connected(
    node: TestNode | NodeProcess, router_id: str = "router-1", secret: str = ""
) -> AsyncIterator[RawRouter]:
    metadata = session_metadata(secret, router_id) if secret else ()
    address = node.address if isinstance(node, NodeProcess) else node.node.address
    channel, call = await open_call(address, metadata)
    try:
        await call.write(wire.router_message_to_wire(SessionHello(router_id), SystemClock()))
        async with asyncio.timeout(PATIENCE_S):
            message = await call.read()
        assert isinstance(message, node_pb2.NodeMessage), await call.details()
        record = wire.node_message_from_wire(message)
        assert isinstance(record, NodeRecord)
        yield RawRouter(call, record, router_id)
    finally:
        call.cancel()
        await channel.close()


@dataclass
class Pair:
    """A prefill and a decode node, and one router connected to both."""

    p: TestNode
    d: TestNode
    to_p: RawRouter
    to_d: RawRouter


@asynccontextmanager
async def running_pair(
    prefill: Setup | None = None, decode: Setup | None = None
) -> AsyncIterator[Pair]:
    fabric = MemoryFabric()
    async with (
        running_node(PREFILL, fabric, prefill) as p,
        running_node(DECODE, fabric, decode) as d,
        connected(p) as to_p,
        connected(d) as to_d,
    ):
        yield Pair(p, d, to_p, to_d)
