"""The router alone, measured: `python -m bench.router [--json] [--quick] [--parts ...]`.

Fake nodes in their own process answer at once over real sessions (bench/router_nodes.py), a load
generator with raw sockets asks (bench/router_load.py), and Redis is real. The router has a core to
itself; everything else shares the others. Parts:

    requests   non-streaming answers per second, with and without Redis, beside three yardsticks
               under the router's uvicorn settings: a bare Starlette echo; one that asks two nodes
               over gRPC; and that one with the prompt rendered and encoded (what libraries cost)
    tokens     streamed tokens per second, beside vLLM-style chunks by pydantic (no nodes behind)
    first      time to the first byte at a fixed rate: all of it is the router's and the wires'
    streams    many streams at a steady pace, begun one after another, 256 at most on a decode node:
               errors, lag of each token behind its node's step, memory; then again beside clients
               that never read

Machines are shared. So next to each rate stands the rate per second of CPU time that the process
took, which neighbours change little. docs/router.md explains the figures, docs/log/ keeps them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from rich import box
from rich.console import Console
from rich.table import Table

from baton.protocol.errors import BatonError, ConfigError
from bench.measure import distribution
from bench.router_processes import ProcessPlan, Program, cluster, load, program, redis

PARTS: Final = ("requests", "tokens", "first", "streams")
YARDSTICKS: Final = "bench.router_yardsticks"
PACE_MS: Final = 100.0
BATCH: Final = 256  # most streams of a decode node, as in real deployments


@dataclass(frozen=True, slots=True)
class RouterSize:
    """How much is measured: everything, or a smoke test of seconds."""

    rounds: int
    seconds: float
    streams: int
    stream_tokens: int
    slow: int
    slow_tokens: int


WHOLE: Final = RouterSize(3, 5.0, 1000, 200, 50, 1000)
QUICK: Final = RouterSize(1, 0.5, 20, 10, 2, 20)
RAMP: Final = 125.0  # streams that begin per second


@dataclass(frozen=True, slots=True)
class Bench:
    """What every part needs."""

    size: RouterSize
    plan: ProcessPlan
    folder: Path

    async def ask(self, server: Program, mode: str, **flags: object) -> dict[str, Any]:
        """Run the load generator once; return its results with the server's CPU time and peak
        memory.
        """
        given = [mode, "--port", str(server.port)]
        for name, value in flags.items():
            given += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
        before, memory = server.cpu_s(), server.memory_mb()
        found = await load(given, self.plan.others, self.folder / "load.json")
        found["cpu_s"] = server.cpu_s() - before
        found["memory_mb"] = {"before": memory, "peak": server.memory_mb("VmHWM")}
        for what in ("answers", "tokens"):
            found[f"{what}_per_cpu_s"] = found[what] / max(found["cpu_s"], 1e-9)
        return found


async def requests(bench: Bench) -> dict[str, Any]:
    """Return medians over alternating rounds: echo, relay, least, router with and without Redis."""
    names = ("echo", "relay", "least", "router", "router, no Redis")
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    shape = {"seconds": bench.size.seconds, "connections": 32, "words": 16, "tokens": 16}
    for _ in range(bench.size.rounds):
        async with program(YARDSTICKS, [], {bench.plan.core}) as server:
            rows["echo"].append(await bench.ask(server, "whole", path="/echo", **shape))
        async with relay(bench.plan) as server:
            for name in ("relay", "least"):
                rows[name].append(await bench.ask(server, "whole", path=f"/{name}", **shape))
        async with cluster(bench.plan) as server:
            rows["router"].append(await bench.ask(server, "whole", **shape))
        async with cluster(replace(bench.plan, redis_url=None)) as server:
            rows["router, no Redis"].append(await bench.ask(server, "whole", **shape))
    found = {name: _medians(runs, "answers") for name, runs in rows.items()}
    for name in names[1:]:
        found[name]["over_echo"] = found[name]["rate"] / found["echo"]["rate"]
        per_cpu = found[name]["per_cpu_s"] / found["echo"]["per_cpu_s"]
        found[name]["over_echo_per_cpu_s"] = per_cpu
    return found


@asynccontextmanager
async def relay(plan: ProcessPlan) -> AsyncGenerator[Program, None]:
    """Run the server with the least that a request to two nodes over gRPC costs, and in
    libraries.
    """
    async with AsyncExitStack() as stack:
        nodes = [
            await stack.enter_async_context(program("bench.router_relay", [], plan.others))
            for _ in range(2)
        ]
        flags = [word for node in nodes for word in ("--relay-node", str(node.ready["address"]))]
        flags += ["--model", str(plan.model)]
        yield await stack.enter_async_context(program(YARDSTICKS, flags, {plan.core}))


async def tokens(bench: Bench) -> dict[str, Any]:
    """Return medians over alternating rounds: 64 streams as fast as they are read."""
    rows: dict[str, list[dict[str, Any]]] = {"pydantic chunks": [], "router": []}
    shape = {"connections": 64, "tokens": 2 * bench.size.stream_tokens, "words": 16}
    for _ in range(bench.size.rounds):
        async with program(YARDSTICKS, [], {bench.plan.core}) as server:
            rows["pydantic chunks"].append(await bench.ask(server, "streams", **shape))
        async with cluster(replace(bench.plan, step_ms=0.0)) as server:
            rows["router"].append(await bench.ask(server, "streams", **shape))
    return {name: _medians(runs, "tokens") for name, runs in rows.items()}


async def first(bench: Bench) -> dict[str, Any]:
    """Measure at a tenth of what a router can do, so that nothing queues."""
    async with cluster(replace(bench.plan, step_ms=10.0)) as server:
        shape = {"seconds": 2 * bench.size.seconds, "rate": 20, "connections": 8, "words": 100}
        return await bench.ask(server, "first", **shape)


async def streams(bench: Bench) -> dict[str, Any]:
    """Return the lag of each token, without and with clients that never read."""
    size = bench.size
    return {
        "steady": await _lags(bench, connections=size.streams, tokens=size.stream_tokens),
        "beside slow readers": await _lags(
            bench, connections=size.streams // 5, tokens=size.slow_tokens, slow=size.slow
        ),
    }


async def _lags(bench: Bench, **flags: int) -> dict[str, Any]:
    times = bench.folder / "steps.json"
    pace_ms = PACE_MS if not flags.get("slow") else PACE_MS / 5
    nodes = -(-flags["connections"] // BATCH)
    plan = replace(bench.plan, step_ms=pace_ms, times=times, decode_nodes=nodes)
    async with cluster(plan) as server:
        shape = {"words": 16, "ramp_s": flags["connections"] / RAMP, "with_times": True}
        found = await bench.ask(server, "streams", **shape, **flags)
    left = {  # (reply, position) -> when it left the node, which knows it as REPLY-NUMBER.RANDOM
        (request_id.rpartition("-")[0], position): left_s
        for left_s, positions in json.loads(times.read_text())
        for request_id, position in positions.items()
    }
    lags: list[float] = []
    for request_id, arrivals in found.pop("arrivals").items():
        # Token 0 came from the prefill node before; the decode node only repeats it.
        for position, arrived_s in enumerate(arrivals):
            left_s = left.get((request_id, position))
            if left_s is not None and position > 0:
                lags.append(arrived_s - left_s)
    known = distribution(lags)
    if known is None:
        raise ConfigError("no token of any stream was both sent and received")
    found["lag_ms"] = {"p50": known.p50, "p99": known.p99, "max": max(lags) * 1000}
    found["compared_tokens"] = known.count
    return found


def _medians(runs: Sequence[dict[str, Any]], what: str) -> dict[str, Any]:
    rates = [run["rate"] for run in runs]
    return {
        "rate": statistics.median(rates),
        "spread": [min(rates), max(rates)],
        "per_cpu_s": statistics.median(run[f"{what}_per_cpu_s"] for run in runs),
        "failures": sum(run["failures"] for run in runs),
        "runs": list(runs),
    }


def goals(found: dict[str, Any]) -> list[tuple[str, float, float, bool]]:
    """Return (name, value, limit, whether it is a lower limit) of what was measured."""
    rows: list[tuple[str, float, float, bool]] = []
    if "requests" in found:
        router = found["requests"]["router"]
        rows.append(("requests/s over echo", router["over_echo"], 0.4, True))
        rows.append(("the same, per CPU second", router["over_echo_per_cpu_s"], 0.4, True))
    if "tokens" in found:
        router = found["tokens"]["router"]
        rows.append(("streamed tokens/s", router["rate"], 20_000, True))
        rows.append(("streamed tokens per CPU second", router["per_cpu_s"], 20_000, True))
    if "first" in found:
        rows.append(("added TTFT p50, ms", found["first"]["first_ms"]["p50"], 3.0, False))
    for name, run in found.get("streams", {}).items():
        rows.append((f"{name}: failures", run["failures"], 0, False))
        rows.append((f"{name}: lag p99, ms", run["lag_ms"]["p99"], 50.0, False))
    return rows


def passed(value: float, limit: float, at_least: bool) -> bool:
    return value >= limit if at_least else value <= limit


def show(found: dict[str, Any], console: Console) -> None:
    """Print everything as tables."""
    for part in ("requests", "tokens"):
        if part in found:
            table = Table(part, "per s", "min - max", "per CPU s", "failed", box=box.SIMPLE)
            for name, row in found[part].items():
                low, high = row["spread"]
                cells = (f"{row['rate']:.0f}", f"{low:.0f} - {high:.0f}", f"{row['per_cpu_s']:.0f}")
                table.add_row(name, *cells, str(row["failures"]))
            console.print(table)
    if "first" in found:
        times = found["first"]["first_ms"]
        console.print(f"first byte, ms: p50 {times['p50']:.2f}, p99 {times['p99']:.2f}")
    for name, run in found.get("streams", {}).items():
        lag, memory = run["lag_ms"], run["memory_mb"]
        console.print(
            f"{name}: {run['answers']} streams, lag p50 {lag['p50']:.1f} ms, p99 {lag['p99']:.1f},"
            f" memory {memory['before']:.0f} -> {memory['peak']:.0f} MB"
        )
    table = Table("goal", "value", "limit", "", box=box.SIMPLE)
    for name, value, limit, at_least in goals(found):
        verdict = "[green]pass[/]" if passed(value, limit, at_least) else "[red]FAIL[/]"
        table.add_row(name, f"{value:.3g}", f"{'≥' if at_least else '≤'} {limit:g}", verdict)
    console.print(table)


async def run(parts: Sequence[str], size: RouterSize, model: Path, folder: Path) -> dict[str, Any]:
    """Measure `parts`; return values for JSON."""
    cores = sorted(os.sched_getaffinity(0))
    others = frozenset(cores[1:] or cores)
    work = {"requests": requests, "tokens": tokens, "first": first, "streams": streams}
    found: dict[str, Any] = {}
    async with redis(folder, others) as url:
        bench = Bench(size, ProcessPlan(model, cores[0], others, redis_url=url), folder)
        for part in parts:
            found[part] = await work[part](bench)
    rows = [
        {"name": n, "value": v, "limit": limit, "passed": passed(v, limit, at_least)}
        for n, v, limit, at_least in goals(found)
    ]
    return {"machine": {"cores": len(cores)}, "redis": url is not None, **found, "goals": rows}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Return 0 if everything ran, whatever the goals say; 1 if a part could
    not.
    """
    parser = argparse.ArgumentParser(
        prog="python -m bench.router", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--quick", action="store_true", help="a smoke test: sizes mean nothing")
    parser.add_argument("--parts", default=",".join(PARTS), help="of " + ", ".join(PARTS))
    parser.add_argument("--model", type=Path, default=Path("demo_model"), help="its tokenizer")
    given = parser.parse_args(arguments)
    parts = given.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"unknown parts: {', '.join(sorted(unknown))}")
    console = Console()
    try:
        with tempfile.TemporaryDirectory(prefix="baton-bench-") as folder:
            size = QUICK if given.quick else WHOLE
            result = asyncio.run(run(parts, size, given.model, Path(folder)))
    except BatonError as error:
        console.print(f"bench.router: {error}", style="red", markup=False, soft_wrap=True)
        return 1
    if given.json:
        sys.stdout.write(json.dumps(result, indent=2) + "\n")
    else:
        show(result, console)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
