"""Figure 3 of the transfer benchmark: what a client sees of the hand-over on an idle system.

Per lane and model there are a prefill node, a decode node, a second decode node on the prefill
node's own cores, and two routers: `apart` knows the first two nodes, `local` only the third, which
prefills itself. Prompts of one length go to both routers, one request at a time, alternating. So
TTFT(apart) - TTFT(local), pair by pair and computed by the same cores, is what the hand-over costs
token 1. The second gap of a stream less its later ones is what it costs token 2. CPU time separates
the hand-over from other load: what the prefill node had spent when token 1 was there, less what the
third node had spent for the same prompt alone. A small model shows what a request costs whatever it
computes; beside the seconds of a large model, two equal processes differ by more than that.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import httpx

from baton.protocol.errors import ConfigError
from bench.children import stop
from bench.sse import parse_lines_async, text_of
from bench.transfer_link import spread

START_S: Final = 180.0
STOP_S: Final = 20.0
ANSWER_S: Final = 120.0
WARM_UP: Final = 2  # pairs whose times do not count: connections open, kernels wake
OUTPUT: Final = 12
FIRST_TOKEN: Final = 300  # plain words, whatever the demo tokenizer keeps below


@dataclass(frozen=True, slots=True)
class ClientPlan:
    """What to run. `lane` and `name` name the rows. `lane_flags` are flags of all nodes."""

    name: str
    model: str
    lengths: Sequence[tuple[int, int]]  # (tokens, repetitions)
    lane: str = "stream"
    lane_flags: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class ClientWay:
    """A router to ask, and the process that computes its prompts."""

    url: str
    prefill_pid: int


@dataclass(slots=True)
class Seen:
    """Milliseconds of each answer to prompts of one length, from one router."""

    ttft: list[float] = field(default_factory=list[float])
    cpu: list[float] = field(default_factory=list[float])  # of the computing node, until token 1
    second: list[float] = field(default_factory=list[float])  # token 1 -> token 2
    step: list[float] = field(default_factory=list[float])  # median of the later gaps


@asynccontextmanager
async def process(module: str, *flags: str) -> AsyncGenerator[dict[str, Any], None]:
    """Run `python -m module`; yield its READY line. Raises ConfigError if it does not come up."""
    with tempfile.TemporaryFile() as log:
        running = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", module, *flags),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert running.stdout is not None, "it was given a pipe"
        try:
            async with asyncio.timeout(START_S):
                line = await running.stdout.readline()
            if not line:
                log.seek(0)
                raise ConfigError(f"{module} ended: {log.read()[-2000:].decode(errors='replace')}")
            yield {**json.loads(line), "pid": running.pid}
        finally:
            await stop(running, STOP_S)


@asynccontextmanager
async def two_routers(
    plan: ClientPlan, cores: tuple[list[int], list[int]]
) -> AsyncGenerator[dict[str, ClientWay], None]:
    """Run the routers `apart` and `local` with their nodes."""
    model = ("--model", plan.model, "--served-model-name", "m", "--log-level", "warning")
    node = (
        *model, "--num-kv-blocks", "256", "--drain-s", "0",
        "--no-enable-prefix-caching", *plan.lane_flags,
    )  # fmt: skip
    async with AsyncExitStack() as stack:

        async def start(module: str, *flags: str) -> dict[str, Any]:
            return await stack.enter_async_context(process(module, *flags))

        p = await start("prefill_node", *node, "--cpu-cores", ",".join(map(str, cores[0])))
        alone = await start("decode_node", *node, "--cpu-cores", ",".join(map(str, cores[0])))
        d = await start("decode_node", *node, "--cpu-cores", ",".join(map(str, cores[1])))
        router = (
            *model, "--port", "0", "--grpc-port", "0", "--drain-s", "0",
            "--prefill-placement", "remote",
        )  # fmt: skip
        local = await start("router", *router, "--decode-node", str(alone["address"]))
        apart = await start(
            "router", *router, "--decode-node", str(d["address"]),
            "--prefill-node", str(p["address"]),
        )  # fmt: skip
        yield {
            "local": ClientWay(f"http://{local['address']}", alone["pid"]),
            "apart": ClientWay(f"http://{apart['address']}", p["pid"]),
        }


def cpu_s(pid: int) -> float:
    """Return the CPU seconds that the live threads of a process have spent."""
    total = 0
    for thread in Path(f"/proc/{pid}/task").iterdir():
        try:
            total += int((thread / "schedstat").read_text().split()[0])
        except (OSError, IndexError):  # it has just ended, or the kernel keeps no such figures
            continue
    return total * 1e-9


async def ask(client: httpx.AsyncClient, prompt: list[int], pid: int) -> tuple[list[float], float]:
    """Send one prompt.

    Return the seconds from the question to each piece of its answer, and the CPU seconds that `pid`
    spent until the first piece.
    """
    body = {
        "model": "m", "prompt": prompt, "max_tokens": OUTPUT, "temperature": 0, "stream": True,
        "ignore_eos": True,
    }  # fmt: skip
    times: list[float] = []
    spent = -cpu_s(pid)
    began = time.monotonic()
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if not response.is_success:
            await response.aread()
            raise ConfigError(f"HTTP {response.status_code}: {response.text[:200]}")
        async for chunk in parse_lines_async(response.aiter_lines()):
            if text_of(chunk):
                times.append(time.monotonic() - began)
                if len(times) == 1:
                    spent += cpu_s(pid)
    return times, spent


def note(times: list[float], spent_s: float, seen: Seen) -> None:
    """Add one answer to `seen`. Gaps are taken of complete answers only: pieces without text are
    unseen.
    """
    seen.ttft.append(times[0] * 1e3)
    seen.cpu.append(spent_s * 1e3)
    if len(times) == OUTPUT:
        gaps = [(b - a) * 1e3 for a, b in pairwise(times)]
        seen.second.append(gaps[0])
        seen.step.append(statistics.median(gaps[1:]))


def confident(values: Sequence[float]) -> dict[str, float]:
    """Return `spread`, and the 95 % interval of the true median (order statistics)."""
    ordered, count = sorted(values), len(values)
    outside = max(0, math.floor((count - 1.96 * math.sqrt(count)) / 2))
    return {**spread(values), "low": ordered[outside], "high": ordered[count - 1 - outside]}


def row(plan: ClientPlan, length: int, apart: Seen, local: Seen) -> dict[str, Any]:
    """Return one length of one model on one lane, as values for JSON (ms)."""
    added = [a - b for a, b in zip(apart.ttft, local.ttft, strict=True)]
    cpu = [a - b for a, b in zip(apart.cpu, local.cpu, strict=True)]
    found: dict[str, Any] = {
        "model": plan.name,
        "lane": plan.lane,
        "tokens": length,
        "repetitions": len(apart.ttft),
        "ttft_apart_ms": confident(apart.ttft),
        "ttft_local_ms": confident(local.ttft),
        "ttft_added_ms": confident(added),
        "cpu_added_ms": confident(cpu),
    }
    if apart.second and local.second:
        beyond = [second - step for second, step in zip(apart.second, apart.step, strict=True)]
        found["token2_ms"] = spread(apart.second)
        found["step_ms"] = spread(apart.step)
        found["token2_beyond_step_ms"] = spread(beyond)
        found["token2_local_ms"] = spread(local.second)
    return found


async def measure(plan: ClientPlan, cores: tuple[list[int], list[int]]) -> dict[str, Any]:
    """Measure all lengths; both routers in turns, and each is first in every second pair."""
    draw = random.Random(0)
    vocab = int(json.loads((Path(plan.model) / "config.json").read_text())["vocab_size"])
    rows: list[dict[str, Any]] = []
    async with two_routers(plan, cores) as ways, AsyncExitStack() as stack:
        clients = {
            name: await stack.enter_async_context(
                httpx.AsyncClient(base_url=way.url, timeout=ANSWER_S)
            )
            for name, way in ways.items()
        }
        for length, repetitions in plan.lengths:
            seen = {name: Seen() for name in clients}
            for index in range(-WARM_UP, repetitions):
                order = list(clients) if index % 2 else list(clients)[::-1]
                for name in order:
                    prompt = [draw.randrange(FIRST_TOKEN, vocab) for _ in range(length)]
                    answer = await ask(clients[name], prompt, ways[name].prefill_pid)
                    note(*answer, Seen() if index < 0 else seen[name])
            rows.append(row(plan, length, seen["apart"], seen["local"]))
    return {"rows": rows}


async def measure_lanes(
    models: Sequence[tuple[str, str, Sequence[tuple[int, int]]]],
    lanes: Sequence[str],
    cores: tuple[list[int], list[int]],
) -> dict[str, Any]:
    """Call `measure` for each model (name, folder, lengths) and lane.

    Lanes that nodes cannot open here are in `missing`, with the reason.
    """
    rows: list[dict[str, Any]] = []
    missing: dict[str, str] = {}
    for name, model, lengths in models:
        for lane in lanes:
            plan = ClientPlan(name, model, lengths, lane, ("--kv-lanes", lane))
            try:
                rows += (await measure(plan, cores))["rows"]
            except ConfigError as error:
                missing[lane] = error.message
    return {"rows": rows, "missing": missing}
