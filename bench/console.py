"""What the console costs a router: `python -m bench.console`, at 1,000 nodes and 10,000 requests.

The console's own producer runs over simulated nodes, all of which report another load each second,
1,000 requests under way and a full ring of ended ones; some requests end and some events happen
each second. No sockets. Beside it runs work like a router's own, in slices of about 0.3 ms, for
half of the time. A probe at each turn of the event loop notes how much CPU time the turn took; from
these follows how late a timer comes that is due at any moment. It is CPU time, so the machine's
other work is not in it. Rounds with and without a watcher take turns.

Prints one JSON object: the time of a snapshot and of a delta (wall and CPU), the longest slice of
either that holds up the loop (CPU), the bytes of both, and the 99th percentile of the loop's lag.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, Final

import msgspec
import uvloop

from baton.protocol.clock import SystemClock
from baton.protocol.handles import Endpoint, NodeLoad, NodeRecord, Role
from baton.protocol.kv_spec import PoolFormat
from baton.protocol.request import Request
from baton.protocol.sampling import SamplingParams
from baton.runtime.timing import Timing
from router.config import RouterConfig
from router.console.stream import StateFeed
from router.events import EventRing
from router.metrics.router import RouterMetrics
from router.models import Models
from router.nodes.flows import FlowRate
from router.nodes.registry import NodeStatus
from router.request.gate.gate import Gate, GateSettings
from router.request.timeline import Milestone, TimelineEntry, TimelineMark, TimelineRing
from router.request.trace import RequestTrace
from router.services import RouterServices
from router.store.guard import StoreGuard
from router.store.memory_store import MemoryStore

NUM_LIVE: Final = 1000
ENDS_PER_S: Final = 100
ENDS_PER_EVENT: Final = 10
NUM_TURNS: Final = 6
WORK_S: Final = 0.0003
TIMES: Final = 20  # of each measurement
TimedWork = Callable[[], Awaitable[None]]


@dataclass(slots=True)
class ConsoleRegistry:
    """Simulated nodes. `turns`: their states, made before; `turn` goes on to the next one."""

    turns: list[list[NodeStatus]]
    now: int = 0

    @classmethod
    def of(cls, num_nodes: int, rng: random.Random) -> ConsoleRegistry:
        first = [_status(index) for index in range(num_nodes)]
        turns = [first]
        for _ in range(NUM_TURNS - 1):
            turns.append(cls.changed(turns[-1], rng))
        return cls(turns)

    @staticmethod
    def changed(before: Sequence[NodeStatus], rng: random.Random) -> list[NodeStatus]:
        """Return the nodes with another load each."""
        return [
            replace(
                each,
                load=replace(
                    each.load,
                    running=rng.randrange(64),
                    free_blocks=rng.randrange(4096),
                    step_tokens=each.load.step_tokens + rng.randrange(2000),
                    mbu=rng.random(),
                    mfu=rng.random(),
                ),
            )
            for each in before
        ]

    def turn(self) -> None:
        self.now = (self.now + 1) % len(self.turns)

    def statuses(self) -> list[NodeStatus]:
        return list(self.turns[self.now])

    def flows(self) -> list[tuple[str, str, FlowRate]]:
        half = len(self.turns[0]) // 2
        rate = FlowRate("boot", "stream", 1e8, 12.5, 0, 3.25, 18.5)
        return [
            (f"prefill-{index:04d}", f"decode-{(index * 7) % half:04d}", rate)
            for index in range(half)
        ]

    def model(self, _: str) -> None:
        return None


@dataclass(slots=True)
class ConsoleDispatcher:
    """Simulated requests under way."""

    gate: Gate
    under_way: list[tuple[Request, RequestTrace]]

    @property
    def num_live(self) -> int:
        return len(self.under_way)

    def live(self) -> list[tuple[Request, RequestTrace]]:
        return list(self.under_way)

    def waiting(self) -> list[tuple[Request, RequestTrace]]:
        return []


def _status(index: int) -> NodeStatus:
    role, number = (Role.PREFILL, Role.DECODE)[index % 2], index // 2
    name, address = f"{role.value}-{number:04d}", f"10.0.{index >> 8}.{index & 255}:50061"
    endpoint = Endpoint(f"{index:032x}", "layout", PoolFormat(16, "bfloat16"), ())
    record = NodeRecord(
        name, endpoint.boot_id, role, address, "Qwen3-0.6B", "digest", 16, 32768, 151936, endpoint,
        precision="bfloat16",
    )  # fmt: skip
    return NodeStatus(address, True, record, "", 12, NodeLoad(total_blocks=4096))


def _request(index: int) -> tuple[Request, RequestTrace]:
    request = Request(f"chatcmpl-{index:032x}-0", tuple(range(100)), SamplingParams(max_tokens=64))
    trace = RequestTrace(prefill_node="prefill-0001", decode_node="decode-0002", output_tokens=17)
    now = time.monotonic()
    milestones = (Milestone.PREFILLING, Milestone.PREFILLED, Milestone.DECODING)
    trace.marks = [TimelineMark(now, each, "decode-0002", 1, 3) for each in milestones]
    trace.finished_at, trace.first_token_at, trace.outcome = now + 2, now + 1, "finished"
    return request, trace


def _ended(index: int) -> TimelineEntry:
    request, trace = _request(index)
    return TimelineEntry(request.id, time.monotonic(), time.time(), 100, "", trace)


@dataclass(slots=True)
class Simulated:
    """A router's parts for the console, without the router."""

    registry: ConsoleRegistry
    ring: TimelineRing
    events: EventRing
    feed: StateFeed
    coming: list[TimelineEntry]  # requests that end, made before

    @classmethod
    def of(cls, num_nodes: int, num_ended: int) -> Simulated:
        clock = SystemClock()
        registry = ConsoleRegistry.of(num_nodes, random.Random(1))
        ring, events = TimelineRing(num_ended), EventRing()
        for index in range(num_ended):
            ring.add(_ended(index))
        live = [_request(index) for index in range(NUM_LIVE)]
        parts: dict[str, Any] = {
            "config": RouterConfig(router_id="router"),
            "dispatcher": ConsoleDispatcher(Gate(clock, GateSettings()), live),
            "registry": registry,
            "store": StoreGuard(MemoryStore("router", Timing(), clock), Timing()),
            "models": Models(),
            "metrics": RouterMetrics(),
            "aborts": None,
            "timelines": ring,
            "events": events,
        }
        coming = [_ended(num_ended + index) for index in range(num_ended)]
        return cls(registry, ring, events, StateFeed(RouterServices(**parts)), coming)

    def go_on(self, count: int) -> None:
        """Let one request end, and now and then something happen."""
        entry = replace(
            self.coming[count % len(self.coming)], request_id=f"chatcmpl-{count:032x}-1"
        )
        self.ring.add(entry)
        if count % ENDS_PER_EVENT == 0:
            self.events.note("retry", "epoch 1 failed after 3 tokens", request_id=entry.request_id)


