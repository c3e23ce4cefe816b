"""Starts `baton up` as a child process for comparisons, and stops it again.

The launcher prints one JSON line if stdout is not a terminal; the benchmark needs only that line.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from baton.protocol.errors import ConfigError
from bench.children import stop

START_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 40.0
LAST_LINES = 30


@asynccontextmanager
async def cluster(
    flags: Sequence[str], environ: Mapping[str, str] | None = None
) -> AsyncGenerator[dict[str, Any], None]:
    """Run a cluster; yield the fields of its ready line (`url`, `model`, ...). `environ`: instead
    of this process' own.

    Raises ConfigError, with the launcher's last lines, if it does not come up.
    """
    command = [sys.executable, "-m", "deploy", "up", "--port", "0", "--no-warm-up", *flags]
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env=environ,
    )
    assert process.stdout is not None, "it was given a pipe"
    drain: asyncio.Task[None] | None = None
    try:
        ready = await asyncio.wait_for(_wait_ready(process.stdout), START_TIMEOUT_S)
        drain = asyncio.create_task(_drain(process.stdout))
        yield ready
    finally:
        if drain is None:
            drain = asyncio.create_task(_drain(process.stdout))
        await stop(process, STOP_TIMEOUT_S, signal.SIGINT)
        await drain


async def _wait_ready(stdout: asyncio.StreamReader) -> dict[str, Any]:
    lines: list[str] = []
    async for raw in stdout:
        line = raw.decode(errors="replace").rstrip()
        lines.append(line)
        if line.startswith("{"):
            try:
                fields = json.loads(line)
            except json.JSONDecodeError:
                continue  # the body of the printed curl command may look like this
            if fields.get("ready") is True:
                return fields
    raise ConfigError("`baton up` ended:\n" + "\n".join(lines[-LAST_LINES:]))


async def _drain(stdout: asyncio.StreamReader) -> None:
    """Keep the pipe empty, so that the launcher never blocks on it."""
    async for _ in stdout:
        pass
