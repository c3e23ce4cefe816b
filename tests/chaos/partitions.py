"""Partitions of real networks: a host per node (hosts.py), its cable pulled, or two kept apart.

Unlike a proxy's black hole everything on that host is gone at once, below TCP: sessions, KV lanes,
pings. Redis stays in reach of all (a Unix socket), so records of the lost stay fresh: nobody may
believe them. Each case proves by a connection that is not made that the network is parted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from tests.chaos.cases import Case, World
from tests.chaos.cluster import Layout
from tests.chaos.hosts import Hosts, obstacle
from tests.chaos.kills import EARLY
from tests.chaos.oracle import Broken, check_all
from tests.chaos.streams import Stream, finish_all

HOSTS = Layout(hosts=True, lanes="stream")
MID_STREAM = 12
HOLD_MS = 700  # an exporter waits so long in the middle of a transfer: time to part it
AWHILE_S = 3.0


async def _proof(world: World, target: str, source: str | None = None) -> str:
    hosts = _hosts(world)
    port = int(str(world.cluster.servers[target].ready["address"]).rpartition(":")[2])
    if await hosts.reaches(target, port, source):
        raise Broken(f"{source or 'a router'} reaches {target}: nothing was parted")
    return f"{source or 'no router'} does not reach {target}"


def _hosts(world: World) -> Hosts:
    assert world.cluster.hosts is not None, "the layout says so"
    return world.cluster.hosts


async def _end(world: World, streams: list[Stream], proof: str, for_good: bool) -> str:
    if not for_good:
        await asyncio.sleep(AWHILE_S)
        _hosts(world).heal()
    await finish_all(streams)
    await world.cluster.heal()
    await check_all(world.cluster, streams)
    return f"{proof}; retries {max(stream.retries for stream in streams)}"


async def decode_lost(world: World, for_good: bool) -> str:
    """The decode node's cable, in mid-stream."""
    cluster = world.cluster
    stream = cluster.begin(world.specs["beside"], "parted")
    await stream.at_least(MID_STREAM)
    node = await cluster.recorded(stream.stored_id, "decode_node")
    _hosts(world).cut(node)
    return await _end(world, [stream], await _proof(world, node), for_good)


async def prefill_lost(world: World, for_good: bool, *, keep_router: bool) -> str:
    """The prefill node's cable in the middle of a transfer, or only its way to all decode nodes."""
    cluster, hosts = world.cluster, _hosts(world)
    beside = cluster.begin(world.specs["beside"], "beside")
    await beside.at_least(EARLY)
    cluster.arm(("p0", "p1"), f"kv.half:1:delay={HOLD_MS}")
    stream = cluster.begin(world.specs["seeded"], "parted")
    node, line = await cluster.fired()
    cluster.disarm()
    if keep_router:
        hosts.part((node, "d0", "d1"))
        proof = await _proof(world, node, "d0")
    else:
        hosts.cut(node)
        proof = await _proof(world, node)
    return await _end(world, [beside, stream], f"{line}; {proof}", for_good)


def partition_cases() -> list[Case]:
    """Skipped where hosts cannot be made."""
    cases: dict[str, Callable[[World], Awaitable[str]]] = {}
    for good, word in ((False, f"for {AWHILE_S:g} s"), (True, "until the end")):
        cases |= {
            f"decode node {word}": lambda w, g=good: decode_lost(w, g),
            f"prefill node {word}": lambda w, g=good: prefill_lost(w, g, keep_router=False),
            f"prefill from decode {word}": lambda w, g=good: prefill_lost(w, g, keep_router=True),
        }
    skip = obstacle()
    return [Case("partition", name, run, HOSTS, skip=skip) for name, run in cases.items()]
