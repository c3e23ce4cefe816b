"""kill -9 of each process at each stage of a request: 4 x 16 cases.

The process in which the stage lies stops itself there (failpoint, action stop: the kernel says T).
Then the victim is killed, whichever it is, and the stopped one goes on. So the kill hits the stage
exactly, also when another process is its victim.

A router's death is hidden from the clients of resumable requests, and cuts off that of a plain one.
"""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from baton.runtime.failpoints import DATA_STAGES, STAGES
from tests.chaos.cases import Case, World
from tests.chaos.cluster import PLAIN, ROLES, Cluster, Layout
from tests.chaos.counts import is_stopped
from tests.chaos.oracle import Terms, check_all
from tests.chaos.streams import Stream
from tests.system.processes import ServerProcess

VICTIMS = ("prefill", "decode", "router", "redis")
KINDS = ("greedy", "seeded", "samples", "penalties", "logprobs")
NUM_BESIDE = 2
AWAKE_S = 0.02
EARLY = 4  # tokens that the streams beside have shown when the fault comes
# Passages of stages that many steps make: the fault comes in mid-stream.
PASSAGES = {"p.mid_chunk": 4, "d.step_n": 8, "sampled_not_logged": 6, "logged_not_sent": 6}
READERS = ("prefill", "decode")  # of each other's memory, over lane shm
SHM = Layout(lanes="shm")
COPIED = Layout(lanes="shm", node_flags=("--no-kv-adopt",))  # pages read in place send no DATA
WHERE = {"p": "p", "kv": "p", "d": "d"}  # the role whose nodes pass a stage
IN_ROUTER = (
    "accepted", "logged", "sampled_not_logged", "logged_not_sent", "shown_not_logged", "finishing",
)  # fmt: skip
RESUMABLE_ONLY = "logged_not_sent"  # plain requests show first


def processes_of(cluster: Cluster, stage: str) -> tuple[str, ...]:
    """Those that may pass a stage."""
    return ("r0",) if stage in IN_ROUTER else cluster.nodes_of(WHERE[stage.partition(".")[0]])


def disarm_but(cluster: Cluster, stage: str, stopped: str) -> None:
    """Only the first that has come to the stage stays stopped: on a slow machine the other, busy
    with the streams beside, may have come there before it was told not to."""
    cluster.disarm()
    others = [cluster.servers[n] for n in processes_of(cluster, stage) if n != stopped]
    cluster.beside.add(asyncio.create_task(keep_awake(others)))


async def keep_awake(servers: Sequence[ServerProcess]) -> None:
    """Wake these whenever they are stopped. One SIGCONT would not do: who has read its plan and not
    yet stopped itself does so at any later moment, and with both nodes of a role nobody serves."""
    while True:
        for server in servers:
            if server.process.returncode is None and is_stopped(server.process.pid):
                server.signal(signal.SIGCONT)
        await asyncio.sleep(AWAKE_S)


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
    return fields.get(f"{victim}_node") or draw.choice(cluster.nodes_of(letter))


@dataclass(frozen=True, slots=True)
class Blow:
    """A kill to come: of whom, at which passage of which stage, of a request of which kind.
    `resumable`: that request; `beside`: one of those beside it."""

    victim: str
    stage: str
    passage: int
    kind: str
    resumable: bool
    beside: bool


@dataclass(frozen=True, slots=True)
class Struck:
    """What a blow left: the streams under way (its request's last), who is dead, the proofs."""

    streams: list[Stream]
    dead: str
    proofs: list[str]


async def strike(world: World, blow: Blow, name: str) -> Struck:
    """Begin the streams, stop whoever comes to the stage, kill the victim, wake the other."""
    cluster = world.cluster
    beside = [
        cluster.begin(world.specs["beside"], "beside", resumable=blow.beside and number > 0)
        for number in range(NUM_BESIDE)
    ]
    for stream in beside:
        await stream.at_least(EARLY)
    cluster.arm(processes_of(cluster, blow.stage), f"{blow.stage}:{blow.passage}:stop")
    resumable = blow.resumable or blow.stage == RESUMABLE_ONLY
    stream = cluster.begin(world.specs[blow.kind], name, resumable=resumable)
    stopped, line = await cluster.fired()
    proofs = [line, await cluster.stopped(stopped)]
    dead = await victim_of(cluster, blow.victim, stopped, stream, world.draw)
    disarm_but(cluster, blow.stage, stopped)
    proofs.append(await cluster.kill(dead))
    if dead != stopped:
        cluster.wake(stopped)
    return Struck([*beside, stream], dead, proofs)


async def kill_at(world: World, victim: str, stage: str) -> str:
    """One case. Returns the proofs."""
    hidden = victim == "router"  # from the clients of resumable requests
    kind = world.draw.choice(KINDS)
    blow = Blow(victim, stage, PASSAGES.get(stage, 1), kind, hidden, hidden)
    struck = await strike(world, blow, stage)
    streams = struck.streams
    await world.finish(streams)
    terms = Terms(cut=victim == "router", unlogged=victim == "redis")
    await check_all(world.cluster, streams, terms)
    told = f"{streams[-1].spec.name}, retries {max(s.retries for s in streams)}"
    return "; ".join([*struck.proofs, told])


def _case(victim: str, stage: str, layout: Layout = PLAIN, over: str = "") -> Case:
    async def run(world: World) -> str:
        return await kill_at(world, victim, stage)

    return Case("kill", f"{victim} at {stage}{over}", run, layout)


def kill_cases() -> list[Case]:
    cases = [_case(victim, stage) for victim in VICTIMS for stage in STAGES]
    for layout, stages in ((COPIED, DATA_STAGES), (SHM, ("kv.last", "kv.acked"))):
        cases += [_case(each, stage, layout, " over shm") for each in READERS for stage in stages]
    return cases
