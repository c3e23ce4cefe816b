"""What Baton's own code saves over a library's: `python -m bench.own_copies [--parts ...]`.

CPU microseconds per request, own code and library in turns; median, least and most. A request takes
some 600 us of the router's CPU. Own code that saves less than 3 % of that does not stay.

    tallies    the metrics of a request, by its number of steps: router/tallies.py or
               prometheus-client
    http       an echo over HTTP: uvicorn alone; and with limits around it, which uvicorn lacks
               (router/server/http_guard.py, http_parser.py)
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import prometheus_client
import uvicorn
import uvloop
from prometheus_client import CollectorRegistry
from rich import box
from rich.console import Console
from rich.table import Table
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from baton.protocol.sampling import SamplingParams
from baton.runtime.metrics import MetricSpec
from bench.children import say_ready
from bench.router import QUICK, Bench
from bench.router_processes import ProcessPlan, Program, program
from router import tallies
from router.metrics import router as router_metrics
from router.metrics import vllm as vllm_metrics
from router.metrics.router import RouterMetrics
from router.request.trace import RequestTrace
from router.server.http_guard import HttpLimits, uvicorn_settings

PARTS: Final = ("tallies", "http")
STEPS: Final = (1, 16, 64)
REQUESTS: Final = 3000  # of one round of tallies
SERVERS: Final = ("uvicorn", "with limits")
Figures = dict[str, list[float]]  # name -> CPU microseconds of each round


# ---- metrics ----


def with_library() -> RouterMetrics:
    """Return a router's metrics whose counters and histograms are prometheus-client's."""

    def counter(spec: MetricSpec, registry: CollectorRegistry) -> Any:
        return prometheus_client.Counter(spec.name, spec.meaning, spec.labels, registry=registry)

    def histogram(spec: MetricSpec, registry: CollectorRegistry) -> Any:
        return prometheus_client.Histogram(
            spec.name, spec.meaning, spec.labels, buckets=spec.buckets, registry=registry
        )

    modules: tuple[Any, ...] = (router_metrics, vllm_metrics)
    for module in modules:
        module.Histogram = histogram
    router_metrics.Counter = counter  # pyright: ignore
    try:
        return RouterMetrics()
    finally:
        for module in modules:
            module.Histogram = tallies.Histogram
        router_metrics.Counter = tallies.Counter


def one_request(metrics: RouterMetrics, steps: int) -> None:
    """Count everything that a streamed chat of `steps` messages counts."""
    meter = metrics.begin("model", 1.0)
    meter.params = SamplingParams(max_tokens=steps)
    for step in range(steps):
        meter.tokens(1.5 + 0.01 * step, 1)
    trace = RequestTrace(dispatched_at=1.125, prefill_node="p", decode_node="d", handover_at=1.6)
    meter.end(3.0, trace, 11, "length")


def measure_tallies(rounds: int) -> dict[str, Figures]:
    """Return the figures by the number of a request's steps."""
    kinds = {"own": RouterMetrics(), "prometheus-client": with_library()}
    found: dict[str, Figures] = {f"metrics, {steps} steps": {} for steps in STEPS}
    for _ in range(rounds):
        for steps, figures in zip(STEPS, found.values(), strict=True):
            for name, metrics in kinds.items():
                began = time.process_time()
                for _ in range(REQUESTS):
                    one_request(metrics, steps)
                spent = (time.process_time() - began) / REQUESTS
                figures.setdefault(name, []).append(1e6 * spent)
    return found


# ---- HTTP ----


class Quiet(uvicorn.Server):
    """A server that leaves the signals to `serve`."""

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


async def serve() -> None:
    """Run both echoes in one process until SIGTERM, so that the machine is the same for both."""

    async def echo(request: Request) -> Response:
        return Response(await request.body(), media_type="application/json")

    app = Starlette(routes=[Route("/echo", echo, methods=["POST"])])
    listeners = {name: socket.create_server(("127.0.0.1", 0)) for name in SERVERS}
    ports = {name: int(each.getsockname()[1]) for name, each in listeners.items()}
    servers: dict[str, uvicorn.Server] = {}
    for name in SERVERS:
        settings = uvicorn_settings(HttpLimits())
        settings |= {"http": "httptools"} if name == "uvicorn" else {}
        servers[name] = Quiet(uvicorn.Config(app, log_config=None, **settings))

    def end() -> None:
        for server in servers.values():
            server.should_exit = True

    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, end)
    say_ready(ports=ports)
    await asyncio.gather(*(server.serve([listeners[name]]) for name, server in servers.items()))


async def measure_http(rounds: int, folder: Path) -> dict[str, Figures]:
    cores = sorted(os.sched_getaffinity(0))
    plan = ProcessPlan(Path(), cores[0], frozenset(cores[1:] or cores))
    bench = Bench(QUICK, plan, folder)
    found: Figures = {name: [] for name in SERVERS}
    shape: dict[str, object] = {"seconds": 1, "connections": 32, "words": 16, "path": "/echo"}
    async with program("bench.own_copies", ["--serve"], {plan.core}) as started:
        ports: dict[str, int] = started.ready["ports"]
        for _ in range(rounds):
            for name, port in ports.items():
                server = Program(started.pid, {"address": f"127.0.0.1:{port}"})
                seen = await bench.ask(server, "whole", **shape)
                found[name].append(1e6 * seen["cpu_s"] / seen["answers"])
    return {"an echo over HTTP": found}


def show(title: str, found: Figures, console: Console) -> None:
    """Print each figure, and its difference to the one above it in the same round."""
    table = Table(title, "CPU us, median", "min - max", "over the one above", box=box.SIMPLE)
    before: list[float] = []
    for name, values in found.items():
        more = [value - other for value, other in zip(values, before, strict=False)]
        row = [f"{statistics.median(values):.1f}", f"{min(values):.1f} - {max(values):.1f}"]
        if more:
            low, middle, high = statistics.quantiles(more)
            row.append(f"{middle:+.1f}, quartiles {low:+.1f} and {high:+.1f}")
        table.add_row(name, *row)
        before = values
    console.print(table)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.own_copies", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--parts", default=",".join(PARTS), help="of " + ", ".join(PARTS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.serve:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve())
        return 0
    work: dict[str, Callable[[Path], dict[str, Figures]]] = {
        "tallies": lambda _: measure_tallies(given.rounds),
        "http": lambda folder: asyncio.run(measure_http(given.rounds, folder)),
    }
    console = Console()
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as folder:
        for part in given.parts.split(","):
            for title, found in work[part](Path(folder)).items():
                show(title, found, console)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
