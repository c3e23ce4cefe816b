"""What a script costs the router: ScriptQueue beside redis.asyncio's pipeline, in turns.

`python -m bench.redis_scripts` prints microseconds of this process' CPU per script, the median of
ROUNDS, for turns of the event loop in which 1, 4 or 16 requests ask for a script. Redis is real.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

from redis.asyncio import Redis

from baton.protocol.clock import SystemClock
from bench.router_processes import redis
from router.store.patience import Patience
from router.store.redis_queue import ScriptQueue

ROUNDS: Final = 7
TURNS: Final = 400
ARGUMENTS: Final = ("1", "0", "7", "3", "17,18,19", "")


async def measure(url: str) -> dict[int, tuple[float, float]]:
    """Return, by scripts per turn, the microseconds per script with the queue and with a
    pipeline.
    """
    client = Redis.from_url(url)
    script = client.register_script("return ARGV[1]")
    queue = ScriptQueue(client, Patience(SystemClock(), 5.0, 5.0))

    async def queued(count: int) -> None:
        await asyncio.gather(*(queue.run(script, ["key"], ARGUMENTS) for _ in range(count)))

    async def piped(count: int) -> None:
        pipeline = client.pipeline(transaction=False)
        for _ in range(count):
            pipeline.evalsha(script.sha, 1, "key", *ARGUMENTS)
        await pipeline.execute()

    await script(keys=["key"], args=ARGUMENTS)  # loads it
    found: dict[int, tuple[float, float]] = {}
    for count in (1, 4, 16):
        rounds = [
            (await _per_script(queued, count), await _per_script(piped, count))
            for _ in range(ROUNDS)
        ]
        ours, theirs = zip(*rounds, strict=True)
        found[count] = statistics.median(ours), statistics.median(theirs)
    await queue.stop()
    await client.aclose()
    return found


async def _per_script(turn: Callable[[int], Awaitable[None]], count: int) -> float:
    began = time.process_time()
    for _ in range(TURNS):
        await turn(count)
    return (time.process_time() - began) / TURNS / count * 1e6


async def _main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        async with redis(Path(folder), os.sched_getaffinity(0)) as url:
            if url is None:
                sys.exit("there is no redis-server here")
            for count, (ours, theirs) in (await measure(url)).items():
                row = f"{count:3} per turn: queue {ours:5.1f} us, pipeline {theirs:5.1f} us"
                sys.stdout.write(row + "\n")


if __name__ == "__main__":
    asyncio.run(_main())
