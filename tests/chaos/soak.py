"""The long run: a steady load, one request in a hundred sees a random process die, nothing drifts.

Sampled all along: resident memory, descriptors, threads and asyncio tasks of one process of each
role. Those are never killed, so their slopes are those of the whole run; they see all others die.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Final

import httpx

from tests.chaos.cases import Case, World
from tests.chaos.clients import resident_bytes
from tests.chaos.cluster import Cluster
from tests.chaos.oracle import Broken, Terms, check_all, check_stream
from tests.chaos.streams import Stream

AT_ONCE = 4
KILL_SHARE = 0.01  # of requests
SAMPLE_S = 5.0
# Of the samples. Pools, threads and arenas are made on demand, and a prefill node's allocator takes
# some 20 MiB in its first 6,000 requests, most of that early, and then nothing more
# (docs/log/archive.md). Half an hour is 2,000 to 6,000 requests: what the second half sees of it is
# below the limit.
WARM_UP = 0.5
JUDGED_MINUTES = 10.0  # of a shorter run one request more or less is most of a slope
SURVIVORS = ("p0", "d0", "r0")
VICTIMS = ("p1", "d1", "r1", "redis")
KIB: Final = 1 << 10
# Of a survivor, per minute.
LIMITS: Final[dict[str, float]] = {"KiB": 1024, "descriptors": 1.0, "threads": 1.0, "tasks": 1.0}


@dataclass
class Drift:
    """What was sampled: (minute, value) by process, and by what LIMITS names."""

    samples: dict[tuple[str, str], list[tuple[float, float]]] = field(
        default_factory=lambda: defaultdict(list[tuple[float, float]])
    )

    async def take(self, cluster: Cluster, minute: float) -> None:
        for name in SURVIVORS:
            try:
                held = await cluster.vitals(name)
            except httpx.TimeoutException:  # the machine is crowded: a sample less
                continue
            values = (
                resident_bytes(held.pid) / KIB,
                held.descriptors.total(),
                held.threads.total(),
                held.tasks.total(),
            )
            for what, value in zip(LIMITS, values, strict=True):
                self.samples[name, what].append((minute, value))

    def slopes(self) -> dict[tuple[str, str], float]:
        """Per minute, once all was warm."""
        found: dict[tuple[str, str], float] = {}
        for key, samples in self.samples.items():
            minutes, values = zip(*samples[int(len(samples) * WARM_UP) :], strict=True)
            found[key] = statistics.linear_regression(minutes, values).slope
        return found


@dataclass
class Soak:
    """The load of one run; `counts` is what happened."""

    world: World
    until: float
    counts: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    def __post_init__(self) -> None:
        self._one_at_a_time = asyncio.Lock()

    async def client(self, draw: random.Random) -> None:
        """One request after the other, each checked when it ends."""
        cluster = self.world.cluster
        while time.monotonic() < self.until:
            stream = cluster.begin(self.world.specs[draw.choice(sorted(self.world.specs))], "soak")
            if draw.random() < KILL_SHARE:
                await self._kill(stream, draw)
            await stream.finish()
            check_stream(stream, Terms())
            self.counts["requests"] += 1
            self.counts["retries"] += stream.retries

    async def _kill(self, stream: Stream, draw: random.Random) -> None:
        await stream.at_least(draw.randrange(1, 40))
        victim = draw.choice(VICTIMS)
        async with self._one_at_a_time:
            await self.world.cluster.kill(victim)
            self.counts[f"kills of {victim}"] += 1
            await self.world.cluster.heal()


async def soak(world: World, minutes: float) -> str:
    began = time.monotonic()
    run, drift = Soak(world, began + 60 * minutes), Drift()

    async def watch() -> None:
        while time.monotonic() < run.until:
            await drift.take(world.cluster, (time.monotonic() - began) / 60)
            await asyncio.sleep(SAMPLE_S)

    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(watch())
            for _ in range(AT_ONCE):
                group.create_task(run.client(random.Random(world.draw.random())))
    except ExceptionGroup as several:
        raise several.exceptions[0] from several
    await world.cluster.heal()
    await check_all(world.cluster, [])
    slopes = drift.slopes()
    shown = ", ".join(f"{name} {slope:+.2f} {what}" for (name, what), slope in slopes.items())
    told = f"{dict(run.counts)}; per minute: {shown}"
    if minutes < JUDGED_MINUTES:
        return f"{told}; too short to judge the slopes"
    if any(slope > LIMITS[what] for (_, what), slope in slopes.items()):
        raise Broken(f"something drifts: {told}")
    return told


def soak_cases(minutes: float) -> list[Case]:
    return [Case("soak", f"{minutes:g} minutes", lambda w: soak(w, minutes))] if minutes else []
