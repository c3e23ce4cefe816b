"""CPU time per request beside proxies in Rust: `python -m bench.router_peers --sglang PYTHON ...`.

`--sglang`, `--vllm` and `--smg` each name the interpreter of a virtual environment with one of
`pip install sglang-router`, `vllm-router` and `smg`. Such a router runs in PD mode before two fake
engines over HTTP (bench/router_peer_engines.py), Baton's router before two fake nodes
(bench/router_nodes.py), in alternating rounds. Each router has a core to itself; engines, nodes,
clients and Redis share the others. Two loads: `whole` answers of 16 tokens, and `streams` of one
event per token at a steady pace.

They do not do the same. A proxy writes the body anew, sends it to both engines and passes on the
bytes of one answer. Baton's router renders the chat's template, encodes the text, checks bounds,
queues by tenant, writes a record to Redis (a row without Redis shows the difference), follows the
request over both nodes, decodes tokens, looks for stop texts and counts metrics. The rows of cores
are a prototype that has the necessary steps of a plain whole answer alone, compiled and in Python
(bench/router_core/).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import statistics
import sys
import tempfile
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import httpx
from rich import box
from rich.console import Console
from rich.table import Table

from baton.protocol.errors import BatonError, ConfigError
from bench.children import stop
from bench.measure import median_and_range
from bench.router import QUICK, Bench
from bench.router_processes import (
    START_S,
    STOP_S,
    ProcessPlan,
    Program,
    cluster,
    pinned,
    program,
    redis,
)

ENGINES: Final = "bench.router_peer_engines"
NODES: Final = "bench.router_nodes"
CORES: Final = ("compiled", "python")
PACE_MS: Final = 20.0
LOADS: Final[dict[str, dict[str, int]]] = {
    "whole": {"seconds": 4, "connections": 32, "words": 16, "tokens": 16},
    "streams": {"connections": 64, "words": 16, "tokens": 200},
}
Figures = dict[str, dict[str, list[float]]]  # load -> router -> CPU microseconds, one a round


@dataclass(frozen=True, slots=True)
class Proxy:
    """A router of others: its module, its flags, and the name that it gives the engines' model."""

    module: str
    flags: tuple[str, ...]
    model: str = "demo"


PROXIES: Final = {
    "sglang": Proxy("sglang_router.launch_router", ("--pd-disaggregation",)),
    "vllm": Proxy("vllm_router.launch_router", ("--vllm-pd-disaggregation",)),
    # Engines that do not tell their model are "unknown" to it.
    "smg": Proxy(
        "smg.launch_router", ("--pd-disaggregation", "--disable-tokenizer-autoload"), "unknown"
    ),
}


@asynccontextmanager
async def proxy(peer: Proxy, python: Path, plan: ProcessPlan) -> AsyncGenerator[Program, None]:
    """Run a router of others in PD mode before two fake engines."""
    async with AsyncExitStack() as stack:
        flags = ["--step-ms", str(PACE_MS)]
        engines = await stack.enter_async_context(program(ENGINES, flags, plan.others))
        port, metrics = _free_port(), _free_port()
        prefill = str(engines.ready["prefill"])
        with pinned({plan.core}):
            process = await asyncio.create_subprocess_exec(
                str(python), "-m", peer.module, *peer.flags,
                "--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics),
                # smg asks whether the port of the KV bootstrap listens: any that does will do
                "--prefill", f"http://{prefill}", prefill.rpartition(":")[2],
                "--decode", f"http://{engines.ready['decode']}",
                "--policy", "round_robin", "--log-level", "error",
                "--max-concurrent-requests", "4096",
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.DEVNULL,
            )  # fmt: skip
        try:
            await _answers(port, peer)
            yield Program(process.pid, {"address": f"127.0.0.1:{port}"})
        finally:
            await stop(process, STOP_S)


@asynccontextmanager
async def prototype(core: str, plan: ProcessPlan) -> AsyncGenerator[Program, None]:
    """Run the prototype with one of CORES before two fake nodes."""
    async with AsyncExitStack() as stack:
        model = ["--model", str(plan.model)]
        nodes = await stack.enter_async_context(program(NODES, model, plan.others))
        flags = [*model, "--core", core]
        flags += ["--node", nodes.ready["prefill"], "--node", nodes.ready["decode"][0]]
        if plan.redis_url is not None:
            flags += ["--redis-socket", plan.redis_url.removeprefix("unix://")]
        yield await stack.enter_async_context(
            program("bench.router_core.server", flags, {plan.core})
        )


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


