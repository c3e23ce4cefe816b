"""Random double kills: a first victim at a random stage, a second one a random moment later.

Never both nodes of one role: then nobody could serve, and the honest answer is an error. Each case
prints its draw; the seed and the case's number repeat it.
"""

from __future__ import annotations

import asyncio
import random

from baton.failpoints import STAGES
from tests.chaos.cases import Case, World
from tests.chaos.cluster import NODES
from tests.chaos.kills import KINDS, PASSAGES, VICTIMS, Blow, strike
from tests.chaos.oracle import Terms, check_all

LONGEST_PAUSE_S = 0.8
WEIGHTS = (5, 5, 2, 2)  # of VICTIMS
RESUMABLE_SHARE = 0.5


def second_victim(first: str, draw: random.Random) -> str:
    """A process that may die after `first`: of another role."""
    role = first.rstrip("01")
    others = [name for name in (*NODES, "r0", "redis") if name.rstrip("01") != role]
    return draw.choice(others)


async def kill_twice(world: World) -> str:
    cluster, draw = world.cluster, world.draw
    [victim] = draw.choices(VICTIMS, WEIGHTS)
    stage = draw.choice(STAGES)
    passage = draw.randint(1, 2 * PASSAGES.get(stage, 1) - 1)
    kind, resumable = draw.choice(KINDS), draw.random() < RESUMABLE_SHARE
    struck = await strike(world, Blow(victim, stage, passage, kind, resumable, True), "double")
    streams, first = struck.streams, struck.dead
    pause_s = draw.uniform(0, LONGEST_PAUSE_S)
    await asyncio.sleep(pause_s)
    second = second_victim(first, draw)
    late = f"{pause_s:.2f} s later {await cluster.kill(second)}"
    await world.finish(streams)
    dead = {first, second}
    terms = Terms(cut="r0" in dead, unlogged="redis" in dead)
    await check_all(cluster, streams, terms)
    word = "resumable" if resumable else "plain"
    told = f"{word} {streams[-1].spec.name}, retries {max(s.retries for s in streams)}"
    return "; ".join([*struck.proofs, late, told])


def double_cases(count: int) -> list[Case]:
    return [Case("double", f"double {number:03d}", kill_twice) for number in range(count)]
