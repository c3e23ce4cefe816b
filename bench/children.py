"""The processes of a benchmark: how they announce that they are ready, and how they are ended.

A process is first asked to end, and killed if it does not.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
from typing import Any


def say_ready(**found: Any) -> None:
    """Print the JSON line of a program that is ready, with what it has to tell."""
    sys.stdout.write(json.dumps({"ready": True, **found}) + "\n")
    sys.stdout.flush()


async def stop(
    process: asyncio.subprocess.Process, patience_s: float, by: signal.Signals = signal.SIGTERM
) -> None:
    """Send a signal to the process if it still runs, then wait for its end."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):  # it has ended by itself
            process.send_signal(by)
    await ended(process, patience_s)


async def ended(process: asyncio.subprocess.Process, patience_s: float) -> None:
    """Wait until the process has ended; after `patience_s` kill it."""
    try:
        await asyncio.wait_for(process.wait(), patience_s)
    except TimeoutError:
        process.kill()
        await process.wait()
