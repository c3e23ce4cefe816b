"""The processes of a benchmark: how they say that they are ready, and how it ends them: asked
first, killed if they do not."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
from typing import Any


def say_ready(**found: Any) -> None:
    """The JSON line of a program that is ready, on stdout: where it listens."""
    sys.stdout.write(json.dumps({"ready": True, **found}) + "\n")
    sys.stdout.flush()


async def stop(
    process: asyncio.subprocess.Process, patience_s: float, by: signal.Signals = signal.SIGTERM
) -> None:
    """Signal it, if it still runs, then `ended`."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):  # it has ended by itself
            process.send_signal(by)
    await ended(process, patience_s)


async def ended(process: asyncio.subprocess.Process, patience_s: float) -> None:
    """Wait until it has ended; what takes longer than `patience_s` is killed."""
    try:
        await asyncio.wait_for(process.wait(), patience_s)
    except TimeoutError:
        process.kill()
        await process.wait()
