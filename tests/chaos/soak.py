"""The long run: a steady load, one request in a hundred sees a random process die, nothing drifts.

Sampled all along: resident memory, descriptors and threads of each process. r0 is never killed, so
its slopes are those of the whole run; nodes count from their last start.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections import defaultdict
from dataclasses import dataclass, field

from tests.chaos.cases import Case, World
from tests.chaos.clients import resident_bytes
from tests.chaos.cluster import NODES, Cluster
from tests.chaos.counts import descriptors_of, threads_of
from tests.chaos.oracle import Broken, Terms, check_all, check_stream
from tests.chaos.streams import Stream

AT_ONCE = 4
KILL_SHARE = 0.01  # of requests
SAMPLE_S = 5.0
WARM_UP = 0.25  # of a process' samples: pools, threads and arenas are made on demand
MIN_SAMPLES = 12
MAX_MEMORY_SLOPE = 2 << 20  # bytes per minute
MAX_COUNT_SLOPE = 1.0  # descriptors or threads per minute


@dataclass(frozen=True, slots=True)
class Sample:
    minute: float
    resident: int
    descriptors: int
    threads: int


@dataclass
class Drift:
    """What was sampled, by process: (name, pid)."""

    samples: dict[tuple[str, int], list[Sample]] = field(
        default_factory=lambda: defaultdict(list[Sample])
    )

    def take(self, cluster: Cluster, minute: float) -> None:
        for name in cluster.names:
            if cluster.alive(name):
                pid = cluster.pid(name)
                counts = descriptors_of(pid).total(), threads_of(pid).total()
                self.samples[name, pid].append(Sample(minute, resident_bytes(pid), *counts))

    def slopes(self) -> dict[str, tuple[float, float, float]]:
        """Bytes, descriptors and threads per minute, of each process that was there long enough."""
        found: dict[str, tuple[float, float, float]] = {}
        for (name, _), samples in self.samples.items():
            kept = samples[int(len(samples) * WARM_UP) :]
            if len(kept) < MIN_SAMPLES:
                continue
            minutes = [sample.minute for sample in kept]
            found[name] = (
                statistics.linear_regression(minutes, [s.resident for s in kept]).slope,
                statistics.linear_regression(minutes, [s.descriptors for s in kept]).slope,
                statistics.linear_regression(minutes, [s.threads for s in kept]).slope,
            )
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
        victim = draw.choice((*NODES, "redis"))
        async with self._one_at_a_time:
            await self.world.cluster.kill(victim)
            self.counts[f"kills of {victim}"] += 1
            await self.world.cluster.heal()


async def soak(world: World, minutes: float) -> str:
    began = time.monotonic()
    run, drift = Soak(world, began + 60 * minutes), Drift()

    async def watch() -> None:
        while time.monotonic() < run.until:
            drift.take(world.cluster, (time.monotonic() - began) / 60)
            await asyncio.sleep(SAMPLE_S)

    async with asyncio.TaskGroup() as group:
        group.create_task(watch())
        for _ in range(AT_ONCE):
            group.create_task(run.client(random.Random(world.draw.random())))
    await world.cluster.heal()
    await check_all(world.cluster, [])
    slopes = drift.slopes()
    shown = {
        name: f"{memory / 1024:+.0f} KiB, {fds:+.2f} fds, {threads:+.2f} threads per minute"
        for name, (memory, fds, threads) in slopes.items()
    }
    for name, (memory, fds, threads) in slopes.items():
        if memory > MAX_MEMORY_SLOPE or max(fds, threads) > MAX_COUNT_SLOPE:
            raise Broken(f"{name} drifts: {shown[name]}; {dict(run.counts)}")
    return f"{dict(run.counts)}; {shown}"


def soak_cases(minutes: float) -> list[Case]:
    return [Case("soak", f"{minutes:g} minutes", lambda w: soak(w, minutes))] if minutes else []
