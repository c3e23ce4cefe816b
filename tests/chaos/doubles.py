"""Random double kills: a first victim at a random stage, a second one a random moment later.

Of two nodes of a role never both: then nobody could serve, and the honest answer is an error. Where
there are three (`pair`), the second victim is of the first one's role, if it can be the node that
the request has moved to. Each case prints its draw; the seed and the case's number repeat it.
"""

from __future__ import annotations

import asyncio
import random

from baton.runtime.failpoints import STAGES
from tests.chaos.cases import Case, World
from tests.chaos.cluster import NODES, ROLES, Layout
from tests.chaos.kills import IN_ROUTER, KINDS, PASSAGES, VICTIMS, Blow, Struck, strike
from tests.chaos.oracle import Terms, check_all

LONGEST_PAUSE_S = 0.8
WEIGHTS = (5, 5, 2, 2)  # of VICTIMS
RESUMABLE_SHARE = 0.5
PAIRS = 6  # of each role
THREE = Layout(nodes=("p0", "p1", "p2", "d0", "d1", "d2"))


def second_victim(first: str, draw: random.Random) -> str:
    """A process that may die after `first`: of another role."""
    role = first.rstrip("01")
    others = [name for name in (*NODES, "r0", "redis") if name.rstrip("01") != role]
    return draw.choice(others)


async def kill_twice(world: World) -> str:
    draw = world.draw
    [victim] = draw.choices(VICTIMS, WEIGHTS)
    stage = draw.choice(STAGES)
    passage = draw.randint(1, 2 * PASSAGES.get(stage, 1) - 1)
    kind, resumable = draw.choice(KINDS), draw.random() < RESUMABLE_SHARE
    struck = await strike(world, Blow(victim, stage, passage, kind, resumable, True), "double")
    pause_s = draw.uniform(0, LONGEST_PAUSE_S)
    await asyncio.sleep(pause_s)
    second = second_victim(struck.dead, draw)
    return await _kill_too(world, struck, second, f"{pause_s:.2f} s later")


async def kill_pair(world: World, role: str) -> str:
    """Two of three nodes of a role: the one that has the request, then one of the others."""
    draw = world.draw
    stage = draw.choice([stage for stage in STAGES if stage not in IN_ROUTER])
    passage = draw.randint(1, 2 * PASSAGES.get(stage, 1) - 1)
    blow = Blow(role, stage, passage, draw.choice(KINDS), draw.random() < RESUMABLE_SHARE, True)
    struck = await strike(world, blow, "pair")
    pause_s = draw.uniform(0, LONGEST_PAUSE_S)
    await asyncio.sleep(pause_s)
    left = [name for name in world.cluster.nodes_of(ROLES[role]) if name != struck.dead]
    fields = await world.cluster.request_fields(struck.streams[-1].stored_id)
    now_at = fields.get(f"{role}_node")
    second = now_at if now_at in left else draw.choice(left)
    return await _kill_too(world, struck, second, f"{pause_s:.2f} s later")


async def _kill_too(world: World, struck: Struck, second: str, when: str) -> str:
    """The second kill, and what must be true after both. Returns the proofs."""
    cluster, streams = world.cluster, struck.streams
    late = f"{when} {await cluster.kill(second)}"
    await world.finish(streams)
    dead = {struck.dead, second}
    terms = Terms(cut="r0" in dead, unlogged="redis" in dead)
    await check_all(cluster, streams, terms)
    word = "resumable" if streams[-1].resumable else "plain"
    told = f"{word} {streams[-1].spec.name}, retries {max(s.retries for s in streams)}"
    return "; ".join([*struck.proofs, late, told])


def double_cases(count: int) -> list[Case]:
    return [Case("double", f"double {number:03d}", kill_twice) for number in range(count)]


def pair_cases() -> list[Case]:
    def case(number: int, role: str) -> Case:
        return Case("pair", f"{role} {number:02d}", lambda w: kill_pair(w, role), THREE)

    return [case(number, role) for role in ("prefill", "decode") for number in range(PAIRS)]
