"""What arriving prompts do to running streams: `baton bench serve --interference`.

Some streams decode all the time. First nothing else happens; then long prompts keep arriving,
beside the same streams in the same process. The result is the ratio of the streams' p99 time per
token, loaded over idle, which disaggregation is meant to keep low. `apart` and `--colocated` take
turns on the same cores, at the same rate of arrivals.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import httpx

from bench.load import LoadTarget, find_model, open_client
from bench.measure import percentile
from bench.sse import StreamError, parse_lines_async, text_of

PIECE: Final = 10  # tokens of one stream over which a time per token is taken
BUSY: Final = 0.6  # share of a prefill node's time that the arriving prompts take, at rate 0


@dataclass(frozen=True, slots=True)
class InterferencePlan:
    """One phase of `idle_s` seconds, one of `loaded_s`. `rate` 0: found by timing one prompt."""

    streams: int
    idle_s: float
    loaded_s: float
    prompt_tokens: int
    stream_tokens: int
    vocabulary: tuple[int, int]
    rate: float = 0.0


@dataclass(slots=True)
class Gaps:
    """Times between tokens of all streams in one phase, in seconds."""

    single: list[float] = field(default_factory=list[float])
    pieces: list[float] = field(default_factory=list[float])  # means of PIECE gaps in a row
    begun: float = 0.0

    def row(self) -> dict[str, float]:
        """Return milliseconds per token: p50 and p99 of the means, and of single gaps."""
        found: dict[str, float] = {"tokens": float(len(self.single))}
        for name, values in (("tpot", self.pieces), ("gap", self.single)):
            ordered = sorted(values)
            for share in (0.5, 0.99):
                key = f"{name}_p{round(share * 100)}_ms"
                found[key] = percentile(ordered, share) * 1e3 if ordered else float("nan")
        return found


class Streams:
    """Requests that decode without end. `phase` is where their gaps are counted now."""

    def __init__(self, client: httpx.AsyncClient, model: str, plan: InterferencePlan) -> None:
        self._client = client
        self._model = model
        self._plan = plan
        self._draw = random.Random(0)
        self.phase = Gaps()
        self.num_begun = 0
        self.all_begun = asyncio.Event()

    def body(self, prompt_tokens: int, max_tokens: int) -> dict[str, Any]:
        """Return a request whose prompt nobody has sent before."""
        first, last = self._plan.vocabulary
        prompt = [self._draw.randrange(first, last) for _ in range(prompt_tokens)]
        return {
            "model": self._model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0,
            "stream": True, "ignore_eos": True,
        }  # fmt: skip

    async def run_one(self) -> None:
        """Send one request after the other, until cancelled."""
        while True:
            last: float | None = None
            row: list[float] = []
            phase = self.phase
            body = self.body(16, self._plan.stream_tokens)
            async for now in self.pieces(body):
                if phase is not self.phase:
                    phase, row, last = self.phase, [], None
                if last is None:
                    self._note_begun()
                else:
                    phase.single.append(now - last)
                    row.append(now - last)
                    if len(row) == PIECE:
                        phase.pieces.append(sum(row) / PIECE)
                        row = []
                last = now

    async def pieces(self, body: dict[str, Any]) -> AsyncIterator[float]:
        """Yield the times of the pieces of one answer. Raises StreamError, httpx.HTTPError."""
        async with self._client.stream("POST", "/v1/completions", json=body) as response:
            if not response.is_success:
                await response.aread()
                raise StreamError(f"HTTP {response.status_code}: {response.text[:200]}")
            async for chunk in parse_lines_async(response.aiter_lines()):
                if text_of(chunk):
                    yield time.monotonic()

    async def first_s(self, body: dict[str, Any]) -> float:
        """Return the seconds until the first piece of an answer; wait for the answer's end."""
        began = time.monotonic()
        times = [now - began async for now in self.pieces(body)]
        if not times:
            raise StreamError("an empty answer")
        return times[0]

    def _note_begun(self) -> None:
        self.num_begun += 1
        if self.num_begun >= self._plan.streams:
            self.all_begun.set()


async def measure(target: LoadTarget, plan: InterferencePlan) -> dict[str, Any]:
    """Measure both phases against one server; return values for JSON."""
    async with open_client(target) as client:
        streams = Streams(client, await find_model(client, target), plan)
        rate = plan.rate or await _fitting_rate(streams, plan)
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(streams.run_one()) for _ in range(plan.streams)]
            async with asyncio.timeout(target.timeout_s):
                await streams.all_begun.wait()
            idle = streams.phase = Gaps()
            await asyncio.sleep(plan.idle_s)
            loaded = streams.phase = Gaps()
            ttfts = await _arrive(streams, plan, rate)
            streams.phase = Gaps()
            for task in running:
                task.cancel()
    rows = {"idle": idle.row(), "loaded": loaded.row()}
    ratio = {
        name: rows["loaded"][name] / rows["idle"][name] for name in ("tpot_p99_ms", "gap_p99_ms")
    }
    found = {"prompts": len(ttfts), "ttft_p50_ms": statistics.median(ttfts) * 1e3 if ttfts else 0}
    return {"rate": rate, **rows, "loaded_over_idle": ratio, **found}


async def _fitting_rate(streams: Streams, plan: InterferencePlan) -> float:
    """Return the prompts per second that keep one prefill node busy for BUSY of the time."""
    seconds = [await streams.first_s(streams.body(plan.prompt_tokens, 1)) for _ in range(3)]
    return BUSY / min(seconds)


async def _arrive(streams: Streams, plan: InterferencePlan, rate: float) -> list[float]:
    """Send prompts at `rate`, evenly, so that rounds have equal load; return their TTFTs."""
    ttfts: list[float] = []

    async def ask() -> None:
        ttfts.append(await streams.first_s(streams.body(plan.prompt_tokens, 1)))

    began = time.monotonic()
    async with asyncio.TaskGroup() as group:
        for index in range(max(1, round(rate * plan.loaded_s))):
            await asyncio.sleep(began + index / rate - time.monotonic())
            group.create_task(ask())
    return ttfts


def summary(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return, per mode, the median over rounds of the ratio loaded / idle, and its spread."""
    found: dict[str, Any] = {}
    for mode in dict.fromkeys(each["mode"] for each in rounds):
        mine = [each for each in rounds if each["mode"] == mode]
        found[mode] = {
            name: {"median": statistics.median(values), "min": min(values), "max": max(values)}
            for name in ("tpot_p99_ms", "gap_p99_ms")
            if (values := [each["loaded_over_idle"][name] for each in mine])
        }
    return found
