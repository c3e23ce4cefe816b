"""Two data-parallel ranks against one on the same cores: `python -m bench.data_parallel --model M`.

Starts `baton up --colocated` of a mixture of experts with --data-parallel-size 1, 2 in turns, sends
the same short prompts at once to both, and compares tokens per second and CPU time of all of the
cluster's processes (router and Redis included) per token, round by round. On a machine that does
other work only CPU time holds. See docs/data_parallel.md.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from baton.protocol.errors import ConfigError
from baton.runtime.config import parse
from bench.cluster import cluster
from bench.engine_kit import TimedPart, arguments_parser, tell
from bench.load import LoadTarget, run_workload
from bench.measure import SloLimits, median_and_range, summarize
from bench.start_up import processes
from bench.workload import WorkloadSpec, plan_requests

WORDS: Final = 16  # of a prompt: decode is measured
WARM: Final = 4
NO_LIMITS: Final = SloLimits(float("inf"), float("inf"))


@dataclass(frozen=True, slots=True)
class RankRun:
    """One run: output tokens per second, and milliseconds of CPU time per token."""

    tokens_per_s: float
    cpu_ms: float


def cpu_seconds(pids: Sequence[int]) -> float:
    """Return the CPU time that these processes have taken."""
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


async def serve_once(size: int, given: argparse.Namespace, seed: int) -> RankRun:
    """Start a cluster of `size` ranks and send it all requests at once."""
    flags = ("--model", given.model, "--colocated", "--data-parallel-size", str(size))
    async with cluster(flags) as ready:
        target = LoadTarget(url=str(ready["url"]))
        warm = WorkloadSpec(WARM * size, 0, WORDS, 8, seed=seed + 1_000_003)
        await run_workload(target, plan_requests(warm))
        began = cpu_seconds(pids := processes())
        spec = WorkloadSpec(given.requests, 0, WORDS, given.output_tokens, 0.0, seed=seed)
        run = await run_workload(target, plan_requests(spec))
        cpu = cpu_seconds(pids) - began
        summary = summarize(str(size), run.samples, NO_LIMITS)
    if summary.failed:
        raise ConfigError(f"{summary.failed} of {summary.requests} requests failed")
    return RankRun(summary.token_rate, 1e3 * cpu / summary.output_tokens)


def compared(rounds: Sequence[Mapping[int, RankRun]]) -> list[dict[str, Any]]:
    """Return a row per size: medians, and both ratios to one rank, above 1 if it is faster."""
    return [
        {
            "ranks": size,
            "tokens/s": statistics.median(each[size].tokens_per_s for each in rounds),
            "CPU ms": statistics.median(each[size].cpu_ms for each in rounds),
            "times as fast by CPU time": median_and_range(
                [each[1].cpu_ms / each[size].cpu_ms for each in rounds], 2
            ),
            "by the clock": median_and_range(
                [each[size].tokens_per_s / each[1].tokens_per_s for each in rounds], 2
            ),
        }
        for size in rounds[0]
    ]


async def measure(given: argparse.Namespace) -> list[dict[str, Any]]:
    """Run all rounds; the sizes take turns."""
    rounds: list[dict[int, RankRun]] = []
    for index in range(given.rounds):
        order = (1, 2)[:: -1 if index % 2 else 1]
        found = {size: await serve_once(size, given, index) for size in order}
        rounds.append({size: found[size] for size in (1, 2)})
        sys.stderr.write(json.dumps({k: str(v) for k, v in rounds[-1].items()}) + "\n")
    return compared(rounds)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Return the exit status."""
    parser = arguments_parser("data_parallel", __doc__)
    parser.add_argument("--model", required=True, help="a mixture, such as one of bench.models'")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    try:
        given = parse(parser, sys.argv[1:] if arguments is None else arguments)
        rows = asyncio.run(measure(given))
    except ConfigError as error:
        parser.error(error.message)
    tell([TimedPart("Data-parallel ranks on the same cores", rows)], given.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
