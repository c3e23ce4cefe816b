"""A whole Baton in one process: real router, nodes and gRPC on free loopback ports, MemoryStore.

`async with cluster(plan) as c:` yields the parts, so that a test can ask every pool and counter
what happened. Real processes, for tests that kill, are tests/system/processes.py.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from baton.client import AsyncClient, Generation
from baton.engine.config import EngineConfig
from baton.engine.core.engine import Engine
from baton.node.config import NodeConfig
from baton.node.lanes import LaneSettings, PoolPlace, make_lanes
from baton.node.main import NodeProcess, NodeProgram, Surroundings
from baton.protocol.clock import Clock, SystemClock
from baton.protocol.sampling import SamplingParams
from baton.runtime.timing import Timing
from decode_node.__main__ import PROGRAM as DECODE
from encode_node.__main__ import PROGRAM as ENCODE
from prefill_node.__main__ import PROGRAM as PREFILL
from router.api.grpc.inference import GrpcServer
from router.config import RouterConfig
from router.main import Router
from tests.timelines import assert_whole
from tests.waiting import WAIT_S, eventually

S = TypeVar("S")
FAR = 8  # tokens
PACE_S = 0.02
# All that lives here is one process: silence is a busy machine's, never a stopped peer's.
PATIENT = Timing(
    connect_s=30.0, kv_lease_s=60.0, kv_progress_s=30.0, ping_interval_s=30.0, ping_timeout_s=30.0
)


@dataclass(frozen=True, slots=True)
class Plan:
    """What to start. `prefill`, `decode`, `encode`: EngineConfig options, one dict per node."""

    model: Path
    prefill: Sequence[dict[str, Any]] = ({},)
    decode: Sequence[dict[str, Any]] = ({},)
    router: dict[str, Any] = field(default_factory=dict[str, Any])
    timing: Timing = PATIENT
    elsewhere: Sequence[str] = ()  # addresses of further prefill nodes, in other processes
    encode: Sequence[dict[str, Any]] = ()
    encode_elsewhere: Sequence[str] = ()  # likewise, of encode nodes
    clock: Clock = field(default_factory=SystemClock)  # the nodes'
    shared: Path | None = None  # where pools lie whose pages are adopted; None: grpc, copies
    lanes: Sequence[str] = ()  # KV lanes, best first; () = shm and grpc, or grpc alone
    adopt: bool = True
    wire_codec: str = "raw"
    traces: str | None = None  # endpoint of a collector, for router and nodes
    traces_protocol: str | None = None


@dataclass(slots=True)
class Member:
    """One node with its engine."""

    node: NodeProcess
    engine: Engine

    @property
    def stats(self) -> Any:
        return self.engine.stats

    @property
    def transfers(self) -> Any:
        return self.node.shell.connector.stats

    async def holds_nothing(self) -> bool:
        """Whether neither the engine has work nor an export may be fetched: each can end first."""
        idle = await self.node.shell.thread.call(_idle)
        return idle and self.node.shell.connector.active_exports == 0


@dataclass(slots=True)
class Cluster:
    prefill: list[Member]
    decode: list[Member]
    encode: list[Member]
    router: Router
    client: AsyncClient

    @property
    def members(self) -> list[Member]:
        return [*self.prefill, *self.decode, *self.encode]

    async def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams
    ) -> list[Generation]:
        """All prompts at once, results in order."""
        return await asyncio.gather(*(self.client.generate(prompt, params) for prompt in prompts))

    def pace(self, streams: list[S], seen: Callable[[], list[int]]) -> list[S]:
        """Keep the decode nodes from running away, until the test is over: `streams` as they are.

        `seen`: how many tokens the client of each live stream has. Whoever acts on what the
        slowest has come to shall find the others under way, though this machine may be busy: while
        one is far ahead of another, or of its client, each step waits a little.
        """
        for member in self.decode:
            _pace(member.engine, seen)
        return streams

    def hold_after(self, num_steps: int) -> threading.Event:
        """Each decode node stands still after so many steps from now, until the event is set.

        For one request: it is in mid-stream then, however late anybody looks.
        """
        go_on = threading.Event()
        for member in self.decode:
            _hold(member.engine, num_steps, go_on)
        return go_on

    async def settle(self) -> None:
        """Wait until no node holds anything, then prove it: free + used == total everywhere."""
        # An abort may cross with the first word of an export: that goes with its lease.
        limit_s = WAIT_S + PATIENT.kv_lease_s
        for member in self.members:
            await eventually(member.holds_nothing, limit_s)
            await member.node.shell.thread.call(Engine.check)
            assert member.engine.pool.num_free == member.engine.pool.num_blocks


def _pace(engine: Engine, seen: Callable[[], list[int]]) -> None:
    runner = engine.steps.runner
    run, told, steps_since = runner.run, 0, 0
    never = threading.Event()

    def paced(*arguments: Any) -> Any:
        nonlocal told, steps_since
        counts = seen()
        steps_since = 0 if sum(counts) != told else steps_since + 1
        told = sum(counts)
        if counts and (steps_since > FAR or max(counts) - min(counts) > FAR):
            never.wait(PACE_S)
        return run(*arguments)

    runner.run = paced  # pyright: ignore[reportAttributeAccessIssue]


def _hold(engine: Engine, num_steps: int, go_on: threading.Event) -> None:
    runner = engine.steps.runner
    run, done = runner.run, 0

    def held(*arguments: Any) -> Any:
        nonlocal done
        if done == num_steps:
            assert go_on.wait(WAIT_S), "nobody lets it go on"
        done += 1
        return run(*arguments)

    runner.run = held  # pyright: ignore[reportAttributeAccessIssue]


def _idle(engine: Engine) -> bool:
    return not engine.has_work and engine.pool.num_free == engine.pool.num_blocks


@asynccontextmanager
async def cluster(plan: Plan) -> AsyncGenerator[Cluster, None]:
    async with AsyncExitStack() as stack:
        prefill = [await member_of(stack, PREFILL, plan, options) for options in plan.prefill]
        decode = [await member_of(stack, DECODE, plan, options) for options in plan.decode]
        encode = [await member_of(stack, ENCODE, plan, options) for options in plan.encode]
        config = RouterConfig(
            model=str(plan.model),
            port=0,
            grpc_port=0,
            prefill_node=(*(member.node.address for member in prefill), *plan.elsewhere),
            decode_node=tuple(member.node.address for member in decode),
            encode_node=(*(member.node.address for member in encode), *plan.encode_elsewhere),
            timing=plan.timing,
            otlp_traces_endpoint=plan.traces,
            otlp_traces_protocol=plan.traces_protocol,
            **plan.router,
        )
        router = Router(config)
        server = GrpcServer(router.services)
        port = server.bind()
        await router.start()
        stack.push_async_callback(router.stop)
        await server.start()
        stack.push_async_callback(server.stop, 0)
        background = asyncio.create_task(router.run_background())
        stack.push_async_callback(_cancelled, background)

        async def registered() -> bool:
            count = len(prefill) + len(decode) + len(encode)
            count += len(plan.elsewhere) + len(plan.encode_elsewhere)
            return len(router.registry.records()) == count

        await eventually(registered)
        client = await stack.enter_async_context(AsyncClient(f"127.0.0.1:{port}"))
        yield Cluster(prefill, decode, encode, router, client)
        assert router.services.timelines is not None
        for entry in router.services.timelines.newest():
            assert_whole(entry)


async def member_of(
    stack: AsyncExitStack, program: NodeProgram, plan: Plan, options: dict[str, Any]
) -> Member:
    """Start one node; it stops with the stack."""
    defaults = {"num_kv_blocks": 64, "threads": 1, "check_invariants": True}
    engine_config = EngineConfig(model=str(plan.model), **(defaults | options))
    names = plan.lanes or (("shm", "grpc") if plan.shared else ("grpc",))
    place = PoolPlace(names, plan.shared or Path("/dev/shm"))
    stack.callback(place.close)
    parts = program.load(engine_config, place.memory, None)
    config = NodeConfig(
        kv_lanes=",".join(names),
        kv_adopt=plan.adopt,
        kv_wire_codec=plan.wire_codec,
        otlp_traces_endpoint=plan.traces,
        otlp_traces_protocol=plan.traces_protocol,
    )
    settings = LaneSettings(plan.timing, pool=parts.arena, shared=place.shared)
    lanes = make_lanes(names, settings)
    around = Surroundings(plan.timing, plan.clock, lanes)
    node = NodeProcess(program, config, parts, around)
    stack.push_async_callback(node.stop)
    await node.start()
    return Member(node, node.engine)


async def _cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
