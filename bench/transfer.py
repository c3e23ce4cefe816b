"""KV transfer, measured: `python -m bench.transfer [--json] [--quick] [--lanes grpc,stream]`.

Three parts (`--parts`), each in one run against its own baseline; several alternating rounds,
medians and spreads. What a part should reach is printed beside it, with pass or fail:
    throughput   224 MiB between two processes, per lane, against memcpy, sockets, a bare gRPC
    tail         a real engine: token 1 sampled -> decode may start, layer-wise and whole
    client       TTFT disaggregated against local prefill, and token 2 against a decode step
What digests and mTLS cost (`overheads`) follows from the first two, if both were measured.
docs/kv_transfer.md explains the figures, docs/log/ keeps them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from rich import box
from rich.console import Console
from rich.table import Table

from baton.node.lanes import MAKERS
from baton.protocol.errors import BatonError
from bench import transfer_client, transfer_tail, transfer_throughput
from bench.transfer_engine import DEMO_MODEL, write_model
from bench.transfer_lanes import ADOPTED, TLS_WAYS, all_ways, write_certificates
from bench.transfer_tail import TailPlan
from bench.transfer_throughput import Contested, LoadShape

PARTS: Final = ("throughput", "tail", "client")
TOKEN_1_GOAL_MS: Final = 3.0
TAIL_GOAL_MS: Final = {"stream": 5.0, "stream tcp": 5.0, "shm": 5.0, "grpc": 15.0}


@dataclass(frozen=True, slots=True)
class Goal:
    """What a figure should reach; `value` and `limit` have the same unit."""

    name: str
    value: float
    limit: float
    at_least: bool

    @property
    def passed(self) -> bool:
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "passed": self.passed}


@dataclass(frozen=True, slots=True)
class TransferSize:
    """How much is measured: everything, or a smoke test of seconds."""

    shape: LoadShape
    rounds: int
    tail_tokens: int
    tail_rounds: int
    lengths: tuple[tuple[int, int], ...]  # of the client's prompts, and how many of each
    demo_lengths: tuple[tuple[int, int], ...]  # likewise, for the demo model
    model: dict[str, Any]


WHOLE: Final = TransferSize(
    LoadShape(), 7, 1024, 3, ((64, 40), (512, 7), (1024, 5)), ((64, 100),), {}
)
QUICK: Final = TransferSize(
    LoadShape(tokens=128, layers=4), 2, 64, 1, ((32, 2),), ((32, 2),),
    {"num_hidden_layers": 2, "hidden_size": 256, "intermediate_size": 512},
)  # fmt: skip


def throughput_goals(found: dict[str, Any]) -> list[Goal]:
    """Return the goals: stream against the socket below it, grpc against the bare one, shm in
    place.
    """
    rows = {row["way"]: row for row in found["rows"]}
    rate = {name: row["gb_per_s"]["median"] for name, row in rows.items()}
    goals: list[Goal] = []
    for lane, raw in (("stream tcp", "raw tcp"), ("stream", "raw unix")):
        if lane in rate:
            goals.append(Goal(f"{lane} / {raw}", rate[lane] / rate[raw], 0.85, at_least=True))
    if "grpc" in rate:
        share = rate["grpc"] / rate["bare grpc"]
        if rate["grpc"] >= 1.0:
            goals.append(Goal("grpc GB/s", rate["grpc"], 1.0, at_least=True))
        else:
            goals.append(Goal("grpc / bare grpc", share, 0.9, at_least=True))
    if ADOPTED in rows:
        adopted = rows[ADOPTED]
        goals.append(Goal("shm hand-off, ms", adopted["ms"]["median"], 1.0, at_least=False))
        goals.append(Goal("shm bytes copied", adopted["copied_bytes"], 0, at_least=False))
    goals += [
        Goal(f"{name}: the right bytes", float(intact), 1.0, at_least=True)
        for name, intact in found["intact"].items()
    ]
    return goals


def tail_goals(found: dict[str, Any]) -> list[Goal]:
    return [
        Goal(f"{row['lane']} tail, ms", row["layer_wise_ms"]["median"], limit, at_least=False)
        for row in found["rows"]
        if (limit := TAIL_GOAL_MS.get(row["lane"])) is not None
    ]


def client_goals(found: dict[str, Any]) -> list[Goal]:
    """Return the goals of each model and lane.

    The shortest prompt has a fixed limit. A longer prompt shares P's core with its lane, so the
    time of the lane before token 1 is added to the limit.
    """
    goals: list[Goal] = []
    if not found["rows"]:
        return goals
    shortest = min(row["tokens"] for row in found["rows"])
    for row in found["rows"]:
        which = f"{row['model']}, {row['lane']}, {row['tokens']} tokens, ms"
        limit = TOKEN_1_GOAL_MS
        if row["tokens"] > shortest:
            limit += max(0.0, row["cpu_added_ms"]["median"])
        added = row["ttft_added_ms"]["median"]
        goals.append(Goal(f"token 1 added, {which}", added, limit, at_least=False))
        if "token2_beyond_step_ms" in row:
            beyond = row["token2_beyond_step_ms"]["median"]
            limit = TAIL_GOAL_MS.get(row["lane"], max(TAIL_GOAL_MS.values()))
            goals.append(Goal(f"token 2 beyond a step, {which}", beyond, limit, at_least=False))
    return goals


def overheads(throughput: dict[str, Any], tail: dict[str, Any]) -> dict[str, Any]:
    """Return digests as a share of prefill and hand-over together, with both sides' time added
    up.
    """
    per_byte = throughput["digest_s"] / throughput["bytes"]
    tail_bytes = tail["bytes"]
    prefill_ms = tail["rows"][0]["prefill_ms"]["median"] if tail["rows"] else 0.0
    whole_s = (prefill_ms + tail["rows"][0]["layer_wise_ms"]["median"]) / 1e3
    share = 2 * per_byte * tail_bytes / whole_s
    rate = {row["way"]: row["gb_per_s"]["median"] for row in throughput["rows"]}
    cpu = {row["way"]: row["cpu_s_per_gb"]["median"] for row in throughput["rows"]}
    tls = {
        name: {"rate": rate[name] / rate[plain], "cpu": cpu[name] / cpu[plain]}
        for name, plain in TLS_WAYS.items()
        if name in rate and plain in rate
    }
    return {"digest_share_of_end_to_end": share, "mtls_over_plain": tls}


# ---- showing -------------------------------------------------------------------------------------


def show(result: dict[str, Any], console: Console) -> None:
    """Print everything as tables."""
    if "throughput" in result:
        console.print(_throughput_table(result["throughput"]))
    if "tail" in result:
        console.print(_rows_table(result["tail"]["rows"], "Exposed tail, ms"))
    if "client" in result:
        if result["client"]["rows"]:
            console.print(_rows_table(result["client"]["rows"], "Seen by a client, ms"))
        for lane, why in result["client"]["missing"].items():
            console.print(f"{lane}: {why}", markup=False)
    if "overheads" in result:
        share = result["overheads"]["digest_share_of_end_to_end"]
        console.print(f"digests: {share:.1%} of prefill and hand-over")
    table = Table("goal", "value", "limit", "", title="Goals", box=box.SIMPLE, title_justify="left")
    for goal in result["goals"]:
        sign = "≥" if goal["at_least"] else "≤"
        verdict = "[green]pass[/]" if goal["passed"] else "[red]FAIL[/]"
        table.add_row(goal["name"], f"{goal['value']:.3g}", f"{sign} {goal['limit']:g}", verdict)
    console.print(table)


def _throughput_table(found: dict[str, Any]) -> Table:
    title = f"{found['bytes'] / 2**20:.0f} MiB between two processes, {found['rounds']} rounds"
    table = Table(title=title, box=box.SIMPLE, title_justify="left")
    table.add_column("way")
    for name in (
        "GB/s",
        "min - max",
        "CPU s/GB",
        "ms",
        "ms, min - max",
        "MiB copied",
        "digests of CPU",
    ):
        table.add_column(name, justify="right")
    for row in found["rows"]:
        rate, ms = row["gb_per_s"], row["ms"]
        share = row.get("digest_share_of_cpu")
        copied = row["copied_bytes"] > 0
        table.add_row(
            row["way"],
            f"{rate['median']:.2f}" if copied else "in place",
            f"{rate['min']:.2f} - {rate['max']:.2f}" if copied else "",
            f"{row['cpu_s_per_gb']['median']:.2f}",
            f"{ms['median']:.1f}" if copied else f"{ms['median']:.2f}",
            f"{ms['min']:.2f} - {ms['max']:.2f}",
            f"{row['copied_bytes'] / 2**20:.0f}",
            "" if share is None else f"{share:.0%}",
        )
    for name, why in found["missing"].items():
        table.add_row(name, f"[dim]{why}[/]")
    return table


def _rows_table(rows: Sequence[dict[str, Any]], title: str) -> Table:
    table = Table(title=title, box=box.SIMPLE, title_justify="left")
    for name in rows[0]:
        table.add_column(name.removesuffix("_ms").replace("_", " "), justify="right")
    for row in rows:
        table.add_row(*(_shown(value) for value in row.values()))
    return table


def _shown(value: Any) -> str:
    """Return a spread as text: its median, and the 95 % interval of it or else half the range."""
    if not isinstance(value, dict):
        return str(value)
    if "low" in value:
        return f"{value['median']:.1f} ({value['low']:.1f}…{value['high']:.1f})"
    return f"{value['median']:.1f} ±{(value['max'] - value['min']) / 2:.1f}"


# ---- the command line ----------------------------------------------------------------------------


def split(cores: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return the cores of P and of D, as the local launcher gives them; shared if there is only
    one.
    """
    half = len(cores) // 2
    return (list(cores[:half]), list(cores[half:])) if half else (list(cores), list(cores))


