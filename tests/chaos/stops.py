"""SIGSTOP and SIGCONT: who does not answer is given up; who comes back finds itself fenced.

A stopped process looks exactly like a stalled one, and its sockets stay open: nothing but the lack
of an answer tells. `zombie` cases wake it when the request has long been finished by others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from tests.chaos.cases import Case, World
from tests.chaos.kills import EARLY, disarm_but, processes_of
from tests.chaos.oracle import Broken, Terms, check_all
from tests.chaos.streams import Stream, finish_all

MID_STREAM = 12  # tokens shown when a process is stopped without a failpoint


async def _check(world: World, streams: list[Stream], proofs: list[str], terms: Terms) -> str:
    await world.cluster.heal()
    await check_all(world.cluster, streams, terms)
    proofs.append(f"retries {max(stream.retries for stream in streams)}")
    return "; ".join(proofs)


async def _under_way(world: World, kind: str = "seeded") -> tuple[list[Stream], Stream]:
    cluster = world.cluster
    beside = cluster.begin(world.specs["beside"], "beside")
    await beside.at_least(EARLY)
    stream = cluster.begin(world.specs[kind], "stop")
    await stream.at_least(MID_STREAM)
    return [beside, stream], stream


async def pause(world: World, name: str, seconds: float) -> str:
    """Stop the request's node (`name`: prefill_node, decode_node), or a process, for a while."""
    cluster = world.cluster
    streams, stream = await _under_way(world, "beside")
    target = (
        name if name in ("r0", "redis") else (await cluster.request_fields(stream.stored_id))[name]
    )
    if target == "redis":
        before = await cluster.stop_redis()
    else:
        cluster.stop(target)
        before = await cluster.stopped(target)
    shown = stream.num_tokens
    await asyncio.sleep(seconds)
    proofs = [f"{before} for {seconds} s, {stream.num_tokens - shown} tokens shown meanwhile"]
    if target == "redis":
        cluster.wake_redis()
    cluster.wake_all()
    await finish_all(streams)
    return await _check(world, streams, proofs, Terms(unlogged=target in ("redis", "r0")))


async def zombie(world: World, stage: str, passage: int = 1) -> str:
    """Stopped at a stage, awake when others have finished its work. The epoch must fence it."""
    cluster = world.cluster
    beside = cluster.begin(world.specs["beside"], "beside")
    await beside.at_least(EARLY)
    cluster.arm(processes_of(cluster, stage), f"{stage}:{passage}:stop")
    stream = cluster.begin(
        world.specs[world.draw.choice(("greedy", "seeded", "samples"))], "zombie"
    )
    stopped, line = await cluster.fired()
    proofs = [line, await cluster.stopped(stopped)]
    disarm_but(cluster, stage, stopped)
    await finish_all([beside, stream])
    proofs.append(f"woken after the end, {await cluster.stopped(stopped)}")
    if max(beside.retries, stream.retries) == 0:
        raise Broken("nobody noticed that the process was stopped")
    cluster.wake(stopped)
    return await _check(world, [beside, stream], proofs, Terms())


def stop_cases() -> list[Case]:
    def case(name: str, run: Callable[[World], Awaitable[str]]) -> Case:
        return Case("stop", name, run)

    cases = [
        case(f"{name} stopped for {seconds} s", lambda w, n=name, s=seconds: pause(w, n, s))
        for name in ("decode_node", "prefill_node", "r0", "redis")
        for seconds in (0.3, 3.0)
    ]
    cases.append(case("r0 stopped beyond its lease", lambda w: pause(w, "r0", 8.0)))
    cases += [
        case(f"zombie at {stage}", lambda w, s=stage, n=passage: zombie(w, s, n))
        for stage, passage in (
            ("p.queued", 1), ("p.mid_chunk", 4), ("p.done", 1), ("kv.first", 1), ("kv.half", 1),
            ("kv.last", 1), ("d.reserved", 1), ("d.step1", 1), ("d.step_n", 8),
        )
    ]  # fmt: skip
    return cases
