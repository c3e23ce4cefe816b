"""Figure 2 of the transfer benchmark: from "prefill finished" until the decode node may decode.

A real engine in process P computes a prompt and publishes it layer by layer; D is another process.
Layer-wise: D subscribes when P starts. Whole: D asks when P has finished. P and D use the clock of
the machine.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any, Final

from bench.transfer_link import ShapedLink, spread
from bench.transfer_throughput import open_ways

WARM_UP: Final = 64  # tokens: opens the connections, wakes the model's kernels


@dataclass(frozen=True, slots=True)
class TailPlan:
    model: str
    tokens: int
    rounds: int
    threads: int


@dataclass(slots=True)
class Tails:
    """Times of one lane in milliseconds, a value per round.

    `layer_wise` and `whole` count from token 1 (`whole` from D's question, just after token 1).
    `from_last_layer` is the layer-wise time from the KV of the last layer, so it includes the rest
    of that layer, the head and the sampler.
    """

    layer_wise: list[float] = field(default_factory=list[float])
    from_last_layer: list[float] = field(default_factory=list[float])
    whole: list[float] = field(default_factory=list[float])
    prefill: list[float] = field(default_factory=list[float])
    prefill_alone: list[float] = field(default_factory=list[float])

    def row(self, lane: str) -> dict[str, Any]:
        return {
            "lane": lane,
            "layer_wise_ms": spread(self.layer_wise),
            "from_last_layer_ms": spread(self.from_last_layer),
            "whole_ms": spread(self.whole),
            "prefill_ms": spread(self.prefill),
            "prefill_alone_ms": spread(self.prefill_alone),
        }


async def measure(
    ways: list[str], plan: TailPlan, cores: tuple[list[int], list[int]]
) -> dict[str, Any]:
    """Measure all ways in turn, and return JSON-ready values."""
    async with ShapedLink.spawn(cores[0]) as p, ShapedLink.spawn(cores[1]) as d:
        shape = await p.ask("engine", model=plan.model, tokens=plan.tokens, threads=plan.threads)
        await d.ask("pool", tokens=plan.tokens, **shape)
        shared, _ = await open_ways(p, d, ways, None)
        found = {lane: Tails() for lane in shared}
        for number, lane in enumerate(found):
            await _layer_wise(p, d, min(WARM_UP, plan.tokens), (lane, -1 - number), Tails())
        for index in range(plan.rounds):
            for number, (lane, tails) in enumerate(found.items()):
                seed = 2 * (index * len(found) + number)
                await _layer_wise(p, d, plan.tokens, (lane, seed), tails)
                await _whole(p, d, plan.tokens, (lane, seed + 1), tails)
    num_bytes = 2 * 2 * shape["layers"] * shape["heads"] * shape["dim"] * plan.tokens
    return {
        "tokens": plan.tokens,
        "bytes": num_bytes,  # K and V, two bytes each
        "rounds": plan.rounds,
        "threads": plan.threads,
        "rows": [tails.row(lane) for lane, tails in found.items()],
    }


async def _layer_wise(
    p: ShapedLink, d: ShapedLink, tokens: int, run: tuple[str, int], into: Tails
) -> None:
    lane, seed = run
    begun = await p.ask("prefill", way=lane, seed=seed, tokens=tokens)
    fetching = asyncio.create_task(d.ask("fetch", way=lane, handle=begun["handle"]))
    computed = await p.ask("prefilled")
    fetched = await fetching
    into.layer_wise.append((fetched["ended_at"] - computed["ended_at"]) * 1e3)
    into.from_last_layer.append((fetched["ended_at"] - computed["layer_at"]) * 1e3)
    into.prefill.append((computed["ended_at"] - computed["began_at"]) * 1e3)


async def _whole(
    p: ShapedLink, d: ShapedLink, tokens: int, run: tuple[str, int], into: Tails
) -> None:
    lane, seed = run
    begun = await p.ask("prefill", way=lane, seed=seed, tokens=tokens)
    computed = await p.ask("prefilled")
    fetched = await d.ask("fetch", way=lane, handle=begun["handle"])
    into.whole.append((fetched["ended_at"] - fetched["began_at"]) * 1e3)
    into.prefill_alone.append((computed["ended_at"] - computed["began_at"]) * 1e3)
