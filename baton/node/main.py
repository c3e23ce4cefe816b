"""A node process, of any role: start, serve, drain, stop.

Life of the process: options -> cores -> signal handlers -> model (loaded on a thread, so that a
signal is handled meanwhile) -> NodeProcess.start() -> the READY line on stdout -> SIGTERM or SIGINT
-> NodeProcess.drain() -> NodeProcess.stop(). A second signal ends the drain at once.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import secrets
import sys
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from baton.engine.config import EngineConfig, parse_bytes
from baton.engine.core.assembly import EngineParts, load_parts
from baton.engine.core.engine import Engine
from baton.engine.memory.kv_cache import MakeMemory
from baton.engine.parallel.data_rank import DataRank
from baton.engine.parallel.messages import Gone
from baton.node.config import NodeConfig, join_address
from baton.node.data_ranks import RANK, Alone, FirstRank, NodeGroup, OtherRank, end
from baton.node.heartbeat import Heartbeat, RedisRegistry, Registry
from baton.node.lanes import ROW_LANES, LaneSettings, PoolPlace, make_lanes, parse_lanes, row_lanes
from baton.node.metrics_server import MetricsPlace, metrics_tokens, start_metrics
from baton.node.profiling import EngineProfiler
from baton.node.role import MakeThread, NodeParts, NodeRole, RoleContext
from baton.node.service import NodeServer
from baton.node.shell import NodeShell
from baton.node.tracing import NodeTracing
from baton.protocol.clock import Clock, SystemClock
from baton.protocol.errors import ConfigError
from baton.protocol.handles import KVHandle, Role
from baton.protocol.kv_spec import BlockLists, layout_fingerprint
from baton.runtime import config as options
from baton.runtime import log as logs
from baton.runtime.addresses import is_loopback
from baton.runtime.cores import live_threads, parse_cores, pin_process, quota_cores
from baton.runtime.failpoints import FAILPOINTS
from baton.runtime.health_port import Health, health_port
from baton.runtime.redis.connections import NODE_CALL, check_redis
from baton.runtime.rotation.file_metrics import watch_files
from baton.runtime.task_metrics import watch_process
from baton.runtime.timing import Timing
from baton.runtime.vllm_flags import add_idle
from baton.runtime.wsgi_server import RunningServer
from kv_transfer.connector import Connector, TransferOptions
from kv_transfer.pool.device_copies import memory_of
from kv_transfer.pool.rows import RowMemory
from kv_transfer.protocol.base import KVMemory, Lane, OnReleased

if TYPE_CHECKING:
    from baton.node.kubernetes.pod_annotation import DeletionCost

log = logging.getLogger(__name__)

USAGE_ERROR: Final = 2
LOADER: Final = "load"


@dataclass(frozen=True, slots=True)
class NodeProgram:
    """What distinguishes the command of one role from another's. `load`: as load_parts()."""

    role: Role
    description: str
    make_role: Callable[[RoleContext, MakeThread], NodeRole]
    load: Callable[[EngineConfig, MakeMemory | None, DataRank | None], EngineParts] = load_parts


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a node gets from outside its own configuration; tests pass in their own."""

    timing: Timing
    clock: Clock
    lanes: Sequence[Lane]
    group: str = ""  # the data-parallel group's name


@dataclass(frozen=True, slots=True)
class _Exchange:
    """Makes the connectors of one node."""

    boot_id: str
    config: NodeConfig
    around: Surroundings

    def of_kv(self, memory: KVMemory, fingerprint: str, on_released: OnReleased) -> Connector:
        """Return the connector of the node's pool."""
        lanes, options = self.around.lanes, _transfer_options(self.config)
        return self._make(memory, fingerprint, lanes, on_released, options)

    def of_rows(self, memory: RowMemory, fingerprint: str) -> Connector:
        """Return a connector that only fetches rows of images. Its lanes are never started."""
        lanes = make_lanes(ROW_LANES, LaneSettings.of(self.config, self.around.timing))
        return self._make(memory, fingerprint, lanes, _nothing_exported, TransferOptions())

    def _make(
        self,
        memory: KVMemory,
        fingerprint: str,
        lanes: Sequence[Lane],
        on_released: OnReleased,
        options: TransferOptions,
    ) -> Connector:
        return Connector(
            memory=memory,
            boot_id=self.boot_id,
            fingerprint=fingerprint,
            secrets=self.config.secrets,
            lanes=lanes,
            timing=self.around.timing,
            clock=self.around.clock,
            on_released=on_released,
            options=options,
        )


