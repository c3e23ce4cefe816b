"""Goodput under overload: `python -m bench.overload [--url URL | -- flags of baton up]`.

First it finds the peak with open-loop load. Each rate is a bit above the last one, until goodput
has not grown twice in a row. (Goodput is the requests per second that met both limits, over the
time in which requests were sent.) Then it sends a multiple of the peak's rate. A server that
refuses requests in time keeps its goodput: refused requests cost little, and their clients learn
when to come back. A server that does not refuse answers everybody too late. Each request tells the
server its limits (`x-slo-ttft-ms`, `x-slo-tpot-ms`).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from rich.console import Console

from baton.protocol.errors import ConfigError
from baton.runtime import config as options
from baton.runtime.config import option
from bench.cluster import cluster
from bench.load import LoadTarget, run_workload
from bench.measure import Sample, SloLimits, summarize
from bench.workload import WorkloadSpec, plan_requests

KEPT: Final = 0.9  # of the peak, at the overload
GROWTH: Final = 1.4  # from rate to rate
WORSE: Final = 2  # rates in a row without more goodput: the peak is behind
NUM_ERRORS: Final = 3
MAX_RATE: Final = 10_000.0
USAGE_ERROR: Final = 2


@dataclass(frozen=True, slots=True)
class OverloadOptions:
    """The flags of the benchmark."""

    url: str | None = option(None, "server to measure (default: start one with `baton up`)")
    model: str | None = option(None, "model name (default: the first that the server lists)")
    api_key: str | None = option(None, "the server's key")
    seconds: float = option(10.0, "of load per rate")
    first_rate: float = option(2.0, "requests per second that the search begins with")
    times: float = option(3.0, "overload: times the rate of the peak")
    rounds: int = option(3, "overloads measured; their median counts")
    input_words: int = option(128, "mean words per prompt, about one token each")
    output_tokens: int = option(32, "mean tokens per answer")
    slo_ttft_ms: float = option(1000.0, "a good request has its first token within so many ms")
    slo_tpot_ms: float = option(100.0, "and then at most so many ms per token")
    check: bool = option(False, "end with status 1 below 90 % of the peak")

    @property
    def slo(self) -> SloLimits:
        return SloLimits(self.slo_ttft_ms / 1000, self.slo_tpot_ms / 1000)


@dataclass(frozen=True, slots=True)
class OverloadFound:
    """The result of one rate, per second except for the counts.

    `late`: requests that were answered, but not within the limits.
    """

    rate: float
    goodput: float
    requests: int
    good: int
    late: int
    refused: int  # HTTP 429 and 503
    failed: int  # anything else: there should be none
    ttft_p90_ms: float | None = None  # of those that were answered
    tpot_p90_ms: float | None = None
    client_late_ms: float = 0.0  # how far the client itself fell behind its plan
    errors: tuple[str, ...] = ()  # of those that failed, a few

    @classmethod
    def of(
        cls, rate: float, seconds: float, samples: Sequence[Sample], slo: SloLimits
    ) -> OverloadFound:
        kinds = Counter(_kind(sample, slo) for sample in samples)
        told = summarize("", samples, slo)
        errors = {str(it.error) for it in samples if _kind(it, slo) == "failed"}
        return cls(
            rate=rate,
            goodput=kinds["good"] / seconds,
            requests=len(samples),
            good=kinds["good"],
            late=kinds["late"],
            refused=kinds["refused"],
            failed=kinds["failed"],
            ttft_p90_ms=None if told.ttft is None else told.ttft.p90,
            tpot_p90_ms=None if told.tpot is None else told.tpot.p90,
            client_late_ms=told.max_lateness_ms,
            errors=tuple(sorted(errors)[:NUM_ERRORS]),
        )


Ask = Callable[[float], Awaitable[OverloadFound]]


def _kind(sample: Sample, slo: SloLimits) -> str:
    if sample.error is None:
        return "good" if slo.met_by(sample) else "late"
    shed = "HTTP 429" in sample.error or "HTTP 503" in sample.error
    return "refused" if shed else "failed"


async def find_peak(ask: Ask, first_rate: float) -> list[OverloadFound]:
    """Return all rates that were tried; the peak is the one with the most goodput."""
    tried: list[OverloadFound] = []
    rate, worse = first_rate, 0
    while worse < WORSE and rate <= MAX_RATE:
        best = max((found.goodput for found in tried), default=0.0)
        tried.append(await ask(rate))
        worse = 0 if tried[-1].goodput > best else worse + 1
        rate *= GROWTH
    return tried


async def measure(ask: Ask, given: OverloadOptions) -> dict[str, Any]:
    """Measure peak and overload; return values for JSON."""
    tried = await find_peak(ask, given.first_rate)
    peak = max(tried, key=lambda found: found.goodput)
    # The overload is a multiple of the rate that the server can serve, not of the peak's sending
    # rate.
    rate = given.times * peak.goodput
    overloads = [await ask(rate) for _ in range(max(1, given.rounds))]
    overloads.sort(key=lambda found: found.goodput)
    middle = overloads[len(overloads) // 2]
    share = middle.goodput / peak.goodput if peak.goodput else 0.0
    return {
        "peak": asdict(peak),
        "tried": [asdict(found) for found in tried],
        "overload": asdict(middle),
        "overloads": [found.goodput for found in overloads],
        "share": share,
        "kept": share >= KEPT and not any(found.failed for found in overloads),
    }


def asker(url: str, given: OverloadOptions) -> Ask:
    """Return a function that runs one rate against a server, with other prompts each time."""
    runs = 0
    target = LoadTarget(
        url,
        given.model,
        given.api_key,
        headers=(
            ("x-slo-ttft-ms", f"{given.slo_ttft_ms:g}"),
            ("x-slo-tpot-ms", f"{given.slo_tpot_ms:g}"),
        ),
    )

    async def ask(rate: float) -> OverloadFound:
        nonlocal runs
        runs += 1
        spec = WorkloadSpec(
            num_requests=max(1, round(rate * given.seconds)),
            rate=rate,
            input_words=given.input_words,
            output_tokens=given.output_tokens,
            seed=runs,
        )
        planned = plan_requests(spec)
        run = await run_workload(target, planned)
        return OverloadFound.of(rate, max(given.seconds, planned[-1].at_s), run.samples, given.slo)

    return ask


async def run(given: OverloadOptions, flags: Sequence[str]) -> dict[str, Any]:
    if given.url is not None:
        return await measure(asker(given.url, given), given)
    async with cluster(flags) as ready:
        ask = asker(str(ready["url"]), given)
        await ask(given.first_rate)  # its first steps are slow ones
        return await measure(ask, given)


def show(found: dict[str, Any], console: Console) -> None:
    for row in [*found["tried"], {"title": "overload", **found["overload"]}]:
        console.print(
            f"{row['rate']:8.1f} requests/s: goodput {row['goodput']:7.2f}/s, {row['late']} late,"
            f" {row['refused']} refused, {row['failed']} failed; p90 to the first token"
            f" {row['ttft_p90_ms'] or 0:.0f} ms, per token {row['tpot_p90_ms'] or 0:.0f} ms; client"
            f" late by {row['client_late_ms']:.0f} ms  {row.get('title', '')}"
        )
        for error in row["errors"]:
            console.print(f"         {error}")
    console.print(f"goodput under overload: {100 * found['share']:.0f} % of the peak")


def main(arguments: Sequence[str] | None = None) -> int:
    own, flags = _split(sys.argv[1:] if arguments is None else list(arguments))
    parser = argparse.ArgumentParser(prog="python -m bench.overload", description=__doc__)
    options.add_options(parser, OverloadOptions)
    parser.add_argument("--json", action="store_true", help="print JSON instead of lines")
    parsed = parser.parse_args(own)
    try:
        given = options.load(OverloadOptions, parsed, {})
        found = asyncio.run(run(given, flags))
    except ConfigError as error:
        sys.stderr.write(f"{parser.prog}: {error.message}\n")
        return USAGE_ERROR
    if parsed.json:
        sys.stdout.write(json.dumps(found, indent=2) + "\n")
    else:
        show(found, Console())
    return 1 if given.check and not found["kept"] else 0


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Return the arguments before `--`, and those for `baton up`."""
    at = arguments.index("--") if "--" in arguments else len(arguments)
    return arguments[:at], arguments[at + 1 :]


if __name__ == "__main__":
    raise SystemExit(main())
