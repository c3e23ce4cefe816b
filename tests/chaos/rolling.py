"""A rolling restart of everything: each node, each router and Redis in its turn, under load.

Whoever is told to end (SIGTERM) must end in good order, and with a stream in its hands: a prefill
node in the middle of a prompt, a decode node and a router in the middle of answers. A successor
takes its place, at a router's old addresses; when everybody knows it, it is the next one's turn.
Clients are as behind a load balancer: a plain request goes to a router that says it is ready, a
resumable one goes on by itself. None of them may fail, and nothing is excused.
"""

from __future__ import annotations

import asyncio
import random
import re
import signal
from collections import Counter
from dataclasses import dataclass, field
from typing import Final

import httpx

from baton.runtime.redis.keys import ONLY
from tests.chaos.cases import Case, World
from tests.chaos.cluster import NODES, ROUTERS, Cluster, Layout
from tests.chaos.kills import EARLY
from tests.chaos.oracle import STRICT, Broken, check_all, check_stream
from tests.chaos.streams import Stream
from tests.system.processes import STOP_S
from tests.waiting import eventually

LANES: Final = ("stream", "grpc", "shm")
HOLD_MS = 400  # so long a node stays at the place where it is told to end
PLACES: Final = {"p": "p.mid_chunk:4", "d": "d.step_n:8"}
TRIES = 20  # to find a node in the first half of an answer
BETWEEN = 6  # requests that end between two restarts
NODE_FLAGS: Final = ("--drain-s", "30")
ROUTER_FLAGS: Final = ("--drain-s", "2", "--shutdown-s", "30")


@dataclass(frozen=True)
class Way:
    """How a client asks."""

    name: str
    http: bool = False
    streamed: bool = True
    resumable: bool = False


WAYS: Final = (
    Way("grpc"),
    Way("grpc-resumable", resumable=True),
    Way("http", http=True),
    Way("http-whole", http=True, streamed=False),
    Way("http-resumable", http=True, resumable=True),
    Way("http-whole-resumable", http=True, streamed=False, resumable=True),
)


@dataclass
class Load:
    """A client for each of WAYS, asking again and again. `streams`: all that were begun; `router`:
    the one that each was asked of."""

    world: World
    stopping: bool = False
    streams: list[Stream] = field(default_factory=list[Stream])
    router: dict[str, str] = field(default_factory=dict[str, str])
    finished: Counter[str] = field(default_factory=Counter[str])

    async def ask(self, way: Way, draw: random.Random) -> None:
        """Raises Broken with the first answer that is not as it should be."""
        cluster, kinds = self.world.cluster, sorted(self.world.specs)
        async with httpx.AsyncClient(trust_env=False) as http:
            while not self.stopping:
                spec = self.world.specs[draw.choice(kinds)]
                router = draw.choice(ROUTERS)
                if not way.resumable:
                    router = await _ready_router(cluster, http, draw)
                request_id = f"{way.name}-{len(self.streams):04d}"
                stream = Stream(spec, request_id, resumable=way.resumable)
                self.streams.append(stream)
                self.router[request_id] = router
                _begin(cluster, stream, way, router)
                await stream.finish()
                check_stream(stream, STRICT)
                self.finished[way.name] += 1

    def under_way(self) -> list[Stream]:
        """Those that have shown something, and have most before them."""
        return [
            stream
            for stream in self.streams
            if EARLY <= stream.num_tokens < sum(map(len, stream.spec.expected)) / 2
        ]

    async def more(self, count: int) -> None:
        """Until so many more have ended."""
        goal = self.finished.total() + count

        async def look() -> bool:
            return self.finished.total() >= goal

        await eventually(look)


async def _ready_router(cluster: Cluster, http: httpx.AsyncClient, draw: random.Random) -> str:
    """One that says so, as a load balancer asks."""

    async def look() -> str:
        for name in draw.sample(ROUTERS, len(ROUTERS)):
            try:
                answer = await http.get(f"http://{cluster.servers[name].address}/ready")
            except httpx.TransportError:
                continue
            if answer.status_code == 200:
                return name
        return ""

    return await eventually(look)


def _begin(cluster: Cluster, stream: Stream, way: Way, router: str) -> None:
    """At that router; a resumable one knows the others, too."""
    index = ROUTERS.index(router)
    if way.http:
        urls = [*cluster.urls[index:], *cluster.urls[:index]]
        stream.start_http(urls if way.resumable else urls[:1], streamed=way.streamed)
    elif way.resumable:
        stream.start_at([*cluster.addresses[index:], *cluster.addresses[:index]])
    else:
        stream.start(cluster.clients[router])


# ---- restarts ----


async def restart_node(load: Load, name: str) -> str:
    """In the middle of a prompt, or of answers, which it hands on. Returns the proof."""
    cluster = load.world.cluster
    old, (moved, failed) = cluster.servers[name], await _migrations(cluster)
    live = await _held(load, name)
    status = await _end(cluster, name)
    told = re.search(r"draining: (\d+) requests", old.log.read_text())
    running = int(told[1]) if told else 0
    now_moved, now_failed = await _migrations(cluster)
    proof = f"{status}, {running} in hand, {now_moved - moved} handed on, {live} under way"
    if not running or now_failed > failed or (name[0] == "d" and now_moved == moved):
        raise Broken(f"{proof}, {now_failed - failed} lost")
    return proof