def _nothing_exported(handle: KVHandle, blocks: BlockLists, why: str) -> None:
    """Do nothing: there is no such export."""


class NodeProcess:
    """One node of any role, in this process: shell, gRPC server, heartbeat, metrics endpoint."""

    def __init__(
        self, program: NodeProgram, config: NodeConfig, parts: EngineParts, around: Surroundings
    ) -> None:
        """Make the engine from `parts`, and everything around it.

        Callers must not keep `parts`: they would keep the model in memory while the node sleeps.
        """
        self._config = config
        lockstep = parts.active.lockstep
        rank, ranks = (0, 1) if lockstep is None else (lockstep.place.rank, lockstep.place.size)
        boot_id = secrets.token_hex(16)
        node_id = config.node_id or f"{program.role.value}-{boot_id[:8]}"

        exchange = _Exchange(boot_id, config, around)

        def make_connector(on_released: OnReleased) -> Connector:
            info = parts.info
            memory = memory_of(parts.arena, around.timing.kv_progress_s)
            return exchange.of_kv(
                memory, layout_fingerprint(info.digest, info.rope, info.layers), on_released
            )

        self.shell = NodeShell(
            NodeParts(
                node_id=node_id,
                boot_id=boot_id,
                role=program.role,
                config=config,
                timing=around.timing,
                clock=around.clock,
                engine=parts,
                group=(around.group, rank),
                make_connector=make_connector,
                make_role=program.make_role,
                make_row_connector=exchange.of_rows,
                tracing=NodeTracing.of(config, program.role, node_id, around.clock),
            )
        )
        self._server = NodeServer(self.shell)
        self._heartbeat = Heartbeat(self._beat, around.timing.heartbeat_s)
        self._registry: Registry | None = None
        self._recorded = False  # whether the registry may have this node's record
        if config.redis_url:
            self._registry = RedisRegistry(config.redis_url, around.timing)
        self._deletion_cost: DeletionCost | None = None
        if config.pod is not None and rank == 0:  # for all ranks, which are in one pod
            from baton.node.kubernetes.pod_annotation import DeletionCost  # httpx, for pods alone

            pod = replace(config.pod, ranks=ranks)
            self._deletion_cost = DeletionCost(pod, parts.arena.block_size, around.clock)
        self._metrics: RunningServer | None = None
        self.address = ""

    @property
    def engine(self) -> Engine:
        return self.shell.engine

    async def start(self) -> None:
        """Bind the ports, start everything, register the node.

        Raises ConfigError if an address cannot be bound, or if another node has this one's name.
        """
        config = self._config
        if config.metrics_port is not None:
            registry = self.shell.metrics.registry
            watch_process(registry, asyncio.get_running_loop())
            watch_files(registry, config.secret_file, (config.tls, config.kv_tls))
            tokens = None if is_loopback(config.host) else metrics_tokens(config.secrets)
            place = MetricsPlace(config.host, config.metrics_port, tokens, config.tls)
            loop = asyncio.get_running_loop()
            profiler = EngineProfiler(self.shell.thread, loop) if config.profiling else None
            self._metrics = start_metrics(registry, place, profiler)
        self.address = join_address(config.announced_host, self._server.bind())
        if self.shell.kind is Role.DECODE and self.engine.steps.cores is not None:
            self.engine.steps.cores.let_roam(live_threads())  # none of them computes
        await self.shell.start(self.address)
        await self._server.start()
        if self._registry is not None:
            self._recorded = True
            await self._registry.claim(self.shell.record())
        self._heartbeat.start()

    def ready(self) -> dict[str, object]:
        """Return the content of the READY line."""
        lanes = self.shell.connector.endpoint().lanes
        return {
            "ready": True,
            "role": self.shell.kind.value,
            "node_id": self.shell.node_id,
            "boot_id": self.shell.boot_id,
            "address": self.address,
            "kv_address": lanes[0].address if lanes else None,
            "kv_lanes": [lane.name for lane in lanes],
            "metrics_port": self._metrics.port if self._metrics else None,
            "model": self.engine.config.model_name,
            "model_impl": self.engine.info.model_impl,
            "block_size": self.engine.pool.block_size,
            "num_blocks": self.engine.pool.num_blocks,
        }

    @property
    def gets_on(self) -> bool:
        """Whether this node's engine makes progress (baton/node/progress.py)."""
        return not self.shell.progress.stalled

    @property
    def takes_work(self) -> bool:
        return self.gets_on and not self.shell.draining

    async def drain(self) -> None:
        """Take no new requests; wait, at most `drain_s`, until those here have ended."""
        self.shell.begin_drain()
        await self._server.set_health(serving=False)
        await self.shell.drain()

    async def stop(self) -> None:
        """Leave the registry, end all sessions, stop all threads. May be called twice."""
        await self._heartbeat.stop()
        if self._deletion_cost is not None:
            await self._deletion_cost.stop()
        if self._registry is not None:
            if self._recorded:
                await self._registry.withdraw(self.shell.record())
            await self._registry.close()
            self._registry = None
        await self.shell.stop()
        await self._server.stop()
        if self.shell.tracing is not None:
            await asyncio.to_thread(self.shell.tracing.close)
        if self._metrics is not None:
            await asyncio.to_thread(self._metrics.stop)
            self._metrics = None
        if self.engine.ranks is not None:
            await asyncio.to_thread(self.engine.ranks.close)

    async def _beat(self) -> None:
        self.shell.ask_engine()
        self.shell.connector.let_go()
        self.shell.rows.let_go()
        self.shell.control.sweep()
        if self._registry is not None:
            await self._registry.announce(self.shell.record())
        if self._deletion_cost is not None:
            self._deletion_cost.look(self.shell.load(), len(self.shell.requests))
        await self._server.set_health(serving=self.takes_work)


