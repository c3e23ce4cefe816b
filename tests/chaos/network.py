"""What wires do: cuts, resets, half-open ends, black holes, slow links, flipped bits, repetitions.

Between router and nodes (`session`), between prefill and decode nodes (the KV lanes stream and
grpc), and between everybody and Redis. Each case proves by the proxy's counters that it happened.
Bits are flipped on the KV lanes alone: those carry digests; a session is gRPC, which relies on TCP
or TLS for its bytes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from tests.chaos.cases import Case, World
from tests.chaos.cluster import Layout
from tests.chaos.kills import EARLY
from tests.chaos.oracle import STRICT, Broken, Terms, check_all
from tests.chaos.proxy import Fault, FaultProxy, Way
from tests.chaos.streams import Stream, finish_all

MID_STREAM = 12
HOLD_MS = 700  # an exporter waits so long in the middle of a transfer: time to break it
LAYOUTS = {
    "stream": Layout(proxied=True, lanes="stream"),
    "grpc": Layout(proxied=True, lanes="grpc"),
}


@dataclass(frozen=True)
class Breakage:
    """`at_once`: done to the connections there are. Else a rule, kept for `seconds`."""

    name: str
    at_once: Callable[[FaultProxy], int] | None = None
    fault: Fault = Fault.NONE
    way: Way | None = None
    amount: float = 0.0
    seconds: float = 0.0


AT_ONCE = (
    Breakage("cut", lambda proxy: proxy.cut()),
    Breakage("reset", lambda proxy: proxy.reset()),
    Breakage("half-closed up", lambda proxy: proxy.half_close(Way.UP)),
    Breakage("half-closed down", lambda proxy: proxy.half_close(Way.DOWN)),
)
HOLES = (
    Breakage("black hole", fault=Fault.BLACKHOLE, seconds=3.0),
    Breakage("black hole up", fault=Fault.BLACKHOLE, way=Way.UP, seconds=3.0),
    Breakage("black hole down", fault=Fault.BLACKHOLE, way=Way.DOWN, seconds=3.0),
)
SLOW = (
    Breakage("delayed by 30 ms", fault=Fault.DELAY, amount=0.03, seconds=2.0),
    Breakage("throttled to 200 KB/s", fault=Fault.THROTTLE, amount=2e5, seconds=2.0),
)
DAMAGE = (
    *(
        Breakage(f"bit flipped at {at}", fault=Fault.FLIP, way=Way.DOWN, amount=at)
        for at in (20, 300, 70_000, 300_000)
    ),
    Breakage("piece repeated", fault=Fault.DUPLICATE, way=Way.DOWN, amount=70_000),
    Breakage("stalled", fault=Fault.STALL, way=Way.DOWN, seconds=6.0),
)


async def inflict(breakage: Breakage, proxies: list[FaultProxy]) -> str:
    """Do it, wait it out, undo it; returns the counters that prove it."""
    for proxy in proxies:
        if breakage.at_once is not None:
            breakage.at_once(proxy)
        else:
            await proxy.set(breakage.fault, breakage.way, breakage.amount)
    if breakage.seconds:
        await asyncio.sleep(breakage.seconds)
        for proxy in proxies:
            await proxy.set(Fault.NONE)
    return "; ".join(str(proxy.proof) for proxy in proxies)


def count_faults(proxies: list[FaultProxy]) -> int:
    """Everything that was broken so far."""
    count = 0
    for proxy in proxies:
        proof = proxy.proof
        count += proof.delayed + proof.stalled + proof.flipped + proof.duplicated + proof.cut
        count += proof.half_closed + proof.reset + sum(proof.bytes_dropped.values())
    return count


async def session_case(world: World, breakage: Breakage, role: str) -> str:
    """Break the sessions of both routers with the node that has the request, in mid-stream."""
    cluster = world.cluster
    beside = cluster.begin(world.specs["beside"], "beside")
    await beside.at_least(EARLY)
    stream = cluster.begin(world.specs["beside"], "net")
    await stream.at_least(MID_STREAM)
    node = (await cluster.request_fields(stream.stored_id))[f"{role}_node"]
    proxies = [cluster.proxies[node, "session"]]
    before = count_faults(proxies)
    proof = await inflict(breakage, proxies)
    return await _end(world, [beside, stream], proxies, before, f"{node} session: {proof}")


async def lane_case(world: World, breakage: Breakage, lane: str) -> str:
    """Break the KV lane of both prefill nodes while an exporter waits in mid-transfer; what acts on
    later bytes is set before them."""
    cluster = world.cluster
    beside = cluster.begin(world.specs["beside"], "beside")
    await beside.at_least(EARLY)
    proxies = [cluster.proxies[name, lane] for name in ("p0", "p1")]
    before = count_faults(proxies)
    if breakage.at_once is not None or breakage.seconds:
        cluster.arm(("p0", "p1"), f"kv.half:1:delay={HOLD_MS}")
        stream = cluster.begin(world.specs["seeded"], "net")
        await cluster.fired()
        cluster.disarm()
        proof = await inflict(breakage, proxies)
    else:
        await _only_new_connections(proxies)
        await inflict(breakage, proxies)
        stream = cluster.begin(world.specs["seeded"], "net")
        await stream.finish()
        proof = "; ".join(str(proxy.proof) for proxy in proxies)
    return await _end(world, [beside, stream], proxies, before, f"{lane} lane: {proof}")


async def _only_new_connections(proxies: list[FaultProxy]) -> None:
    """Kept connections have passed bytes already, and offsets count from their beginning."""
    for proxy in proxies:
        proxy.cut()
        proxy.proof.cut = 0


async def store_case(world: World, breakage: Breakage) -> str:
    """Between everybody and Redis, in mid-stream."""
    cluster = world.cluster
    proxies = [cluster.proxies["redis", "store"]]
    stream = cluster.begin(world.specs["beside"], "net")
    await stream.at_least(MID_STREAM)
    before = count_faults(proxies)
    task = asyncio.create_task(inflict(breakage, proxies))
    during = cluster.begin(world.specs["greedy"], "during")
    proof = await task
    return await _end(
        world, [stream, during], proxies, before, f"Redis: {proof}", Terms(unlogged=True)
    )


async def _end(
    world: World,
    streams: list[Stream],
    proxies: list[FaultProxy],
    before: int,
    proof: str,
    terms: Terms = STRICT,
) -> str:
    await finish_all(streams)
    if count_faults(proxies) == before:
        raise Broken(f"nothing was broken: {proof}")
    for proxy in proxies:
        await proxy.set(Fault.NONE)
    await world.cluster.heal()
    await check_all(world.cluster, streams, terms)
    return f"{proof}; retries {max(stream.retries for stream in streams)}"


def network_cases() -> list[Case]:
    def case(
        name: str, run: Callable[[World], Awaitable[str]], layout: Layout = LAYOUTS["stream"]
    ) -> Case:
        return Case("network", name, run, layout)

    cases = [
        case(
            f"session of {role} {breakage.name}",
            lambda w, b=breakage, r=role: session_case(w, b, r),
        )
        for breakage in (*AT_ONCE, *HOLES, *SLOW)
        for role in ("decode", "prefill")
    ]
    cases += [
        case(f"Redis {breakage.name}", lambda w, b=breakage: store_case(w, b))
        for breakage in (*AT_ONCE, *HOLES, *SLOW)
    ]
    # gRPC numbers its own frames: a repeated piece is for it what a flipped bit is.
    cases += [
        case(
            f"{lane} lane {breakage.name}", lambda w, b=breakage, n=lane: lane_case(w, b, n), layout
        )
        for lane, layout in LAYOUTS.items()
        for breakage in (*AT_ONCE, *HOLES, *SLOW, *DAMAGE)
    ]
    return cases
