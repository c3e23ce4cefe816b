"""Figure 3 of the transfer benchmark: what a client sees of the hand-over on an idle system.

One prefill node, one decode node, and two routers before them: `apart` knows both, `local` knows
the decode node alone, which then prefills itself. The same prompts go to both, one request at a
time, alternating; nodes have as many cores each. So TTFT(apart) - TTFT(local) is what the hand-over
costs token 1, and the second gap of a stream less its later ones is what it costs token 2.
"""

from __future__ import annotations

import asyncio
import json
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

from baton.errors import ConfigError
from bench.sse import parse_lines_async, text_of
from bench.transfer_link import spread

START_S: Final = 180.0
STOP_S: Final = 20.0
OUTPUT: Final = 12
FIRST_TOKEN: Final = 300  # plain words, whatever the demo tokenizer keeps below


@dataclass(frozen=True, slots=True)
class ClientPlan:
    model: str
    lengths: Sequence[tuple[int, int]]  # (tokens, repetitions)
    lane_flags: Sequence[str] = ()


@dataclass(slots=True)
class Seen:
    """Milliseconds of each answer to prompts of one length, from one router."""

    ttft: list[float] = field(default_factory=list[float])
    second: list[float] = field(default_factory=list[float])  # token 1 -> token 2
    step: list[float] = field(default_factory=list[float])  # median of the later gaps


@asynccontextmanager
async def process(module: str, *flags: str) -> AsyncGenerator[dict[str, Any], None]:
    """`python -m module`; yields its READY line. Raises ConfigError if it does not come up."""
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
            yield json.loads(line)
        finally:
            if running.returncode is None:
                running.terminate()
            try:
                await asyncio.wait_for(running.wait(), STOP_S)
            except TimeoutError:
                running.kill()
                await running.wait()


@asynccontextmanager
async def two_routers(
    plan: ClientPlan, cores: tuple[list[int], list[int]]
) -> AsyncGenerator[dict[str, str], None]:
    """URLs of the routers `apart` and `local` before one prefill and one decode node."""
    model = ("--model", plan.model, "--served-model-name", "m", "--log-level", "warning")
    node = (
        *model, "--num-kv-blocks", "256", "--drain-s", "0",
        "--no-enable-prefix-caching", *plan.lane_flags,
    )  # fmt: skip
    async with AsyncExitStack() as stack:

        async def start(module: str, *flags: str) -> dict[str, Any]:
            return await stack.enter_async_context(process(module, *flags))

        p = await start("prefill_node", *node, "--cpu-cores", ",".join(map(str, cores[0])))
        d = await start("decode_node", *node, "--cpu-cores", ",".join(map(str, cores[1])))
        router = (
            *model, "--port", "0", "--grpc-port", "0", "--drain-s", "0",
            "--decode-node", str(d["address"]),
        )  # fmt: skip
        local = await start("router", *router)
        apart = await start("router", *router, "--prefill-node", str(p["address"]))
        yield {"local": f"http://{local['address']}", "apart": f"http://{apart['address']}"}


async def ask(client: httpx.AsyncClient, prompt: list[int]) -> list[float]:
    """Send one prompt; seconds from the question to each piece of its answer."""
    body = {
        "model": "m", "prompt": prompt, "max_tokens": OUTPUT, "temperature": 0, "stream": True,
        "ignore_eos": True,
    }  # fmt: skip
    began = time.monotonic()
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if not response.is_success:
            await response.aread()
            raise ConfigError(f"HTTP {response.status_code}: {response.text[:200]}")
        return [
            time.monotonic() - began
            async for chunk in parse_lines_async(response.aiter_lines())
            if text_of(chunk)
        ]


def note(times: list[float], seen: Seen) -> None:
    """Pieces without text are not seen, so gaps are only taken of whole answers."""
    seen.ttft.append(times[0] * 1e3)
    if len(times) == OUTPUT:
        gaps = [(b - a) * 1e3 for a, b in pairwise(times)]
        seen.second.append(gaps[0])
        seen.step.append(statistics.median(gaps[1:]))


def row(length: int, apart: Seen, local: Seen) -> dict[str, Any]:
    """One length, as JSON-ready values (ms)."""
    added = [a - b for a, b in zip(apart.ttft, local.ttft, strict=True)]
    found: dict[str, Any] = {
        "tokens": length,
        "repetitions": len(apart.ttft),
        "ttft_apart_ms": spread(apart.ttft),
        "ttft_local_ms": spread(local.ttft),
        "ttft_added_ms": spread(added),
    }
    if apart.second and local.second:
        beyond = [second - step for second, step in zip(apart.second, apart.step, strict=True)]
        found["token2_ms"] = spread(apart.second)
        found["step_ms"] = spread(apart.step)
        found["token2_beyond_step_ms"] = spread(beyond)
        found["token2_local_ms"] = spread(local.second)
    return found


async def measure(plan: ClientPlan, cores: tuple[list[int], list[int]]) -> dict[str, Any]:
    """All lengths; both routers in turn, the first of each pair alternating too."""
    draw = random.Random(0)
    vocab = int(json.loads((Path(plan.model) / "config.json").read_text())["vocab_size"])
    rows: list[dict[str, Any]] = []
    async with two_routers(plan, cores) as urls, AsyncExitStack() as stack:
        clients = {
            name: await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=120.0))
            for name, url in urls.items()
        }
        for length, repetitions in plan.lengths:
            seen = {name: Seen() for name in clients}
            for index in range(-2, repetitions):
                order = list(clients) if index % 2 else list(clients)[::-1]
                for name in order:
                    prompt = [draw.randrange(FIRST_TOKEN, vocab) for _ in range(length)]
                    note(await ask(clients[name], prompt), Seen() if index < 0 else seen[name])
            rows.append(row(length, seen["apart"], seen["local"]))
    return {"rows": rows}