async def run(
    ways: list[str], parts: Sequence[str], size: TransferSize, folder: Path
) -> dict[str, Any]:
    """Measure the parts asked for, with `folder` for their files; return values for JSON."""
    cores = split(sorted(os.sched_getaffinity(0)))
    result: dict[str, Any] = {}
    goals: list[Goal] = []
    tls = write_certificates(folder)
    if "throughput" in parts:
        contested = Contested(size.shape, size.rounds, cores)
        result["throughput"] = await transfer_throughput.measure(ways, tls, contested)
        goals += throughput_goals(result["throughput"])
    if "tail" in parts or "client" in parts:
        model = str(write_model(folder / "model", **size.model))
        if "tail" in parts:
            plan = TailPlan(model, size.tail_tokens, size.tail_rounds, len(cores[0]))
            result["tail"] = await transfer_tail.measure(
                [way for way in ways if way not in TLS_WAYS], plan, cores
            )
            goals += tail_goals(result["tail"])
        if "client" in parts:
            lanes = [way for way in ways if way in MAKERS]
            models = (
                ("demo", str(DEMO_MODEL), size.demo_lengths), ("0.6B", model, size.lengths)
            )  # fmt: skip
            result["client"] = await transfer_client.measure_lanes(models, lanes, cores)
            goals += client_goals(result["client"])
    if "throughput" in result and "tail" in result:
        result["overheads"] = overheads(result["throughput"], result["tail"])
        share = result["overheads"]["digest_share_of_end_to_end"]
        goals.append(Goal("digests of end to end", share, 0.03, at_least=False))
    return {
        "machine": {"cores": len(os.sched_getaffinity(0)), "cpu": platform.processor()},
        **result,
        "goals": [goal.as_json() for goal in goals],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Return 0 if everything ran, whatever the goals say; 1 if a part could
    not.
    """
    parser = argparse.ArgumentParser(
        prog="python -m bench.transfer", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--quick", action="store_true", help="a smoke test: sizes mean nothing")
    parser.add_argument("--lanes", default=",".join(all_ways()), help="what to measure, by name")
    parser.add_argument("--parts", default=",".join(PARTS), help="of " + ", ".join(PARTS))
    given = parser.parse_args(arguments)
    parts = given.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"unknown parts: {', '.join(sorted(unknown))}")
    console = Console()
    try:
        size = QUICK if given.quick else WHOLE
        with tempfile.TemporaryDirectory(prefix="baton-bench-") as folder:
            result = asyncio.run(run(given.lanes.split(","), parts, size, Path(folder)))
    except BatonError as error:
        console.print(f"bench.transfer: {error}", style="red", markup=False, soft_wrap=True)
        return 1
    if given.json:
        sys.stdout.write(json.dumps(result, indent=2) + "\n")
    else:
        show(result, console)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
