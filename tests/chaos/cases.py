"""What a case is, and how a run of many goes: same layout, same cluster, oracle after each."""

from __future__ import annotations

import random
import tempfile
import time
import traceback
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from deploy.redis_server import RedisServer
from tests.chaos.cluster import PLAIN, Cluster, Layout
from tests.chaos.oracle import check_counts
from tests.chaos.streams import Spec, Stream, finish_all


@dataclass(frozen=True)
class World:
    """What a case works with. `draw`: seeded by the run's seed and the case's name."""

    cluster: Cluster
    specs: Mapping[str, Spec]
    draw: random.Random

    async def finish(self, streams: Sequence[Stream]) -> None:
        """All to their ends, and the cluster whole again. Plain ones end with what is there: that
        proves that they need nobody who died. Resumable ones may need Redis, to go on."""
        await finish_all([stream for stream in streams if not stream.resumable])
        await self.cluster.heal()
        await finish_all([stream for stream in streams if stream.resumable])


@dataclass(frozen=True)
class Case:
    """`run` injects, checks, and returns the proof that the fault happened; it raises if not.
    `skip`: why it cannot run here."""

    family: str
    name: str
    run: Callable[[World], Awaitable[str]]
    layout: Layout = PLAIN
    skip: str = ""


@dataclass(frozen=True)
class Outcome:
    case: Case
    seconds: float
    proof: str = ""
    error: str = ""

    @property
    def skipped(self) -> bool:
        return bool(self.case.skip)

    @property
    def ok(self) -> bool:
        """Nothing says that it is broken; also of what was skipped."""
        return not self.error

    @property
    def word(self) -> str:
        return "skipped" if self.skipped else "ok" if self.ok else "FAILED"

    @property
    def detail(self) -> str:
        return self.case.skip or self.proof or self.error


@dataclass(frozen=True)
class Ground:
    """What all cases of a run stand on."""

    model: Path
    specs: Mapping[str, Spec]
    directory: Path
    redis_binary: Path
    seed: int


async def run_cases(ground: Ground, cases: Sequence[Case]) -> AsyncGenerator[Outcome, None]:
    """Each case in its turn; a cluster that a failed case leaves behind is thrown away. Those that
    cannot run come first."""
    for case in cases:
        if case.skip:
            yield Outcome(case, 0.0)
    left = [case for case in cases if not case.skip]
    while left:
        layout = left[0].layout
        place = ground.directory / f"cluster-{len(cases) - len(left):03d}"
        with (
            tempfile.TemporaryDirectory(prefix="baton-chaos-redis-") as data,
            RedisServer(ground.redis_binary, Path(data)) as redis,
        ):
            try:
                cluster = await Cluster(ground.model, place, redis, layout).__aenter__()
            except Exception as error:  # noqa: BLE001 - the run goes on with the next case
                yield Outcome(left.pop(0), 0.0, error=f"the cluster did not start: {error!r}")
                continue
            try:
                while left and left[0].layout == layout:
                    outcome = await _run_one(ground, cluster, left.pop(0))
                    yield outcome
                    if not outcome.ok:
                        break
            finally:
                await cluster.__aexit__(None, None, None)


async def _run_one(ground: Ground, cluster: Cluster, case: Case) -> Outcome:
    draw = random.Random(f"{ground.seed} {case.family} {case.name}")
    began = time.monotonic()
    try:
        await cluster.heal()
        proof = await case.run(World(cluster, ground.specs, draw))
        await check_counts(cluster)
    except Exception as error:  # noqa: BLE001 - a case may fail of anything; the report says of what
        frames = traceback.extract_tb(error.__traceback__)
        place = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
        text = f"{type(error).__name__}: {error} ({place}; logs in {cluster.directory})"
        return Outcome(case, time.monotonic() - began, error=text)
    return Outcome(case, time.monotonic() - began, proof)