async def _answers(port: int, peer: Proxy) -> None:
    """Wait until a chat is answered. Raises ConfigError if none is in time."""
    message = {"role": "user", "content": "x"}
    body = {"model": peer.model, "messages": [message], "max_tokens": 1}
    try:
        async with asyncio.timeout(START_S), httpx.AsyncClient() as client:
            while not await _is_answered(client, f"http://127.0.0.1:{port}", body):  # noqa: ASYNC110
                await asyncio.sleep(0.2)
    except TimeoutError as error:
        raise ConfigError(f"{peer.module} did not start") from error


async def _is_answered(client: httpx.AsyncClient, url: str, body: dict[str, Any]) -> bool:
    try:
        return (await client.post(f"{url}/v1/chat/completions", json=body)).status_code == 200
    except httpx.HTTPError:
        return False


async def measure(bench: Bench, pythons: dict[str, Path], rounds: int) -> Figures:
    """Return CPU microseconds per answer and per streamed token, of each router in turns.

    `pythons`: the interpreter of each of PROXIES that is to run."""
    found: Figures = {load: {} for load in LOADS}
    with_redis, without = bench.plan, replace(bench.plan, redis_url=None)
    for _ in range(rounds):
        for name, python in pythons.items():
            async with proxy(PROXIES[name], python, bench.plan) as server:
                for load in LOADS:
                    await _ask(found, load, name, bench, server)
        for name, plan in (("baton", with_redis), ("baton, no Redis", without)):
            for load, step_ms in (("whole", None), ("streams", PACE_MS)):
                async with cluster(replace(plan, step_ms=step_ms)) as server:
                    await _ask(found, load, name, bench, server)
        for core in CORES:
            async with prototype(core, with_redis) as server:
                await _ask(found, "whole", f"{core} core", bench, server)
    return found


async def _ask(found: Figures, load: str, name: str, bench: Bench, server: Program) -> None:
    flags: dict[str, Any] = {**LOADS[load]}
    if name in PROXIES:
        flags["model"] = PROXIES[name].model
    seen = await bench.ask(server, load, **flags)
    if seen["failures"] or not seen["answers"]:
        raise ConfigError(f"{name}: {seen['failures']} of its answers failed")
    count = seen["answers"] if load == "whole" else seen["tokens"]
    found[load].setdefault(name, []).append(1e6 * seen["cpu_s"] / count)


def show(found: Figures, console: Console) -> None:
    """Print medians with least and most; ratios to the cheapest proxy are taken round by round."""
    for load, what in (("whole", "answer"), ("streams", "streamed token")):
        rows = found[load]
        proxies = [rows[name] for name in PROXIES if name in rows]
        cheapest = min(proxies, key=statistics.median)
        table = Table("", f"CPU us per {what}", "over the cheapest proxy", box=box.SIMPLE)
        for name, values in rows.items():
            ratios = [value / other for value, other in zip(values, cheapest, strict=True)]
            table.add_row(name, median_and_range(values, 1), median_and_range(ratios, 2))
        console.print(table)


async def run(given: argparse.Namespace, folder: Path) -> Figures:
    cores = sorted(os.sched_getaffinity(0))
    others = frozenset(cores[1:] or cores)
    async with redis(folder, others) as url:
        plan = ProcessPlan(given.model.resolve(), cores[0], others, redis_url=url)
        given_pythons = {name: getattr(given, name) for name in PROXIES}
        pythons = {name: python for name, python in given_pythons.items() if python is not None}
        return await measure(Bench(QUICK, plan, folder), pythons, given.rounds)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Return 1 if a router could not be measured, else 0."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.router_peers", description=(__doc__ or "").partition("\n")[0]
    )
    for name in PROXIES:
        parser.add_argument(f"--{name}", type=Path, help=f"a Python with {PROXIES[name].module}")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", type=Path, default=Path("demo_model"), help="its tokenizer")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    given = parser.parse_args(arguments)
    if not any(getattr(given, name) for name in PROXIES):
        parser.error(f"name at least one of {', '.join(PROXIES)}")
    console = Console()
    try:
        with tempfile.TemporaryDirectory(prefix="baton-bench-") as folder:
            found = asyncio.run(run(given, Path(folder)))
    except BatonError as error:
        console.print(f"bench.router_peers: {error}", style="red", markup=False, soft_wrap=True)
        return 1
    if given.json:
        sys.stdout.write(json.dumps(found, indent=2) + "\n")
    else:
        show(found, console)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
