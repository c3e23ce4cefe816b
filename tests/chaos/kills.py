"""kill -9 of each process at each stage of a request: 4 x 15 cases.

The process in which the stage lies stops itself there (failpoint, action stop: the kernel says T).
Then the victim is killed, whichever it is, and the stopped one goes on. So the kill hits the stage
exactly, also when another process is its victim.

A router's death is hidden from the clients of resumable requests, and cuts off that of a plain one.
"""

from __future__ import annotations

import random

from baton.failpoints import STAGES
from tests.chaos.cases import Case, World
from tests.chaos.cluster import ROLES, Cluster
from tests.chaos.oracle import Terms, check_all
from tests.chaos.streams import Stream

VICTIMS = ("prefill", "decode", "router", "redis")
KINDS = ("greedy", "seeded", "samples", "penalties", "logprobs")
NUM_BESIDE = 2
EARLY = 4  # tokens that the streams beside have shown when the fault comes
# Passages of stages that many steps make: the fault comes in mid-stream.
PASSAGES = {"p.mid_chunk": 4, "d.step_n": 8, "sampled_not_logged": 6, "logged_not_sent": 6}
WHERE = {"p": ("p0", "p1"), "kv": ("p0", "p1"), "d": ("d0", "d1")}
IN_ROUTER = ("accepted", "logged", "sampled_not_logged", "logged_not_sent", "finishing")


def processes_of(stage: str) -> tuple[str, ...]:
    """Those that may pass a stage."""
    return ("r0",) if stage in IN_ROUTER else WHERE[stage.partition(".")[0]]


def disarm_but(cluster: Cluster, stage: str, stopped: str) -> None:
    """Only the first that has come to the stage stays stopped: on a slow machine the other, busy
    with the streams beside, may have come there before it was told not to."""
    cluster.disarm()
    for name in processes_of(stage):
        if name != stopped:
            cluster.wake(name)


async def victim_of(
    cluster: Cluster, victim: str, stopped: str, stream: Stream, draw: random.Random
) -> str:
    """The process to kill: where the request is, else where it may go."""
    if victim == "redis":
        return "redis"
    letter = ROLES[victim]
    if letter == "r":
        return "r0"
    if stopped.startswith(letter):
        return stopped
    fields = await cluster.request_fields(stream.stored_id)
    return fields.get(f"{victim}_node") or draw.choice((f"{letter}0", f"{letter}1"))


async def kill_at(world: World, victim: str, stage: str) -> str:
    """One case. Returns the proofs."""
    cluster, draw = world.cluster, world.draw
    hidden = victim == "router"  # from the clients of resumable requests
    beside = [
        cluster.begin(world.specs["beside"], "beside", resumable=hidden and number > 0)
        for number in range(NUM_BESIDE)
    ]
    for stream in beside:
        await stream.at_least(EARLY)
    cluster.arm(processes_of(stage), f"{stage}:{PASSAGES.get(stage, 1)}:stop")
    stream = cluster.begin(world.specs[draw.choice(KINDS)], stage, resumable=hidden)
    stopped, line = await cluster.fired()
    proofs = [line, await cluster.stopped(stopped)]
    target = await victim_of(cluster, victim, stopped, stream, draw)
    disarm_but(cluster, stage, stopped)
    proofs.append(await cluster.kill(target))
    if target != stopped:
        cluster.wake(stopped)
    streams = [*beside, stream]
    await world.finish(streams)
    terms = Terms(cut=victim == "router", unlogged=victim == "redis")
    await check_all(cluster, streams, terms)
    proofs.append(f"{stream.spec.name}, retries {max(s.retries for s in streams)}")
    return "; ".join(proofs)


def _case(victim: str, stage: str) -> Case:
    async def run(world: World) -> str:
        return await kill_at(world, victim, stage)

    return Case("kill", f"{victim} at {stage}", run)


def kill_cases() -> list[Case]:
    return [_case(victim, stage) for victim in VICTIMS for stage in STAGES]