@dataclass(slots=True)
class LoopTurns:
    """CPU seconds of each turn of the event loop, in `seconds` of wall-clock time."""

    taken: list[float] = field(default_factory=list[float])
    seconds: float = 0.0

    async def run(self) -> None:
        """Note the turns until cancelled."""
        since = time.perf_counter()
        while True:
            began = time.thread_time()
            await asyncio.sleep(0)
            self.taken.append(time.thread_time() - began)
            self.seconds = time.perf_counter() - since

    def late_ms(self, share: float) -> float:
        """Return how late a timer is at most in `share` of all moments: as late as what is left of
        the turn in which it is due."""
        allowed, low, high = (1 - share) * self.seconds, 0.0, max(self.taken)
        for _ in range(40):
            middle = (low + high) / 2
            if sum(turn - middle for turn in self.taken if turn > middle) > allowed:
                low = middle
            else:
                high = middle
        return high * 1000


async def work_like_a_router() -> None:
    """Use half of the loop's time, in slices of WORK_S."""
    while True:
        until = time.perf_counter() + WORK_S
        while time.perf_counter() < until:
            pass
        await asyncio.sleep(WORK_S)


async def timed(name: str, simulated: Simulated, work: TimedWork) -> dict[str, float]:
    """Do `work` some times after a change of all nodes. Return medians, the worst, and the longest
    CPU time between two turns of the loop."""
    wall: list[float] = []
    cpu: list[float] = []
    slices: list[float] = []

    async def turns() -> None:
        while True:
            last = time.thread_time()
            await asyncio.sleep(0)
            slices.append(time.thread_time() - last)

    for _ in range(TIMES):
        simulated.registry.turn()
        probe = asyncio.create_task(turns())
        await asyncio.sleep(0)
        began, used = time.perf_counter(), time.thread_time()
        await work()
        wall.append(time.perf_counter() - began)
        cpu.append(time.thread_time() - used)
        await asyncio.sleep(0)
        probe.cancel()
    return {
        f"{name}_ms": round(statistics.median(wall) * 1000, 2),
        f"{name}_ms_worst": round(max(wall) * 1000, 2),
        f"{name}_cpu_ms": round(statistics.median(cpu) * 1000, 2),
        f"{name}_longest_slice_cpu_ms": round(max(slices) * 1000, 2),
    }