async def _held(load: Load, name: str) -> int:
    """A node stays for a moment at its place in a request, while streams are under way: of a
    decode node, its own. Returns how many."""
    cluster = load.world.cluster
    for _ in range(TRIES):
        cluster.arm([name], f"{PLACES[name[0]]}:delay={HOLD_MS}")
        await cluster.fired()
        cluster.disarm()
        streams = load.under_way()
        if name[0] == "d":
            records = [await cluster.request_fields(stream.stored_id) for stream in streams]
            streams = [fields for fields in records if fields.get("decode_node") == name]
        if streams:
            return len(streams)
    raise Broken(f"nothing was under way at {name}")


async def _migrations(cluster: Cluster) -> tuple[int, int]:
    """How many requests changed their decode node, and how many were lost at that."""
    known = [(await cluster.clients[name].server_info()).migrations for name in ROUTERS]
    return sum(each.done for each in known), sum(each.failed for each in known)


async def restart_router(load: Load, name: str) -> str:
    """With streams of plain requests in its hands, which it must end itself. Returns the proof."""

    async def look() -> list[Stream]:
        mine = [it for it in load.under_way() if load.router[it.request_id] == name]
        return mine if any(not stream.resumable for stream in mine) else []

    mine, begun = await eventually(look), len(load.streams)
    status = await _end(load.world.cluster, name)
    late = [load.router[stream.request_id] for stream in load.streams[begun:]]
    proof = f"{status}, {len(mine)} under way"
    others = len(late) - late.count(name)
    if not others:
        raise Broken(f"{proof}, and nobody went elsewhere")
    return f"{proof}, {others} went elsewhere meanwhile"


async def _end(cluster: Cluster, name: str) -> str:
    """SIGTERM, and a successor. Raises Broken if it does not end in good order."""
    old = cluster.servers[name]
    old.signal(signal.SIGTERM)
    status = await asyncio.wait_for(old.process.wait(), STOP_S)
    if status or "drain ended with" in old.log.read_text():
        raise Broken(f"{name} ended with status {status}, or gave something up")
    pid = old.process.pid
    await cluster.succeed(name)
    return f"{name} {pid} -> {cluster.pid(name)}"


async def restart_redis(load: Load) -> str:
    """With its append-only file, and long enough for every router to notice. Returns the proof."""
    cluster = load.world.cluster

    async def look() -> list[Stream]:
        return load.under_way()

    live = len(await eventually(look))
    pid, keys = await cluster.redis_pid(), int(await cluster.store.dbsize())
    before = {name: await _outages(cluster, name) for name in ROUTERS}
    await cluster.end_redis()
    for name in ROUTERS:
        await eventually(lambda it=name: cluster.metric(it, "baton_store_away"))
    cluster.start_redis()
    kept = int(await cluster.store.dbsize())
    for name in ROUTERS:

        async def back(it: str = name) -> bool:
            return not await cluster.metric(it, "baton_store_away")

        await eventually(back)
        count, dropped = await _outages(cluster, name)
        if count <= before[name][0] or dropped > before[name][1]:
            raise Broken(f"{name}: {count:.0f} outages, {dropped:.0f} tokens in no log")
    if not kept:
        raise Broken(f"Redis forgot its {keys} keys")
    now = await cluster.redis_pid()
    return f"redis {pid} -> {now}, {keys} keys, {kept} from its file, {live} under way"


async def _outages(cluster: Cluster, router: str) -> tuple[float, float]:
    """How often the store was away, and the tokens that no log will have."""
    names = ("baton_store_outages_total", "baton_store_dropped_tokens_total")
    outages, dropped = [await cluster.metric(router, name) for name in names]
    return outages, dropped


# ---- the case ----


async def rolling(world: World) -> str:
    """All of them, in an order that is drawn. Returns the proofs."""
    load, draw = Load(world), world.draw
    proofs: list[str] = []
    try:
        async with asyncio.TaskGroup() as group:
            for way in WAYS:
                group.create_task(load.ask(way, random.Random(draw.random())))
            for name in draw.sample((*NODES, *ROUTERS, "redis"), len(NODES) + len(ROUTERS) + 1):
                await load.more(BETWEEN)
                proofs.append(await restart(load, name))
            await load.more(BETWEEN)
            load.stopping = True
    except ExceptionGroup as several:
        raise several.exceptions[0] from several
    await _find_records(world.cluster, load.streams)
    await check_all(world.cluster, load.streams)
    retries = max(stream.retries for stream in load.streams)
    return f"{'; '.join(proofs)}; requests {dict(load.finished)}, retries {retries}"


async def restart(load: Load, name: str) -> str:
    if name == "redis":
        return await restart_redis(load)
    return await (restart_router if name in ROUTERS else restart_node)(load, name)


async def _find_records(cluster: Cluster, streams: list[Stream]) -> None:
    """What the plain requests over HTTP are called in Redis: the routers drew a part of it."""
    known: dict[str, str] = {}
    async for key in cluster.store.scan_iter(f"{ONLY.request_prefix}cmpl-*", count=1000):
        stored = key.decode().removeprefix(ONLY.request_prefix)
        known[stored.removeprefix("cmpl-").rpartition("-")[0]] = stored
    for stream in streams:
        if stream.http is not None and not stream.resumable:
            stream.plain_id = known[stream.request_id]


def _layout(lane: str) -> Layout:
    return Layout(lanes=lane, node_flags=NODE_FLAGS, router_flags=ROUTER_FLAGS)


def rolling_cases() -> list[Case]:
    return [
        Case("rolling", f"rolling {index:02d} {lane}", rolling, _layout(lane))
        for index, lane in enumerate(LANES)
    ]
