"""Real processes for tests that kill: router and nodes, found by their READY lines.

They are `python -m ...`, or forks of a server that has imported everything (forked.py).

Every process is started on loopback with free ports and ends with the `async with` block.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import redis.asyncio as aredis

from baton.protocol.handles import NodeRecord
from tests.system.forked import ForkedProcess

START_S = 180.0  # importing torch on a busy machine
STOP_S = 60.0


def is_idle(record: NodeRecord) -> bool:
    """It holds nothing: free == total."""
    load = record.load
    busy = load.running + load.waiting + load.fetching + load.export_bytes
    return busy == 0 and load.free_blocks == load.total_blocks


async def fields_of(client: aredis.Redis, pattern: str) -> dict[str, str]:
    """The record of the one request whose key is like `pattern`."""
    [key] = [key async for key in client.scan_iter(pattern)]
    fields: Any = await client.hgetall(key)
    return {name.decode().removeprefix("f:"): value.decode() for name, value in fields.items()}


@dataclass(slots=True)
class ServerProcess:
    """One running program; `ready` is its READY line."""

    name: str
    process: asyncio.subprocess.Process | ForkedProcess
    ready: dict[str, Any]
    log: Path

    @property
    def address(self) -> str:
        return str(self.ready["address"])

    @property
    def addresses(self) -> list[str]:
        """Of each rank of a data-parallel group, else of the one node."""
        return [str(rank["address"]) for rank in self.ready.get("ranks", [self.ready])]

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    async def kill(self) -> None:
        """kill -9, and the proof that it is gone."""
        self.process.kill()
        assert await asyncio.wait_for(self.process.wait(), STOP_S) == -signal.SIGKILL

    async def stop(self) -> int:
        """SIGTERM; SIGKILL if it does not end. Returns the exit status. Twice is safe."""
        if self.process.returncode is None:
            self.process.terminate()
        try:
            return await asyncio.wait_for(self.process.wait(), STOP_S)
        except TimeoutError:
            self.process.kill()
            return await self.process.wait()


@dataclass(slots=True)
class Processes:
    """A cluster of real processes around one model; `redis_url` None = nodes given by address.
    `model` None: the flags of each process say which."""

    model: Path | None
    directory: Path
    redis_url: str | None = None
    forked: bool = False  # by a server that has imported all (forked.py): quicker, no prefix
    running: list[ServerProcess] = field(default_factory=list[ServerProcess])

    async def __aenter__(self) -> Processes:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await asyncio.gather(*(server.stop() for server in reversed(self.running)))

    async def nodes(
        self, num_prefill: int, num_decode: int, flags: Sequence[str] = ()
    ) -> tuple[list[ServerProcess], list[ServerProcess]]:
        """Start prefill and decode nodes side by side."""
        starts = [self.start("prefill_node", f"p{i}", flags) for i in range(num_prefill)]
        starts += [self.start("decode_node", f"d{i}", flags) for i in range(num_decode)]
        servers = await asyncio.gather(*starts)
        return list(servers[:num_prefill]), list(servers[num_prefill:])

    async def router(
        self,
        prefill: Sequence[ServerProcess],
        decode: Sequence[ServerProcess],
        flags: Sequence[str] = (),
    ) -> ServerProcess:
        given: list[str] = []
        if self.redis_url is None:
            for server in prefill:
                given += [word for at in server.addresses for word in ("--prefill-node", at)]
            for server in decode:
                given += [word for at in server.addresses for word in ("--decode-node", at)]
        ports = ["--port", "0", "--grpc-port", "0", "--drain-s", "0"]
        return await self.start("router", "router", [*ports, *given, *flags])

    async def start(
        self,
        module: str,
        name: str,
        flags: Sequence[str] = (),
        environ: Mapping[str, str] | None = None,
        prefix: Sequence[str] = (),
    ) -> ServerProcess:
        """Start `module` and wait for its READY line. `environ`: variables of its own;
        `prefix`: words before the command `python -m module`, which is then not forked.

        Raises RuntimeError with its log.
        """
        model = [] if self.model is None else ["--model", str(self.model)]
        given = [*model, *flags]
        if self.redis_url is not None:
            given += ["--redis-url", self.redis_url]
        if module != "router":
            given += ["--node-id", name]
        log = self.directory / f"{name}-{len(self.running)}.log"
        own = {**os.environ, "OMP_NUM_THREADS": "1", **(environ or {})}
        process = (
            ForkedProcess(module, given, own, log)
            if self.forked and not prefix
            else await _executed([*prefix, sys.executable, "-m", module, *given], own, log)
        )
        server = ServerProcess(name, process, {}, log)
        self.running.append(server)
        assert process.stdout is not None, "it was given a pipe"
        async with asyncio.timeout(START_S):
            async for line in process.stdout:
                if line.startswith(b"{"):
                    server.ready = json.loads(line)
                    return server
        raise RuntimeError(f"{name} did not start:\n{log.read_text()[-4000:]}")


async def _executed(
    command: Sequence[str], environ: Mapping[str, str], log: Path
) -> asyncio.subprocess.Process:
    with log.open("wb") as stream:
        return await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=stream,
            env=environ,
        )
