"""The router of another checkout beside this one: `python -m bench.router_trees --other TREE`.

TREE is a checkout of another commit with a `.venv` of its own. Its router and nodes, and those of
this checkout, run at the same time and are asked in turns (other, this, this, other, ...), so that
neighbours of the machine disturb both alike. Both routers have the same core; nodes, clients and
Redis share the others. What an option costs: `--other . --flags "--the-option"`. Loads:

    whole      32 connections, 16 words in, 16 tokens out, not streamed: CPU us per answer
    no redis   the same without Redis
    steps      64 connections, 16 words in, 200 tokens out, not streamed, a token every 20 ms: CPU
               us per answer
    streams    64 streams of 200 tokens, a token every 20 ms: CPU us per streamed token
    four       the same with 4 streams
    flood      64 streams of 400 tokens, as fast as they are read: CPU us per streamed token
    first      a stream of one router, then one of the other, and so on, 100 words in: milliseconds
               to the first byte, median of 40 streams

CPU time is that of the router's process, all threads, user and system. A figure is a median (least
- most) over the rounds; a ratio is this checkout over the other one, taken pair by pair.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shlex
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from rich import box
from rich.console import Console
from rich.table import Table

from baton.protocol.errors import BatonError, ConfigError
from bench.measure import median_and_range
from bench.router import QUICK, Bench
from bench.router_load import LoadPlan, RouterFigures, Stream, connect
from bench.router_processes import ProcessPlan, Program, cluster, redis

OTHER: Final = "other"
THIS: Final = "this"
CHAT: Final = "/v1/chat/completions"
FIRST_BYTES: Final = 40  # streams of each router in a round
PAUSE_S: Final = 0.01  # between two of them: nothing queues


@dataclass(frozen=True, slots=True)
class TreeLoad:
    """One kind of load. `mode` and `shape` are bench/router_load.py's; the CPU time is divided by
    the number of `per`."""

    mode: str
    per: str
    step_ms: float | None
    shape: dict[str, float]
    has_redis: bool = True


_WHOLE: Final[dict[str, float]] = {"seconds": 2, "connections": 32, "words": 16, "tokens": 16}
LOADS: Final = {
    "whole": TreeLoad("whole", "answers", None, _WHOLE),
    "no redis": TreeLoad("whole", "answers", None, _WHOLE, has_redis=False),
    "steps": TreeLoad(
        "whole", "answers", 20.0, {"seconds": 10, "connections": 64, "words": 16, "tokens": 200}
    ),
    "streams": TreeLoad("streams", "tokens", 20.0, {"connections": 64, "words": 16, "tokens": 200}),
    "four": TreeLoad("streams", "tokens", 20.0, {"connections": 4, "words": 16, "tokens": 200}),
    "flood": TreeLoad("streams", "tokens", 0.0, {"connections": 64, "words": 16, "tokens": 400}),
    "first": TreeLoad("first", "first byte", 1.0, {}),
}


@dataclass(slots=True)
class TreeFigures:
    """The figures of one load by tree, one per round."""

    values: dict[str, list[float]] = field(default_factory=lambda: {OTHER: [], THIS: []})

    @property
    def ratios(self) -> list[float]:
        pairs = zip(self.values[THIS], self.values[OTHER], strict=True)
        return [this / other for this, other in pairs]


async def measure(
    bench: Bench, load: TreeLoad, other: Path, rounds: int, flags: tuple[str, ...] = ()
) -> TreeFigures:
    """Run `load` `rounds` times on each tree, in turns; the first round of each is thrown away.

    `flags`: of this checkout's router alone."""
    found = TreeFigures()
    plan = replace(bench.plan, step_ms=load.step_ms)
    plan = plan if load.has_redis else replace(plan, redis_url=None)
    async with AsyncExitStack() as stack:
        servers = {
            OTHER: await stack.enter_async_context(cluster(replace(plan, tree=other))),
            THIS: await stack.enter_async_context(cluster(replace(plan, router_flags=flags))),
        }
        if load.mode == "first":
            return await _first_bytes(servers, rounds)
        for name in servers:  # a warm-up
            await _ask(bench, load, servers[name])
        for turn in range(rounds):
            for name in _order(turn):
                found.values[name].append(await _ask(bench, load, servers[name]))
    return found


