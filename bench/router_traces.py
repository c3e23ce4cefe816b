"""What traces cost: `python -m bench.router_traces [--rounds N] [--tokens N]`. Linux.

Two clusters of real processes (router, prefill node, decode node) run at the same time, one with
`--otlp-traces-endpoint` and a collector that throws spans away. Requests come in turns, 8 at once:

    off        to the cluster without traces
    unsampled  to the other one, with a `traceparent` whose flag asks for no trace
    traced     to the other one, all traced

A figure is CPU time per request, all threads, from the kernel's nanoseconds: median (least - most)
over the rounds. A ratio is taken turn by turn. `exporters` are the children that send spans.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import AsyncGenerator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import grpc
import httpx
from rich import box
from rich.console import Console
from rich.table import Table

from bench.measure import median_and_range
from bench.router_processes import Program, program

SERVICE: Final = "opentelemetry.proto.collector.trace.v1.TraceService"
TURNS: Final = ("off", "unsampled", "traced")
# The first pair is of two clusters, which never cost quite the same; the second is of one.
PAIRS: Final = (("unsampled", "off"), ("traced", "unsampled"))
FLAGS: Final = {"off": "00", "unsampled": "00", "traced": "01"}
AT_ONCE: Final = 8
PROMPT_TOKENS: Final = 128
LINGER_S: Final = 1.5  # after a turn: what is queued is exported
WIDTH: Final = 140  # of the table
ASK_S: Final = 300.0


@dataclass(frozen=True, slots=True)
class TraceCase:
    """What is asked: `requests` per turn, each of `tokens` output tokens."""

    model: Path
    rounds: int
    requests: int
    tokens: int


@dataclass(frozen=True, slots=True)
class TracedCluster:
    """The processes of one cluster by name, the router first."""

    programs: dict[str, Program]

    def cpu_s(self) -> dict[str, float]:
        """Return the CPU seconds of each process so far, and of all their children."""
        found = {name: _cpu_s(each.pid) for name, each in self.programs.items()}
        children = [child for each in self.programs.values() for child in _children(each.pid)]
        return found | {"exporters": sum(map(_cpu_s, children))}


@dataclass(slots=True)
class TraceFigures:
    """CPU microseconds per request, by turn and process, one per round."""

    values: dict[str, dict[str, list[float]]] = field(
        default_factory=lambda: {turn: {} for turn in TURNS}
    )

    def add(self, turn: str, spent_us: dict[str, float]) -> None:
        whole = sum(spent_us.values())
        for name, each in {**spent_us, "all": whole}.items():
            self.values[turn].setdefault(name, []).append(each)

    def ratios(self, name: str, turn: str, other: str) -> list[float]:
        """Return a turn's figures of a process over those of another turn."""
        pairs = zip(self.values[turn][name], self.values[other][name], strict=True)
        return [each / beside for each, beside in pairs]


def _cpu_s(pid: int) -> float:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def _children(pid: int) -> list[int]:
    """Return the exporters among the children of a process."""
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(child) for child in text.split() if "tracing" in _command(int(child))]


def _command(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text()


@contextmanager
def collector() -> Iterator[str]:
    """Accept spans over gRPC and forget them; yield the endpoint."""
    server = grpc.server(ThreadPoolExecutor(2))
    forget = grpc.unary_unary_rpc_method_handler(lambda request, context: b"")
    server.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler(SERVICE, {"Export": forget})]
    )
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


@asynccontextmanager
async def cluster(model: Path, flags: Sequence[str]) -> AsyncGenerator[TracedCluster, None]:
    """Run a prefill node, a decode node and a router, all with `flags`."""
    cores = os.sched_getaffinity(0)
    given = ["--model", str(model), "--log-level", "warning", *flags]
    async with AsyncExitStack() as stack:
        nodes: dict[str, Program] = {}
        for role in ("prefill", "decode"):
            node = program(
                f"{role}_node", [*given, "--num-kv-blocks", "512", "--threads", "1"], cores
            )
            nodes[role] = await stack.enter_async_context(node)
        ports = ["--port", "0", "--grpc-port", "0", "--drain-s", "0"]
        for role, node in nodes.items():
            ports += [f"--{role}-node", str(node.ready["address"])]
        router = await stack.enter_async_context(program("router", [*given, *ports], cores))
        yield TracedCluster({"router": router, **nodes})


async def ask(router: Program, case: TraceCase, turn: str, number: int) -> None:
    """Ask `case.requests` times, AT_ONCE at once. Raises httpx.HTTPError."""
    room = asyncio.Semaphore(AT_ONCE)
    async with httpx.AsyncClient(
        base_url=f"http://127.0.0.1:{router.port}", timeout=ASK_S, trust_env=False
    ) as http:

        async def one(index: int) -> None:
            start = 1 + (number * case.requests + index) * PROMPT_TOKENS
            body: dict[str, Any] = {
                "prompt": [10 + (start + place * 7) % 400 for place in range(PROMPT_TOKENS)],
                "max_tokens": case.tokens, "temperature": 0, "ignore_eos": True,
            }  # fmt: skip
            trace = f"00-{start:032x}-{start:016x}-{FLAGS[turn]}"
            async with room:
                answer = await http.post(
                    "/v1/completions", json=body, headers={"traceparent": trace}
                )
                answer.raise_for_status()

        await asyncio.gather(*(one(index) for index in range(case.requests)))


async def measure(case: TraceCase) -> TraceFigures:
    """Ask in turns; the first round is thrown away."""
    found = TraceFigures()
    with collector() as endpoint:
        async with AsyncExitStack() as stack:
            off = await stack.enter_async_context(cluster(case.model, ()))
            flags = ("--otlp-traces-endpoint", endpoint)
            on = await stack.enter_async_context(cluster(case.model, flags))
            await asyncio.sleep(LINGER_S)  # nodes say hello
            for number in range(1 + case.rounds):
                for turn in TURNS if number % 2 else reversed(TURNS):
                    asked = off if turn == "off" else on
                    before = asked.cpu_s()
                    await ask(asked.programs["router"], case, turn, number)
                    await asyncio.sleep(LINGER_S)
                    if number:
                        after = asked.cpu_s()
                        scale = 1e6 / case.requests
                        spent = {name: scale * (after[name] - before[name]) for name in after}
                        found.add(turn, spent)
    return found


def show(found: TraceFigures, console: Console) -> None:
    names = [" / ".join(pair) for pair in PAIRS]
    table = Table("CPU us per request", *TURNS, *names, box=box.SIMPLE)
    for name in found.values["off"]:
        values = [median_and_range(found.values[turn][name], 0) for turn in TURNS]
        ratios: list[str] = []
        if name != "exporters":
            ratios = [median_and_range(found.ratios(name, *pair), 2) for pair in PAIRS]
        table.add_row(name, *values, *ratios)
    console.print(table)


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.router_traces", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--model", type=Path, default=Path("demo_model"))
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--requests", type=int, default=32, help="per turn")
    parser.add_argument("--tokens", type=int, default=64, help="output tokens of a request")
    given = parser.parse_args(arguments)
    case = TraceCase(given.model, given.rounds, given.requests, given.tokens)
    show(asyncio.run(measure(case)), Console(width=WIDTH))
    return 0


if __name__ == "__main__":
    sys.exit(main())
