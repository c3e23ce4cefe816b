"""Redis restarted, paused, full, read-only, emptied, its clients cut off: streams go on.

A plain request is never worse off than its token log: where the store answers late but does answer,
the log must be whole; where it cannot, the stream must be.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from redis.exceptions import RedisError

from tests.chaos.cases import Case, World
from tests.chaos.cluster import Cluster
from tests.chaos.oracle import Broken, Terms, check_all
from tests.chaos.streams import finish_all
from tests.waiting import eventually

MID_STREAM = 12
AWAY_S = 2.0
NOTICE_S = 10.0  # a stream is under way, and each of its tokens calls a script
PAUSED_SHARE = 0.8  # at least, of the pause: the PING leaves after it has begun
UNLOGGED = Terms(unlogged=True)
STRICT = Terms()
Trouble = Callable[[Cluster], Coroutine[Any, Any, str]]


async def _refused(cluster: Cluster) -> str:
    """What Redis says to a write. Raises Broken if it takes it."""
    try:
        await cluster.store.set("{pd}:chaos", "x")
    except RedisError as error:
        return f"writes answered with {str(error)[:40]!r}"
    raise Broken("Redis takes writes: nothing was broken")


async def restarted(cluster: Cluster) -> str:
    proof = await cluster.kill("redis")
    cluster.start_redis()
    return f"{proof}, restarted with its data"


async def emptied(cluster: Cluster) -> str:
    count = await cluster.store.dbsize()
    await cluster.store.flushall()
    return f"{count} keys gone"


async def cut_off(cluster: Cluster) -> str:
    count = await cluster.store.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    if not count:
        raise Broken("no client was cut off")
    return f"{count} connections killed"


async def without_scripts(cluster: Cluster) -> str:
    """At once with the counts before and after it, or the routers have loaded some again."""
    refused = await _unknown_scripts(cluster)
    async with cluster.store.pipeline(transaction=True) as calls:
        calls.info("memory")
        calls.script_flush()
        calls.info("memory")
        before, _, after = await calls.execute()
    known, left = (held["number_of_cached_scripts"] for held in (before, after))
    if not known or left:
        raise Broken(f"Redis knew {known} scripts before the flush, {left} after it")

    async def look() -> int:
        return await _unknown_scripts(cluster) - refused

    return f"{known} scripts forgotten, {await eventually(look, NOTICE_S)} calls answered NOSCRIPT"


async def _unknown_scripts(cluster: Cluster) -> int:
    """How many calls Redis has refused because it did not know their script."""
    errors = await cluster.store.info("errorstats")
    return int(errors.get("errorstat_NOSCRIPT", {"count": 0})["count"])


async def _paused(cluster: Cluster, seconds: float) -> str:
    await cluster.store.client_pause(round(seconds * 1000), all=True)
    loop = asyncio.get_running_loop()
    before = loop.time()
    await cluster.store.ping()
    took = loop.time() - before
    if took < PAUSED_SHARE * seconds:
        raise Broken(f"PING took {took:.2f} s: Redis was not paused for {seconds:g} s")
    return f"PING took {took:.1f} s"


async def full(cluster: Cluster) -> str:
    await cluster.store.config_set("maxmemory", 1)
    try:
        proof = await _refused(cluster)
        await asyncio.sleep(AWAY_S)
    finally:
        await cluster.store.config_set("maxmemory", 0)
    return f"{proof} for {AWAY_S} s"


async def read_only(cluster: Cluster) -> str:
    await cluster.store.execute_command("REPLICAOF", "127.0.0.1", "1")
    try:
        proof = await _refused(cluster)
        await asyncio.sleep(AWAY_S)
    finally:
        await cluster.store.execute_command("REPLICAOF", "NO", "ONE")
    return f"{proof} for {AWAY_S} s"


async def in_mid_stream(world: World, trouble: Trouble, terms: Terms) -> str:
    """One stream under way, one that comes in while it happens, one that comes after."""
    cluster = world.cluster
    beside = cluster.begin(world.specs["beside"], "beside")
    await beside.at_least(MID_STREAM)
    shown = beside.num_tokens
    task = asyncio.create_task(trouble(cluster))
    during = cluster.begin(world.specs[world.draw.choice(("seeded", "samples"))], "during")
    proof = await task
    meanwhile = beside.num_tokens - shown
    after = cluster.begin(world.specs["greedy"], "after")
    streams = [beside, during, after]
    await finish_all(streams)
    await cluster.heal()
    await check_all(cluster, streams, terms)
    return f"{proof}; {meanwhile} tokens shown meanwhile"


def redis_cases() -> list[Case]:
    troubles: list[tuple[str, Trouble, Terms]] = [
        ("restarted", restarted, UNLOGGED),
        ("emptied", emptied, UNLOGGED),
        ("cuts off its clients", cut_off, UNLOGGED),
        ("forgets its scripts", without_scripts, STRICT),
        ("paused for 1.5 s", lambda c: _paused(c, 1.5), STRICT),
        ("paused for 4 s", lambda c: _paused(c, 4.0), UNLOGGED),
        ("full", full, UNLOGGED),
        ("read-only", read_only, UNLOGGED),
    ]
    return [
        Case("redis", f"Redis {name}", lambda w, t=trouble, s=terms: in_mid_stream(w, t, s))
        for name, trouble, terms in troubles
    ]