async def alone(simulated: Simulated) -> dict[str, float]:
    """Measure snapshots and deltas, without other work."""
    sizes: list[int] = []

    async def snapshot() -> None:
        sizes.append(len(msgspec.json.encode(await simulated.feed.snapshot())))

    found = await timed("snapshot", simulated, snapshot)
    async with aclosing(simulated.feed.watch()) as frames:
        await anext(frames)

        async def delta() -> None:
            await simulated.feed.tick()
            await anext(frames)

        return (
            found
            | {"snapshot_kb": round(max(sizes) / 1000, 1)}
            | await timed("delta", simulated, delta)
        )


async def one_round(simulated: Simulated, seconds: float, *, watched: bool) -> dict[str, Any]:
    """Run for `seconds`, with one console watching or none; return turns and bytes of deltas."""
    turns, sizes = LoopTurns(), list[int]()

    async def watch() -> None:
        async with aclosing(simulated.feed.watch()) as frames:
            async for data in frames:
                sizes.append(len(data))

    async def time_passes() -> None:
        for count in itertools.count(1):
            await asyncio.sleep(1 / ENDS_PER_S)
            simulated.go_on(count)
            if count % ENDS_PER_S == 0:
                simulated.registry.turn()

    works = [work_like_a_router(), turns.run(), simulated.feed.run(), time_passes()]
    works += [watch()] if watched else []
    tasks = [asyncio.create_task(each) for each in works]
    await asyncio.sleep(seconds)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return {"turns": turns, "delta_bytes": sizes[1:]}


async def measure(num_nodes: int, num_ended: int, rounds: int, seconds: float) -> dict[str, Any]:
    """Return all figures."""
    simulated = Simulated.of(num_nodes, num_ended)
    found: dict[str, Any] = {"nodes": num_nodes, "requests": num_ended}
    found |= await alone(simulated)
    late: dict[bool, list[float]] = {False: [], True: []}
    sizes: list[int] = []
    for _ in range(rounds):
        for watched in (False, True):
            one = await one_round(simulated, seconds, watched=watched)
            late[watched].append(one["turns"].late_ms(0.99))
            sizes += one["delta_bytes"]
    return found | {
        "deltas": len(sizes),
        "delta_kb": round(statistics.median(sizes) / 1000, 1),
        "delta_kb_worst": round(max(sizes) / 1000, 1),
        "p99_late_cpu_ms_without": [round(each, 3) for each in late[False]],
        "p99_late_cpu_ms_with": [round(each, 3) for each in late[True]],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.console", description=__doc__)
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--requests", type=int, default=10_000, help="ended ones in the ring")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=6.0, help="of each round")
    given = parser.parse_args(arguments)
    work = measure(given.nodes, given.requests, given.rounds, given.seconds)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        sys.stdout.write(json.dumps(runner.run(work)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
