"""A router process: start, serve, drain, stop.

The life: options -> signal handlers -> store, registry -> gRPC and HTTP servers -> READY on stdout.
At SIGTERM, /ready answers 503 at once; all other routes are served for `drain_s` more. Then the
router takes no new connections, and running requests get `shutdown_s` to end. SIGINT, or a second
signal, skips the wait of `drain_s`; the next signal also skips the wait of `shutdown_s`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import math
import secrets
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final, cast

import uvicorn
import uvloop
from redis.asyncio import Redis
from starlette.types import ASGIApp

from baton.protocol.clock import SystemClock
from baton.protocol.errors import ConfigError
from baton.protocol.handles import Role
from baton.runtime import config as options
from baton.runtime import log as logs
from baton.runtime.collector import settle
from baton.runtime.cores import parse_cores, pin_process
from baton.runtime.failpoints import FAILPOINTS
from baton.runtime.health_port import Health, health_port
from baton.runtime.redis.connections import check_router_redis, connect
from baton.runtime.rotation.file_metrics import watch_files
from baton.runtime.task_metrics import watch_process
from baton.runtime.vllm_flags import add_idle
from router.admin.server import create_admin_app
from router.api.grpc.inference import GrpcServer
from router.batches.runner import BatchRunner
from router.config import RouterConfig
from router.console.stream import StateFeed
from router.events import EventRing
from router.metrics.parts import WatchedParts, watch_failures, watch_gate
from router.metrics.resumable import watch_runs
from router.metrics.router import RouterMetrics, watch_pieces
from router.models import Models
from router.nodes.directory import RedisDirectory
from router.nodes.migration import Migrator, MigratorParts
from router.nodes.placement import Placement
from router.nodes.policy import PolicySettings
from router.nodes.registry import NodeRegistry, RegistryParts
from router.picker.service import PickerServer
from router.request.aborts import Aborts
from router.request.dispatch_parts import DispatchParts
from router.request.dispatcher import Dispatcher
from router.request.gate.admission import Bounds
from router.request.gate.gate import Gate, GateSettings
from router.request.texts import TextRing
from router.request.timeline import TimelineRing
from router.request.tracing import tracing_of
from router.resumable.adoption import Adopter
from router.resumable.runs import RunParts, Runs
from router.server.app import create_app
from router.server.http_guard import HttpLimits, uvicorn_settings
from router.server.listeners import HttpServer, bind, join, listen, release
from router.services import RouterServices
from router.store.base import RequestStore
from router.store.guard import StoreGuard
from router.store.memory_store import MemoryStore
from router.store.redis_links import RedisServers
from router.store.redis_store import RedisStore, longest_s
from router.workers import Supervisor

log = logging.getLogger(__name__)
USAGE_ERROR: Final = 2
STOP_MARGIN_S: Final = 2.0


class Stages:
    """The stages of a stop: drain, close, leave. Each signal sets at least the next stage."""

    def __init__(self) -> None:
        self.drain = asyncio.Event()
        self.close = asyncio.Event()
        self.leave = asyncio.Event()

    def on_signal(self, number: int) -> None:
        log.info("%s received", signal.Signals(number).name)
        if self.close.is_set():
            self.leave.set()
        if number == signal.SIGINT or self.drain.is_set():
            self.close.set()
        self.drain.set()


class Router:
    """All parts of one router. The life: start() -> run_background() -> stop()."""

    def __init__(self, config: RouterConfig) -> None:
        """Build all parts. Raises ConfigError for bad options, ModelRefused for a bad model."""
        config.check()
        if not (config.model or config.models):
            raise ConfigError("--model is needed: its tokenizer and chat template", field="model")
        models = Models.load(config)
        clock, events = SystemClock(), EventRing()
        timelines = TimelineRing(config.timeline_requests)
        router_id = config.router_id or f"router-{secrets.token_hex(4)}"
        self.config = config = replace(config, router_id=router_id)
        # Of the reads of node records; no request waits for them. The store's own is shorter.
        patience_s = longest_s(config.timing, config.store_timeout_s)
        url = config.redis_url
        self._redis: Redis | None = None if url is None else connect(url, patience_s)
        self.guard = StoreGuard(_store(config, router_id, patience_s), config.timing, events)
        self.registry = NodeRegistry(
            RegistryParts(
                router_id=router_id,
                secrets=config.secrets,
                timing=replace(config.timing, stall_s=config.stall_s),
                clock=clock,
                log=self.guard,
                addresses=config.node_addresses,
                directory=None if self._redis is None else RedisDirectory(self._redis, patience_s),
                tls=config.node_tls,
                store_away=lambda: self.guard.stats.away,
                node_wait_s=config.node_wait_s,
                exact=config.resume == "exact",
                events=events,
                model_of=models.key_of,
            )
        )
        metrics = RouterMetrics()
        dispatcher = _dispatcher(config, models, self.registry, self.guard, timelines, events)
        self.aborts = Aborts(dispatcher, self._redis)
        kept = config.max_resumable_mb
        parts = RunParts(dispatcher, self.guard, metrics, clock, max_kept_mb=kept)
        self.services = RouterServices(
            config=config,
            dispatcher=dispatcher,
            registry=self.registry,
            store=self.guard,
            models=models,
            metrics=metrics,
            clock=clock,
            aborts=self.aborts,
            timelines=timelines,
            events=events,
            batches=BatchRunner.of(config),
            runs=Runs(parts),
        )
        self.picker: PickerServer | None = None
        self.picker_port: int | None = None  # the bound one
        self.adopter = _adopter(self.services)
        self.migrator = _migrator(config, self.registry, self.services.dispatcher)
        _watch(self.services)

    async def start(self, own_address: str = "") -> None:
        """`own_address`: HOST:PORT of this router's HTTP server, for the picker.

        Raises ConfigError if the picker's port is taken."""
        registry, config = self.services.metrics.registry, self.config
        watch_process(registry, asyncio.get_running_loop())
        watch_files(registry, config.secret_file, (config.tls, config.node_tls), config.key_files())
        if config.picker_port is not None:
            self.picker = PickerServer(self.services, own_address)
            self.picker_port = self.picker.bind()
        await self.guard.start()
        await self.registry.start()
        if self.picker is not None:
            await self.picker.start()

    async def run_background(self) -> None:
        """Run heartbeats to the store, node records, migrations, aborts, batches and the picker's
        health, until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.guard.run())
            group.create_task(self.registry.run())
            group.create_task(self.migrator.run())
            group.create_task(self.aborts.run())
            if self.picker is not None:
                group.create_task(self.picker.watch())
            if self.services.batches is not None:
                group.create_task(self.services.batches.run())

    async def stop(self) -> None:
        """Leave resumable requests to other routers, cancel all other requests, close every part.
        Calling it twice is safe."""
        await self.adopter.stop()
        if self.picker is not None:
            await self.picker.stop()
        if self.services.runs is not None:
            await self.services.runs.stop()
        await self.services.dispatcher.stop()
        await self.registry.stop()
        await self.guard.stop()
        if self._redis is not None:
            await self._redis.aclose()
        if (tracing := self.services.dispatcher.tracing) is not None:
            await asyncio.to_thread(tracing.close)


def policy_settings(config: RouterConfig) -> PolicySettings:
    return PolicySettings(
        prefix_weight=1.0 if config.policy == "prefix-aware" else 0.0,
        local_prefill_tokens=config.local_prefill_tokens,
        placement=cast(Placement, config.prefill_placement),  # one of its choices
        two_choices=config.power_of_two,
        named_nodes=config.named_nodes,
    )


async def watched(config: RouterConfig) -> None:
    """Run `serve`, and the health port if one is configured.

    Raises ConfigError if the router cannot start."""
    health = Health(SystemClock(), config.stall_s)
    async with health_port(health, config.host, config.health_port):
        await serve(config, health)


async def serve(config: RouterConfig, health: Health) -> None:
    """Run a router until a signal stops it. Raises ConfigError if it cannot start."""
    stages = Stages()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stages.on_signal, number)
    if config.redis_url is not None:
        await check_router_redis(config.redis_url, config.store_timeout_s)
    router = Router(config)
    listener = listen(config)
    own = None if config.own_port is None else bind(config, config.own_port)
    app = create_app(router.services)
    http = http_server(config, app)
    admin = AdminServer(config, router.services, app)
    grpc_server = GrpcServer(router.services)
    grpc_port = grpc_server.bind()
    await router.start(join(config.host, listener.getsockname()[1]) if config.uds is None else "")
    await grpc_server.start()
    serving = asyncio.create_task(
        http.serve([listener] if own is None else [listener, own]), name="http"
    )
    tasks = [
        serving,
        asyncio.create_task(router.run_background(), name="heartbeats"),
        asyncio.create_task(grpc_server.watch(), name="health"),
        *admin.start(),
    ]
    try:
        await until(http.began, tasks)
        settle()
        health.started(lambda: True, lambda: router.services.ready)
        ports = {"health_port": health.port, "picker_port": router.picker_port}
        announce(config, listener, grpc_port, own, admin_address=admin.address, **ports)
        await until(stages.drain, tasks)
        router.services.lifecycle.draining = True
        health.look()
        await grpc_server.tell_health()
        await until(stages.close, tasks, config.drain_s)
        http.should_exit = True
        grace_s = config.shutdown_s + STOP_MARGIN_S
        calls = asyncio.create_task(grpc_server.stop(grace_s), name="grpc")
        answers = asyncio.create_task(ended(serving, calls))
        await until(stages.leave, [answers], config.shutdown_s)
        if not answers.done():
            await router.stop()  # requests that still run end with an error: the router stops
            await until(stages.leave, [answers], STOP_MARGIN_S)
    finally:
        http.should_exit = http.force_exit = True
        admin.stop()
        await router.stop()
        await grpc_server.stop(0)
        release(config)
        for task in tasks[1:]:
            task.cancel()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, Exception):
            raise outcome


async def until(
    event: asyncio.Event, tasks: Sequence[asyncio.Task[None]], timeout_s: float | None = None
) -> None:
    """Wait until `event` is set, one of `tasks` has ended, or `timeout_s` is over."""
    waiter = asyncio.create_task(event.wait())
    try:
        await asyncio.wait([waiter, *tasks], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiter.cancel()


async def ended(*tasks: asyncio.Task[None]) -> None:
    await asyncio.wait(tasks)


def http_server(config: RouterConfig, app: ASGIApp) -> HttpServer:
    return HttpServer(
        uvicorn.Config(
            app,
            log_config=None,
            lifespan="on",
            timeout_graceful_shutdown=math.ceil(config.shutdown_s + STOP_MARGIN_S),
            **uvicorn_settings(HttpLimits(), config.tls),
        )
    )


class AdminServer:
    """The server of the admin port; without `admin_port` in the config it does nothing.

    The life: made (binds the port) -> start() -> stop()."""

    def __init__(self, config: RouterConfig, services: RouterServices, public: ASGIApp) -> None:
        """Bind the port. `public`: the public app, which the console's pages use.

        Raises ConfigError if the port cannot be bound, or if a key file cannot be read."""
        self.address: str | None = None
        self._server: HttpServer | None = None
        if config.admin_port is None:
            return
        self._feed = StateFeed(services)
        app = create_admin_app(services, feed=self._feed, public=public)
        self._listener = bind(replace(config, host=config.admin_host), config.admin_port)
        self.address = join(config.admin_host, self._listener.getsockname()[1])
        settings = uvicorn_settings(HttpLimits(), config.tls)
        self._server = HttpServer(uvicorn.Config(app, log_config=None, lifespan="off", **settings))

    def start(self) -> list[asyncio.Task[None]]:
        """Start serving; return the tasks, none without an admin port."""
        if self._server is None:
            return []
        return [
            asyncio.create_task(self._server.serve([self._listener]), name="admin"),
            asyncio.create_task(self._feed.run(), name="console"),
        ]

    def stop(self) -> None:
        """Stop serving. Calling it twice is safe."""
        if self._server is not None:
            self._server.should_exit = self._server.force_exit = True


def announce(
    config: RouterConfig,
    listener: socket.socket,
    grpc_port: int,
    own: socket.socket | None = None,
    **more: str | int | None,
) -> None:
    """Print the READY line on stdout, for the process that started this one."""
    ready = {
        "ready": True,
        "role": "router",
        "address": f"unix:{config.uds}"
        if config.uds
        else join(config.host, listener.getsockname()[1]),
        "grpc_address": join(config.host, grpc_port),
        **more,
    }
    if own is not None:
        ready["own_address"] = join(config.host, own.getsockname()[1])
    sys.stdout.write(json.dumps(ready) + "\n")
    sys.stdout.flush()


async def supervise(config: RouterConfig, argv: Sequence[str]) -> None:
    """Run several routers until a signal ends them. Raises ConfigError if one cannot start."""
    await Supervisor(config, argv).run()


def main(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run a router until a signal ends it; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m router", description="The front door: HTTP and gRPC APIs, dispatch, policy."
    )
    options.add_options(parser, RouterConfig)
    add_idle(parser)
    try:
        arguments = options.parse(parser, argv)
        config = options.load(RouterConfig, arguments, environ)
        logs.setup("router", config.log_level, config.log_format)
        FAILPOINTS.arm(environ)
        if config.workers > 1:
            config.check()
            asyncio.run(supervise(config, argv))
            return 0
        if config.cpu_cores is not None:
            pin_process(parse_cores(config.cpu_cores))
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(watched(config))
    except ConfigError as error:
        sys.stderr.write(f"{parser.prog}: {error.message}\n")
        return USAGE_ERROR
    return 0


def _migrator(config: RouterConfig, registry: NodeRegistry, dispatcher: Dispatcher) -> Migrator:
    return Migrator(
        MigratorParts(
            requests=dispatcher,
            snapshots=registry.snapshots,
            changed=lambda: registry.changed,
            timing=config.timing,
            now=SystemClock().monotonic,
            rebalance=config.rebalance,
        )
    )


def _watch(services: RouterServices) -> None:
    """Register every part whose numbers /metrics reads at each scrape."""
    metrics, dispatcher = services.metrics, services.dispatcher
    metrics.watch_migrations(lambda: dispatcher.migrations)
    watch_gate(metrics.registry, dispatcher.gate)
    pieces = [model.tokenizer.pieces for model in services.models.all]
    watch_pieces(metrics.registry, [each.stats for each in pieces if each is not None])
    if services.runs is not None:
        watch_runs(metrics.registry, services.runs)
    watched = WatchedParts(services.store, services.registry, dispatcher.retries)
    watch_failures(metrics.registry, watched)


def _dispatcher(
    config: RouterConfig,
    models: Models,
    registry: NodeRegistry,
    guard: StoreGuard,
    timelines: TimelineRing,
    events: EventRing,
) -> Dispatcher:
    return Dispatcher(
        DispatchParts(
            registry=registry,
            store=guard,
            clock=SystemClock(),
            settings=policy_settings(config),
            max_live=config.max_live_requests,
            timeout_s=config.request_timeout_s,
            gate=_gate(config, models, registry),
            slow_request_s=config.slow_request_s,
            timelines=timelines,
            texts=TextRing(config.timeline_requests) if config.keeps_text else None,
            tracing=tracing_of(config, lambda key: models.name_of(key, registry)),
            events=events,
        )
    )


def _adopter(services: RouterServices) -> Adopter:
    """Return what adopts the resumable requests of dead routers, while this router is ready."""
    assert services.runs is not None, "a whole router runs resumable requests"
    return Adopter(services.runs, services.store, lambda: services.ready)


def _store(config: RouterConfig, router_id: str, patience_s: float) -> RequestStore:
    if config.redis_url is None:
        log.warning("no --redis-url: requests and logs live in this process only")
        return MemoryStore(router_id, config.timing, SystemClock())
    servers = RedisServers.of(config.redis_url, patience_s, config.replicas_wanted)
    return RedisStore(servers, router_id, config.timing, SystemClock(), config.store_timeout_s)


def _gate(config: RouterConfig, models: Models, registry: NodeRegistry) -> Gate:
    """Return the gate between the APIs and the dispatcher; it looks again at each node report."""
    most = config.max_live_image_mb << 20
    live, tokens = models.limits("max_live_requests"), models.limits("max_request_tokens")
    bounds = Bounds(config.max_live_requests, config.max_queued_requests, most, live)
    window_s, policy = config.prefill_window_s, policy_settings(config)
    settings = GateSettings(bounds, config.max_request_tokens, window_s, tokens, policy)

    def expected_s(model: str, pooled: bool) -> float:
        roles = (Role.PREFILL, Role.DECODE) if pooled else (Role.DECODE,)
        return registry.expected_s(lambda node: node.model == model and node.role in roles)

    gate = Gate(SystemClock(), settings, registry.snapshots, expected_s)
    registry.watch_reports(gate.poke)
    return gate