def _order(turn: int) -> tuple[str, str]:
    return (OTHER, THIS) if turn % 2 == 0 else (THIS, OTHER)


async def _first_bytes(servers: dict[str, Program], rounds: int) -> TreeFigures:
    """Milliseconds to the first byte. The first round is thrown away."""
    found = TreeFigures()
    streams: dict[str, tuple[Stream, RouterFigures]] = {}
    for name, server in servers.items():
        plan = LoadPlan("127.0.0.1", server.port, CHAT, 1, 1.0, words=100, tokens=16)
        figures = RouterFigures()
        streams[name] = Stream(plan.request(True), figures), figures
        await connect(plan, streams[name][0])
    for _ in range(1 + rounds):
        for turn in range(FIRST_BYTES):
            for name in _order(turn):
                streams[name][0].send()
                await streams[name][0].ended.wait()
                await asyncio.sleep(PAUSE_S)
        for name, (_, figures) in streams.items():
            if figures.failures:
                raise ConfigError(f"{figures.failures} answers failed")
            found.values[name].append(1000 * statistics.median(figures.first_s))
            figures.first_s.clear()
    return TreeFigures({name: values[1:] for name, values in found.values.items()})


async def _ask(bench: Bench, load: TreeLoad, server: Program) -> float:
    """Return CPU microseconds per answer or token."""
    seen: dict[str, Any] = await bench.ask(server, load.mode, **load.shape)
    if seen["failures"] or not seen["answers"]:
        raise ConfigError(f"{seen['failures']} answers failed")
    return 1e6 * float(seen["cpu_s"]) / float(seen[load.per])


def show(found: dict[str, TreeFigures], console: Console) -> None:
    table = Table("load", "other", "this", "this over other", box=box.SIMPLE)
    for name, figures in found.items():
        load = LOADS[name]
        unit = "ms" if load.mode == "first" else f"us per {load.per[:-1]}"
        values = [median_and_range(figures.values[tree], 1) for tree in (OTHER, THIS)]
        table.add_row(f"{name}, {unit}", *values, median_and_range(figures.ratios, 2))
    console.print(table)


async def run(given: argparse.Namespace, folder: Path) -> dict[str, TreeFigures]:
    cores = sorted(os.sched_getaffinity(0))
    others = frozenset(cores[1:] or cores)
    found: dict[str, TreeFigures] = {}
    os.sched_setaffinity(0, others)
    async with redis(folder, others) as url:
        plan = ProcessPlan(given.model.resolve(), cores[0], others, redis_url=url)
        for name in given.loads.split(","):
            bench = Bench(QUICK, plan, folder)
            flags = tuple(shlex.split(given.flags))
            other = given.other.resolve()
            found[name] = await measure(bench, LOADS[name], other, given.rounds, flags)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point: 1 when a router could not be measured."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.router_trees", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--other", type=Path, required=True, help="another checkout")
    parser.add_argument("--flags", default="", help="of this checkout's router alone")
    parser.add_argument("--rounds", type=int, default=8, help="of each load and tree")
    parser.add_argument("--loads", default=",".join(LOADS), help="of " + ", ".join(LOADS))
    parser.add_argument("--model", type=Path, default=Path("demo_model"), help="its tokenizer")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    given = parser.parse_args(arguments)
    if unknown := set(given.loads.split(",")) - set(LOADS):
        parser.error(f"unknown loads: {', '.join(sorted(unknown))}")
    console = Console()
    try:
        with tempfile.TemporaryDirectory(prefix="baton-bench-") as folder:
            found = asyncio.run(run(given, Path(folder)))
    except BatonError as error:
        console.print(f"bench.router_trees: {error}", style="red", markup=False, soft_wrap=True)
        return 1
    if given.json:
        rows = {name: {**each.values, "ratios": each.ratios} for name, each in found.items()}
        sys.stdout.write(json.dumps(rows, indent=2) + "\n")
    else:
        show(found, console)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
