"""Several routers on one port: `--workers N`. A supervisor, and N ordinary routers as its children.

    supervisor      holds both ports (bound, not listening), starts the workers, prints one READY
                    line when all are ready, passes SIGTERM and SIGINT on, replaces a worker that
                    died, and ends when the last one has
    worker          `python -m router.worker ...`: a router with its own node sessions. It listens
                    on the shared ports (SO_REUSEPORT: the kernel spreads connections) and on one
                    HTTP port of its own, which serves its own /metrics. Workers share requests
                    and token logs through Redis. A worker ends when the supervisor ends, even if
                    the supervisor was killed.

The supervisor serves only the health port; it answers there by asking the health port of each
worker. It keeps no state of requests. It needs Linux.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

from baton.protocol.clock import SystemClock
from baton.protocol.errors import ConfigError
from baton.runtime.cores import parse_cores
from baton.runtime.health_port import INTERVAL_S, Health, health_port
from router.config import RouterConfig

log = logging.getLogger(__name__)
START_S: Final = 60.0
FIRST_BACKOFF_S: Final = 0.5
LAST_BACKOFF_S: Final = 30.0
ASK_S: Final = 5.0
# Wildcard address to listen on -> the address to connect to.
_LOOPBACK: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def reserve(host: str, port: int, name: str) -> socket.socket:
    """Return a socket that reserves `port` (0: any free one) for processes that share it.

    The socket never listens, so the kernel gives it no connections. `name`: the option to blame.
    Raises ConfigError if the port is taken.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = found[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            # SO_REUSEPORT would also share with the workers of another deployment. This bind,
            # without SO_REUSEPORT, fails if anybody else has the port.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen()
        holder = socket.socket(family, socket.SOCK_STREAM)
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind(address)
    except OSError as error:
        raise ConfigError(f"cannot bind {host}:{port}: {error}", field=name) from error
    return holder


def worker_flags(config: RouterConfig, index: int, ports: tuple[int, int]) -> list[str]:
    """Return the flags to append to the supervisor's own flags for worker number `index`.

    The last value of a repeated flag counts. `ports`: HTTP, gRPC."""
    name = config.router_id or f"router-{secrets.token_hex(4)}"
    own = config.own_port + index if config.own_port else 0
    flags = ["--workers", "1", "--reuse-port", "--router-id", f"{name}-w{index}"]
    flags += ["--port", str(ports[0]), "--grpc-port", str(ports[1]), "--own-port", str(own)]
    if config.admin_port is not None:
        flags += ["--admin-port", str(config.admin_port + index if config.admin_port else 0)]
    if config.health_port is not None:
        flags += ["--health-port", "0"]  # the supervisor alone asks there
    if config.cpu_cores is not None:
        cores = parse_cores(config.cpu_cores)
        flags += ["--cpu-cores", str(cores[index % len(cores)])]
    return flags


@dataclass(slots=True)
class Worker:
    """A worker process and its replacements. `process`: the current one; `starts`: how many."""

    index: int
    flags: Sequence[str]
    process: asyncio.subprocess.Process | None = None
    ready: dict[str, Any] = field(default_factory=dict[str, Any])
    starts: int = 0
    gets_on: bool = True  # the last answer of its /livez
    takes_work: bool = False  # the last answer of its /readyz

    async def start(self) -> None:
        """Start a process and wait for its READY line.

        Raises ConfigError if it ends before that line, TimeoutError after START_S."""
        self.starts += 1
        self.ready = {}
        self.gets_on, self.takes_work = True, False
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "router.worker", *self.flags,
            stdin=asyncio.subprocess.PIPE,  # end of file tells the worker: the supervisor is gone
            stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        assert self.process.stdout is not None, "it was given a pipe"
        async with asyncio.timeout(START_S):
            async for line in self.process.stdout:
                if line.startswith(b"{"):
                    self.ready = json.loads(line)
                    return
        raise ConfigError(f"worker {self.index} ended at its start", field="workers")

    def signal(self, number: int) -> None:
        if self.process is not None and self.process.returncode is None:
            self.process.send_signal(number)

    async def ask(self, host: str) -> None:
        """Update `gets_on` and `takes_work` from the worker's health port. While the process starts
        or has ended, do nothing."""
        port = self.ready.get("health_port")
        if port is None or self.process is None or self.process.returncode is not None:
            return
        self.gets_on, self.takes_work = await asyncio.gather(
            says_yes(host, port, "/livez"), says_yes(host, port, "/readyz")
        )

    async def wait(self) -> int:
        assert self.process is not None, "it was started"
        return await self.process.wait()


async def says_yes(host: str, port: int, path: str) -> bool:
    """Whether a GET of `path` is answered with 200 within ASK_S."""
    with suppress(OSError, TimeoutError):
        async with asyncio.timeout(ASK_S):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                writer.write(f"GET {path} HTTP/1.0\r\n\r\n".encode())
                return b" 200 " in await reader.readline()
            finally:
                writer.close()
    return False


class Supervisor:
    """Starts and replaces the workers of one machine. Call `run` once."""

    def __init__(self, config: RouterConfig, arguments: Sequence[str]) -> None:
        """Reserve the shared ports. Raises ConfigError if one is taken."""
        self._config = config
        self._holders = [
            reserve(config.host, config.port, "port"),
            reserve(config.host, config.grpc_port, "grpc_port"),
        ]
        http, grpc = (int(holder.getsockname()[1]) for holder in self._holders)
        self._ports = (http, grpc)
        self.workers = [
            Worker(index, [*arguments, *worker_flags(config, index, self._ports)])
            for index in range(config.workers)
        ]
        self._stopping = asyncio.Event()

    async def run(self) -> None:
        """Run the workers until a signal has ended all of them.

        Raises ConfigError if one cannot start."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        try:
            health = Health(SystemClock(), self._config.stall_s)
            async with health_port(health, self._config.host, self._config.health_port):
                await self._start(health)
                asking = asyncio.create_task(self._ask(), name="workers' health")
                await asyncio.gather(*(self._keep(worker) for worker in self.workers))
                asking.cancel()
        finally:
            for worker in self.workers:
                worker.signal(signal.SIGKILL)  # no effect on a worker that has ended
            for holder in self._holders:
                holder.close()

    def _on_signal(self, number: int) -> None:
        self._stopping.set()
        for worker in self.workers:
            worker.signal(number)

    async def _ask(self) -> None:
        """Ask every worker's health port every INTERVAL_S, until cancelled. Without a configured
        health port, return at once."""
        host = _LOOPBACK.get(self._config.host, self._config.host)
        while self._config.health_port is not None:
            await asyncio.gather(*(worker.ask(host) for worker in self.workers))
            await asyncio.sleep(INTERVAL_S)

    async def _start(self, health: Health) -> None:
        starts = [asyncio.create_task(worker.start()) for worker in self.workers]
        try:
            await asyncio.gather(*starts)
        except (ConfigError, TimeoutError) as error:
            for start in starts:
                start.cancel()
            if self._stopping.is_set():
                return
            raise ConfigError(f"a worker did not start: {error}", field="workers") from error
        health.started(
            lambda: all(worker.gets_on for worker in self.workers),
            lambda: any(worker.takes_work for worker in self.workers),
        )
        self._announce(health)

    async def _keep(self, worker: Worker) -> None:
        """Start a new process whenever the worker's ends, until the supervisor stops."""
        backoff = FIRST_BACKOFF_S
        while True:
            status = await worker.wait()
            if self._stopping.is_set():
                return
            log.error("worker %d ended with %d; another one is started", worker.index, status)
            try:
                async with asyncio.timeout(backoff):
                    await self._stopping.wait()
                return
            except TimeoutError:
                backoff = min(2 * backoff, LAST_BACKOFF_S)
            try:
                await worker.start()
                backoff = FIRST_BACKOFF_S
            except (ConfigError, TimeoutError) as error:
                log.error("worker %d: %s", worker.index, error)
                worker.signal(signal.SIGKILL)

    def _announce(self, health: Health) -> None:
        """Print one READY line for all workers, with each worker's own address."""
        host = self._config.host
        shown = f"[{host}]" if ":" in host else host
        ready = {
            "ready": True,
            "role": "router",
            "address": f"{shown}:{self._ports[0]}",
            "grpc_address": f"{shown}:{self._ports[1]}",
            "workers": [worker.ready["own_address"] for worker in self.workers],
            "admin_addresses": [worker.ready["admin_address"] for worker in self.workers],
            "health_port": health.port,
        }
        sys.stdout.write(json.dumps(ready) + "\n")
        sys.stdout.flush()


def end_with_stdin() -> None:
    """Watch standard input in a thread; at its end the supervisor is gone: SIGTERM this process."""

    def watch() -> None:
        while os.read(0, 4096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="supervisor", daemon=True).start()
