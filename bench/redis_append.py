"""What an engine step costs the store: appends of 64 requests, on any kind of Redis.

`python -m bench.redis_append URL [URL ...]` prints, for each URL, the median milliseconds of a
step, plain and safe (a replica has it), and this process' CPU time for it.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from typing import Final

from baton.protocol.clock import SystemClock
from baton.runtime.redis.urls import check_redis_url, without_password
from baton.runtime.timing import Timing
from router.store.base import LogEntry
from router.store.redis_links import RedisServers
from router.store.redis_store import RedisStore

REQUESTS: Final = 64
STEPS: Final = 400
TIMEOUT_S: Final = 5.0


async def measure(url: str, *, safe: bool) -> tuple[float, float]:
    """Return the milliseconds of a step and of this process' CPU for it."""
    servers = RedisServers.of(url, TIMEOUT_S, int(safe))
    store = RedisStore(servers, "bench", Timing(), SystemClock(), TIMEOUT_S)
    await store.start()
    names = [f"bench-{time.time_ns()}-{number}" for number in range(REQUESTS)]
    for name in names:
        await store.claim(name)
    took: list[float] = []
    began = time.process_time()
    for position in range(STEPS):
        entries = [LogEntry(name, 1, position, (position,)) for name in names]
        at = time.perf_counter()
        await store.append(entries, safe=safe)
        took.append(time.perf_counter() - at)
    cpu_s = time.process_time() - began
    await store.release(names)
    await store.stop()
    return 1e3 * statistics.median(took), 1e3 * cpu_s / STEPS


async def _main(urls: list[str]) -> None:
    for url in urls:
        check_redis_url(url)
        for safe in (False, True):
            wall_ms, cpu_ms = await measure(url, safe=safe)
            kind = "safe" if safe else "plain"
            row = f"{without_password(url):60} {kind:5} {wall_ms:6.2f} ms, CPU {cpu_ms:5.2f} ms"
            sys.stdout.write(row + "\n")


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1:]))