def main(program: NodeProgram, argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run one node until a signal ends it; return the exit status."""
    prog = f"python -m {program.role.value}_node"
    rank: OtherRank | None = None
    try:
        if list(argv[:1]) == [RANK]:
            rank = OtherRank(int(argv[1]))
            config, engine_config = rank.options.config, rank.options.engine
        else:
            config, engine_config = _configured(prog, program.description, argv, environ)
            _check_tower(program.role, engine_config)
        logs.setup(config.node_id or program.role.value, config.log_level, config.log_format)
        FAILPOINTS.arm(environ)
        if config.cpu_cores is not None:
            cores = parse_cores(config.cpu_cores)
            pin_process(cores)
            engine_config = replace(engine_config, threads=engine_config.threads or len(cores))
        elif engine_config.threads is None:
            engine_config = replace(engine_config, threads=limited_threads())
        group: NodeGroup = rank or Alone()
        if rank is None and engine_config.data_parallel_size > 1:
            group = first = FirstRank(config, engine_config, program.role)
            config, engine_config = first.options.config, first.options.engine
            if config.cpu_cores is not None:
                pin_process(parse_cores(config.cpu_cores))
        try:
            status = asyncio.run(_watched(program, config, engine_config, group))
        finally:
            group.close()
    except Gone:
        return 0
    except ConfigError as error:
        sys.stderr.write(f"{prog}: {error.message}\n")
        if rank is not None:
            rank.failed(error)
        return USAGE_ERROR
    if any(thread.name == LOADER for thread in threading.enumerate()):
        # Otherwise the interpreter's end would unwind the thread's C++ frames, and libstdc++ would
        # abort.
        logging.shutdown()
        sys.stdout.flush()
        os._exit(status)
    return status


def _configured(
    prog: str, description: str, argv: Sequence[str], environ: Mapping[str, str]
) -> tuple[NodeConfig, EngineConfig]:
    """Read and check the options. Raises ConfigError."""
    parser = argparse.ArgumentParser(prog=prog, description=description)
    options.add_options(parser, EngineConfig)
    options.add_options(parser, NodeConfig)
    add_idle(parser)
    arguments = options.parse(parser, argv)
    config = options.load(NodeConfig, arguments, environ)
    config.check()
    parse_lanes(config.kv_lanes)
    _ = config.secrets  # of a file that cannot be read: refused before the model is loaded
    _transfer_options(config)
    return config, options.load(EngineConfig, arguments, environ)


def _check_tower(role: Role, config: EngineConfig) -> None:
    """Raise ConfigError for a node that cannot go without a vision tower."""
    if role is not Role.PREFILL and not config.vision_tower:
        raise ConfigError(
            "--no-vision-tower is for prefill nodes: a decode node may have to compute a prompt "
            "again by itself, and an encode node is nothing else",
            field="vision_tower",
        )


async def _watched(
    program: NodeProgram, config: NodeConfig, engine_config: EngineConfig, group: NodeGroup
) -> int:
    """Run `_run` and the health port, which is open even while the model loads."""
    health = Health(SystemClock(), config.stall_s)
    async with health_port(health, config.host, config.health_port):
        return await _run(program, config, engine_config, Life(health, group, *group.events()))


@dataclass(frozen=True, slots=True)
class Life:
    """What a node's process lives by: `first` drains it, `second` ends the drain at once."""

    health: Health
    group: NodeGroup
    first: asyncio.Event
    second: asyncio.Event


async def _run(
    program: NodeProgram, config: NodeConfig, engine_config: EngineConfig, life: Life
) -> int:
    names, group = parse_lanes(config.kv_lanes), life.group
    if program.role is Role.ENCODE:
        names = row_lanes(names)
    optional = config.kv_lanes.strip() == options.AUTO
    place = PoolPlace(names, Path(config.kv_shm_dir), optional=optional)
    group.on_death(place.remove_all)
    timing = replace(Timing(), drain_s=config.drain_s)
    if config.redis_url:
        await check_redis(config.redis_url, timing.heartbeat_s, NODE_CALL)

    def load() -> EngineParts:
        FAILPOINTS.hit("loading")
        parts = program.load(engine_config, place.memory, group.data)
        group.meet()
        return parts

    def node_of(parts: EngineParts) -> NodeProcess:
        model = parts.active.model
        ranks = None if model is None else model.ranks
        if ranks is not None:
            ranks.on_lost(end)
        settings = LaneSettings.of(config, timing)
        # A lane that reads the pool itself would see one rank's heads only, so it gets no pool.
        pool = parts.arena if ranks is None else None
        parts.arena.before_giving_back = place.stop_taking
        settings = replace(settings, pool=pool, shared=place.shared)
        lanes = make_lanes(place.usable(names), settings)
        around = Surroundings(timing, SystemClock(), lanes, group.name)
        return NodeProcess(program, config, parts, around)

    try:
        log.info("loading %s", engine_config.model)
        node = await load_node(load, life.first, node_of)
        if node is None:
            log.info("stopped before the model was loaded")
            return 0
        await _serve(node, life, place)
    finally:
        place.close()
        await asyncio.to_thread(group.close)
    return 0


async def _serve(node: NodeProcess, life: Life, place: PoolPlace) -> None:
    """Serve until the first signal, then drain until done or until the second signal."""
    health, group = life.health, life.group
    try:
        await node.start()
        health.started(lambda: node.gets_on, lambda: node.takes_work)
        await group.ready(node.ready() | {"health_port": health.port})
        place.take(lost=end)
        await life.first.wait()
        await _until(group.drain(node.drain), life.second)
    finally:
        group.stop()
        await node.stop()


def limited_threads() -> int | None:
    """Return the container's limit of cores if it is below the number of cores, else None.

    None leaves the number of threads to torch.
    """
    quota = quota_cores()
    return quota if quota is not None and quota < len(os.sched_getaffinity(0)) else None


def _transfer_options(config: NodeConfig) -> TransferOptions:
    """Return the options of KV transfer. Raises ConfigError for a size that cannot be parsed."""
    memory = config.kv_export_memory
    budget = None if memory is None else parse_bytes(memory, field="kv_export_memory")
    return TransferOptions(config.kv_wire_codec, budget, adopt=config.kv_adopt)


async def _until(work: Coroutine[Any, Any, None], event: asyncio.Event) -> None:
    """Await `work`, but only until `event` is set."""
    worker = asyncio.ensure_future(work)
    waiter = asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait({worker, waiter}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (worker, waiter):
            task.cancel()
        outcome, _ = await asyncio.gather(worker, waiter, return_exceptions=True)
    if isinstance(outcome, Exception):
        raise outcome


async def load_node(
    load: Callable[[], EngineParts],
    stop: asyncio.Event,
    node_of: Callable[[EngineParts], NodeProcess],
) -> NodeProcess | None:
    """Return the node over the parts that `load` returns on a thread; None if `stop` came first.

    Raises what `load` raises, unless `stop` came first.
    """
    loop = asyncio.get_running_loop()
    loaded: asyncio.Future[EngineParts] = loop.create_future()

    def work() -> None:
        try:
            parts = load()
        except BaseException as error:  # noqa: BLE001 - raised on the event loop, below
            finish = partial(loaded.set_exception, error)
        else:
            finish = partial(loaded.set_result, parts)
        with suppress(RuntimeError):  # the loop has closed: a signal came first
            loop.call_soon_threadsafe(finish)

    # A daemon thread, so that a signal need not wait until gigabytes of weights are loaded.
    threading.Thread(target=work, name=LOADER, daemon=True).start()
    waiter = asyncio.ensure_future(stop.wait())
    await asyncio.wait({loaded, waiter}, return_when=asyncio.FIRST_COMPLETED)
    waiter.cancel()
    if loaded.done():
        return node_of(loaded.result())
    loaded.add_done_callback(asyncio.Future.exception)  # seen, so that nothing logs it
    return None
