"""Open-loop serving benchmark: `baton bench serve`, or `python -m bench.serve`.

It measures any OpenAI-compatible URL: TTFT, TPOT, ITL, throughput and goodput for given SLOs, as a
table and as JSON; for Baton also the hand-over time. `--compare` starts `baton up` in two ways on
the same cores, disaggregated (`apart`) and `--colocated`, in alternating rounds, and prints the
ratios. `--peer CMD` and `--peer-url URL` add other systems' servers to every round
(serve_peers.py). `--interference` and `--goodput` start `baton up` in both ways, too: long prompts
beside running streams (serve_interference.py), recorded traces at rising rates (serve_goodput.py).
Arguments after `--` go to `baton up` unchanged.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from rich import box
from rich.console import Console
from rich.table import Table

from baton.protocol.errors import ConfigError
from baton.runtime.config import add_options, load, option
from baton.runtime.config import parse as parse_options
from bench import serve_goodput, serve_interference
from bench.cluster import cluster
from bench.load import LoadRun, LoadTarget, run_workload
from bench.measure import SloLimits, Summary, summarize
from bench.recorded import Scaling, bundled
from bench.serve_goodput import Sweep
from bench.serve_interference import InterferencePlan
from bench.serve_peers import label_of, peer_server
from bench.sse import StreamError
from bench.workload import WorkloadSpec, plan_requests

DESCRIPTION = "Open-loop serving benchmark against any OpenAI-compatible server."
LATE_MS = 50.0
MODES = {"apart": (), "colocated": ("--colocated",)}
PLACED = {
    "remote": ("--prefill-placement", "remote"),
    "auto": ("--prefill-placement", "auto"),
    "colocated": ("--colocated",),
}  # of --goodput: what a decision per request adds to separation alone
COMPARED = (
    "ttft p50",
    "ttft p90",
    "ttft p99",
    "tpot p50",
    "tpot p90",
    "tpot p99",
    "tokens/s",
    "goodput",
)


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """The flags of the benchmark."""

    url: str = option("http://127.0.0.1:8000", "server to measure (not with --compare)")
    model: str | None = option(None, "model name (default: the first that the server lists)")
    api_key: str | None = option(None, "the server's key")
    requests: int = option(100, "number of requests")
    rate: float = option(4.0, "mean arrivals per second, Poisson; 0 sends all at once")
    input_words: int = option(128, "mean words per prompt, about one token each")
    output_tokens: int = option(64, "mean tokens per answer")
    length_spread: float = option(0.5, "lengths vary by this share around their mean")
    shared_prefix_words: int = option(0, "words that all prompts begin with")
    temperature: float = option(0.0, "0 = greedy")
    ignore_eos: bool = option(True, "make answers exactly as long as planned (vLLM's extension)")
    seed: int = option(0, "the same seed sends the same requests at the same times")
    warm_up: int = option(4, "requests before the clock starts")
    slo_ttft_ms: float = option(500.0, "a good request has its first token within so many ms")
    slo_tpot_ms: float = option(50.0, "and then at most so many ms per token")
    timeout_s: float = option(300.0, "longest silence of a server, seconds")
    json: Path | None = option(
        None, "also write to this file what stdout gets: the results in JSON"
    )
    compare: bool = option(False, "start Baton apart and colocated on the same cores, alternating")
    peer: tuple[str, ...] = option(
        (), "--compare with this server, too: a command with {port} in it (repeatable)"
    )
    peer_url: tuple[str, ...] = option((), "--compare with the server that runs there (repeatable)")
    rounds: int = option(3, "rounds of --compare, --interference and --goodput")
    interference: bool = option(
        False, "both ways: time per token of running streams while long prompts arrive, over idle"
    )
    streams: int = option(4, "interference: streams that run all the time")
    idle_s: float = option(4.0, "interference: seconds without prompts")
    loaded_s: float = option(10.0, "interference: seconds with them")
    arriving_tokens: int = option(1000, "interference: tokens of an arriving prompt")
    arriving_rate: float = option(
        0.0, "interference: prompts per second (default: what takes 60 % of a prefill node's time)"
    )
    stream_tokens: int = option(512, "interference: tokens of one stream before it begins anew")
    goodput: bool = option(False, "both ways: goodput over a rate sweep of recorded traces")
    trace: tuple[Path, ...] = option(
        (), "goodput: a trace file (repeatable; default: those in bench/traces)"
    )
    rates: str = option("1,2,4,8", "goodput: requests per second, ascending")
    limits: str = option(
        "", "goodput: several limits TTFT/TPOT in ms, such as 250/25,500/50 (default: --slo-*)"
    )
    sweep_s: float = option(8.0, "goodput: seconds per rate")
    output_mean: int = option(32, "goodput: mean tokens of the scaled answers")
    input_mean: int = option(192, "goodput: mean tokens of the scaled prompts")
    max_tokens: int = option(1800, "goodput: longest prompt and answer together, tokens")
    vocabulary: str = option("300,4000", "token ids that prompts are drawn from: first, end")
    plot: Path | None = option(None, "goodput: also draw the sweep into this SVG file")

    def workload(self, num_requests: int, seed: int) -> WorkloadSpec:
        return WorkloadSpec(
            num_requests=num_requests,
            rate=self.rate,
            input_words=self.input_words,
            output_tokens=self.output_tokens,
            length_spread=self.length_spread,
            shared_prefix_words=self.shared_prefix_words,
            seed=seed,
        )

    @property
    def slo(self) -> SloLimits:
        return SloLimits(self.slo_ttft_ms / 1000, self.slo_tpot_ms / 1000)

    @property
    def compares(self) -> bool:
        return self.compare or bool(self.peer or self.peer_url)

    @property
    def peers(self) -> tuple[str, ...]:
        """The labels of the other systems."""
        return tuple(label_of(each) for each in (*self.peer, *self.peer_url))

    @property
    def starts_clusters(self) -> bool:
        return self.compares or self.interference or self.goodput

    def target(self, url: str) -> LoadTarget:
        return LoadTarget(
            url=url,
            model=self.model,
            api_key=self.api_key,
            timeout_s=self.timeout_s,
            temperature=self.temperature,
            ignore_eos=self.ignore_eos,
        )

    def interference_plan(self, rate: float) -> InterferencePlan:
        """Return the plan of --interference. Raises ConfigError."""
        return InterferencePlan(
            streams=self.streams,
            idle_s=self.idle_s,
            loaded_s=self.loaded_s,
            prompt_tokens=self.arriving_tokens,
            stream_tokens=self.stream_tokens,
            vocabulary=pair_of(self.vocabulary),
            rate=rate,
        )

    def sweep(self) -> Sweep:
        """Return the sweep of --goodput. Raises ConfigError."""
        rates = numbers_of(self.rates)
        scaling = Scaling(
            rates[0], self.sweep_s, self.input_mean, self.output_mean, self.max_tokens,
            pair_of(self.vocabulary),
        )  # fmt: skip
        traces = {path.stem: path for path in self.trace} or bundled()
        limits = [limits_of(part) for part in self.limits.split(",") if part] or [self.slo]
        return Sweep(traces, rates, scaling, limits)


def numbers_of(text: str) -> list[float]:
    """Return `4,8` as numbers. Raises ConfigError unless all are above 0."""
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"{text!r} is no list of numbers") from error
    if any(number <= 0 for number in numbers):
        raise ConfigError(f"{text!r}: every number must be above 0")
    return numbers


def limits_of(text: str) -> SloLimits:
    """Return the limits of `500/50`. Raises ConfigError."""
    ttft_ms, _, tpot_ms = text.partition("/")
    [ttft], [tpot] = numbers_of(ttft_ms), numbers_of(tpot_ms)
    return SloLimits(ttft / 1000, tpot / 1000)


def pair_of(text: str) -> tuple[int, int]:
    """Return the two ascending numbers of `300,4000`. Raises ConfigError."""
    numbers = [int(number) for number in numbers_of(text)]
    if len(numbers) != 2 or numbers[0] >= numbers[1]:
        raise ConfigError(f"{text!r} must be two ascending numbers")
    return numbers[0], numbers[1]


async def measure(options: ServeOptions, url: str, label: str, seed: int) -> Summary:
    """Warm up, then make one whole run against `url`."""
    target = options.target(url)
    if options.warm_up:
        # Another seed, because the measured prompts must not find their prefixes cached.
        await run_workload(
            target, plan_requests(options.workload(options.warm_up, seed + 1_000_003))
        )
    run: LoadRun = await run_workload(
        target, plan_requests(options.workload(options.requests, seed))
    )
    errors = sorted({sample.error for sample in run.samples if sample.error is not None})
    if len(errors) and all(sample.error for sample in run.samples):
        raise StreamError(f"every request failed, such as: {errors[0]}")
    return summarize(label, run.samples, options.slo, run.handovers.mean_s)


Start = Callable[[], AbstractAsyncContextManager[str]]
"""Starts one of the compared systems and yields its URL."""


def systems(options: ServeOptions, up_flags: Sequence[str]) -> dict[str, Start]:
    """Return what a round of --compare measures, by label. Raises ConfigError for equal labels."""

    @asynccontextmanager
    async def baton(flags: Sequence[str]) -> AsyncGenerator[str, None]:
        async with cluster([*flags, *up_flags]) as ready:
            yield str(ready["url"])

    found: dict[str, Start] = {
        label: lambda flags=flags: baton(flags) for label, flags in MODES.items()
    }
    target = options.target("")
    for command in options.peer:
        found[label_of(command)] = lambda command=command: peer_server(command, target)
    for url in options.peer_url:
        found[label_of(url)] = lambda url=url: nullcontext(url)
    if len(found) < len(MODES) + len(options.peers):
        raise ConfigError(f"two systems are called alike: {', '.join(options.peers)}", field="peer")
    return found


async def compare(
    options: ServeOptions, up_flags: Sequence[str], console: Console
) -> list[Summary]:
    """Measure every system `rounds` times, alternating, so that drift of the machine hits all."""
    summaries: list[Summary] = []
    compared = systems(options, up_flags)
    for index in range(options.rounds):
        for label, start in compared.items():
            console.print(f"round {index + 1} of {options.rounds}: {label} ...", style="dim")
            async with start() as url:
                summaries.append(await measure(options, url, label, options.seed + index))
    return summaries


async def interfere(
    options: ServeOptions, up_flags: Sequence[str], console: Console
) -> dict[str, Any]:
    """Measure both modes in turns; all rounds have the rate that the first one (apart) found."""
    rounds: list[dict[str, Any]] = []
    rate = options.arriving_rate
    for index in range(options.rounds):
        for label, flags in MODES.items():
            console.print(f"round {index + 1} of {options.rounds}: {label} ...", style="dim")
            async with cluster([*flags, *up_flags]) as ready:
                target = options.target(str(ready["url"]))
                plan = options.interference_plan(rate)
                found = await serve_interference.measure(target, plan)
            rate = rate or found["rate"]
            rounds.append({"mode": label, **found})
    return {"rounds": rounds, "summary": serve_interference.summary(rounds)}


async def sweep_rates(
    options: ServeOptions, up_flags: Sequence[str], console: Console
) -> dict[str, Any]:
    """Measure the modes over all traces and rates, `rounds` times; all of them serve meanwhile."""
    sweep = options.sweep()
    traces = sweep.load()
    rows: list[dict[str, Any]] = []
    async with AsyncExitStack() as stack:
        targets: dict[str, LoadTarget] = {}
        for label, flags in PLACED.items():
            console.print(f"starting {label} ...", style="dim")
            up = cluster(["--grpc-port", "0", *flags, *up_flags])
            target = options.target(str((await stack.enter_async_context(up))["url"]))
            await run_workload(target, plan_requests(options.workload(options.warm_up or 1, 1)))
            targets[label] = target
        for index in range(options.rounds):
            console.print(f"round {index + 1} of {options.rounds} ...", style="dim")
            rows += await serve_goodput.measure(targets, sweep, traces, index)
    compared = serve_goodput.compare(rows)
    if options.plot is not None:
        options.plot.write_text(serve_goodput.plot(compared, sweep.limits[0]))
    return {"rows": rows, "compared": compared}


# ---- showing -------------------------------------------------------------------------------------


def table_of(summaries: Sequence[Summary]) -> Table:
    """Return a table with one column per run, so that even six of them fit a terminal."""
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0))
    table.add_column("")
    for each in summaries:
        table.add_column(each.label, justify="right")
    rows = [rows_of(each) for each in summaries]
    for name in rows[0]:
        table.add_row(name, *(row[name] for row in rows))
    return table


def rows_of(summary: Summary) -> dict[str, str]:
    """Return what is shown of one run, in order."""
    rows = {"requests": str(summary.requests), "failed": str(summary.failed)}
    times = (("TTFT", summary.ttft), ("TPOT", summary.tpot), ("ITL", summary.itl))
    for name, values in times:
        shown = ("-",) * 3 if values is None else tuple(f"{each:.1f}" for each in values.ranks)
        rows |= dict(zip((f"{name} p50", f"{name} p90", f"{name} p99"), shown, strict=True))
    rows["tokens/s"] = f"{summary.token_rate:.1f}"
    rows["requests/s"] = f"{summary.request_rate:.2f}"
    rows["goodput/s"] = f"{summary.goodput:.2f}"
    handover = summary.handover_ms
    rows["hand-over, mean"] = "-" if handover is None else f"{handover:.1f}"
    return rows


def figures(summary: Summary) -> dict[str, float]:
    """Return the compared quantities of one run; those without a value are missing."""
    found = {"tokens/s": summary.token_rate, "goodput": summary.goodput}
    for name, values in (("ttft", summary.ttft), ("tpot", summary.tpot)):
        if values is not None:
            found |= {
                f"{name} p50": values.p50,
                f"{name} p90": values.p90,
                f"{name} p99": values.p99,
            }
    return found


def ratios(
    summaries: Sequence[Summary], over: str = "apart", under: str = "colocated"
) -> dict[str, dict[str, float]]:
    """Return `over` / `under` per quantity: median over rounds, and the spread (least, most)."""
    upper = [figures(each) for each in summaries if each.label == over]
    lower = [figures(each) for each in summaries if each.label == under]
    result: dict[str, dict[str, float]] = {}
    for name in COMPARED:
        values = [
            ours[name] / theirs[name]
            for ours, theirs in zip(upper, lower, strict=True)
            if name in ours and theirs.get(name)
        ]
        if values:
            median = statistics.median(values)
            result[name] = {"median": median, "min": min(values), "max": max(values)}
    return result


def ratio_table(values: dict[str, dict[str, float]]) -> Table:
    table = Table(box=box.SIMPLE)
    for name in ("quantity", "median", "min", "max"):
        table.add_column(name, justify="left" if name == "quantity" else "right")
    for name, ratio in values.items():
        table.add_row(name, *(f"{ratio[key]:.2f}" for key in ("median", "min", "max")))
    return table


def interference_table(found: dict[str, Any]) -> Table:
    title = "p99 of running streams, prompts arriving / idle (time per token of 10; single gaps)"
    table = Table("", "tpot", "min - max", "gaps", title=title, box=box.SIMPLE)
    for mode, ratio in found["summary"].items():
        tpot, gap = ratio["tpot_p99_ms"], ratio["gap_p99_ms"]
        between = f"{tpot['min']:.2f} - {tpot['max']:.2f}"
        table.add_row(mode, f"{tpot['median']:.2f}", between, f"{gap['median']:.2f}")
    return table


def goodput_table(compared: Sequence[dict[str, Any]]) -> Table:
    title = "goodput/s, mean of the rounds (least - most)"
    held = sum(row["auto_not_below"] for row in compared)
    title += f"; auto is not below colocated in {held} of {len(compared)}"
    columns = ("trace", "rate", "limits", *PLACED, "auto not below")
    table = Table(*columns, title=title, box=box.SIMPLE)
    for row in compared:
        values = [
            f"{row[mode]:.2f} ({row['spread'][mode][0]:.2f} - {row['spread'][mode][1]:.2f})"
            for mode in PLACED
        ]
        holds = "yes" if row["auto_not_below"] else "no"
        table.add_row(row["trace"], f"{row['rate']:g}", row["limits"], *values, holds)
    return table


def show(summaries: Sequence[Summary], options: ServeOptions, console: Console) -> dict[str, Any]:
    """Print the tables; return everything as values for JSON."""
    console.print(f"goodput: TTFT {options.slo_ttft_ms:g} ms, TPOT {options.slo_tpot_ms:g} ms")
    console.print("times in ms")
    console.print(table_of(summaries))
    result: dict[str, Any] = {"runs": [each.as_json() for each in summaries]}
    if options.compares:
        pairs = [
            ("apart", "colocated"),
            *((mode, peer) for peer in options.peers for mode in MODES),
        ]
        for over, under in pairs:
            found = result[f"{over}_over_{under}"] = ratios(summaries, over, under)
            console.print(f"{over} / {under}, per round (a time below 1: {over} is faster)")
            console.print(ratio_table(found))
    late = max(each.max_lateness_ms for each in summaries)
    if late > LATE_MS:
        text = f"the client fell {late:.0f} ms behind its plan: this machine is too busy to measure"
        console.print(text, style="yellow")
    return result


def parse(arguments: Sequence[str]) -> tuple[ServeOptions, list[str]]:
    """Return our options, and the arguments after `--`. Raises ConfigError."""
    given = list(arguments)
    passed_on: list[str] = []
    if "--" in given:
        at = given.index("--")
        given, passed_on = given[:at], given[at + 1 :]
    parser = argparse.ArgumentParser(prog="baton bench serve", description=DESCRIPTION)
    add_options(parser, ServeOptions)
    options = load(ServeOptions, parse_options(parser, given))
    if passed_on and not options.starts_clusters:
        raise ConfigError(
            "flags after -- are for `baton up` and need --compare, --peer, --interference or"
            " --goodput"
        )
    return options, passed_on


async def run(options: ServeOptions, up_flags: Sequence[str], console: Console) -> dict[str, Any]:
    result: dict[str, Any] = {}
    if options.interference:
        result["interference"] = await interfere(options, up_flags, console)
        console.print(interference_table(result["interference"]))
    if options.goodput:
        result["goodput"] = await sweep_rates(options, up_flags, console)
        console.print(goodput_table(result["goodput"]["compared"]))
    if options.compares:
        result |= show(await compare(options, up_flags, console), options, console)
    elif not options.starts_clusters:
        summaries = [await measure(options, options.url, "run", options.seed)]
        result |= show(summaries, options, console)
    machine = {"cores": len(os.sched_getaffinity(0)), "python": sys.version.split()[0]}
    return {"machine": machine, "up_flags": list(up_flags), **result}


def main(arguments: Sequence[str] | None = None) -> int:
    console = Console()
    try:
        options, up_flags = parse(sys.argv[1:] if arguments is None else arguments)
        result = asyncio.run(run(options, up_flags, console))
    except (ConfigError, StreamError, httpx.HTTPError) as error:
        console.print(f"baton bench serve: {error}", style="red", markup=False, soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        return 130
    text = json.dumps(result, indent=2)
    if options.json is not None:
        options.json.write_text(text + "\n")
    else:
        console.print(text, highlight=False, markup=False, soft_wrap=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
