"""Goodput over a rate sweep of recorded traces: `baton bench serve --goodput`.

Per trace and rate it measures the requests per second that met both limits (time to the first
token, time per token), on the same cores, with the same requests at the same times. Three modes:
Baton disaggregated with every prompt on the prefill node (`remote`), disaggregated with a decision
per request (`auto`), and `--colocated`. All three serve at the same time, and each load goes to one
after the other: a shared machine changes its speed within minutes, for all of them alike.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.load import LoadTarget, run_workload
from bench.measure import SloLimits, summarize
from bench.plot import Line, Panel, svg
from bench.recorded import Scaling, TraceRequest, plan_trace, read_trace


@dataclass(frozen=True, slots=True)
class Sweep:
    """What to sweep. `scaling.rate` is replaced by each of `rates` (requests per second). A run's
    requests are counted once for each of `limits`."""

    traces: dict[str, Path]
    rates: Sequence[float]
    scaling: Scaling
    limits: Sequence[SloLimits]

    def load(self) -> dict[str, list[TraceRequest]]:
        """Read the traces. Raises ConfigError for a file that is no trace."""
        return {name: read_trace(path) for name, path in self.traces.items()}


async def measure(
    targets: Mapping[str, LoadTarget],
    sweep: Sweep,
    traces: dict[str, list[TraceRequest]],
    turn: int = 0,
) -> list[dict[str, Any]]:
    """Run every trace at every rate against running servers, by mode; return rows for JSON.

    Each `turn` sends other requests, which are the same in each mode. Which mode is first changes
    with rate and turn.
    """
    rows: list[dict[str, Any]] = []
    loads = itertools.product(traces.items(), enumerate(sweep.rates), range(len(targets)))
    for (name, trace), (index, rate), at in loads:
        mode = list(targets)[(at + index + turn) % len(targets)]
        scaling = _at_rate(sweep.scaling, rate)
        plan = plan_trace(trace, scaling, seed=turn * 100 + index + 1)
        run = await run_workload(targets[mode], plan)
        for slo in sweep.limits:
            found = summarize(mode, run.samples, slo, run.handovers.mean_s)
            rows.append(
                {
                    "trace": name,
                    "mode": mode,
                    "rate": rate,
                    "limits": limits_text(slo),
                    "goodput": found.good / max(found.duration_s, scaling.duration_s),
                    "within_limits": found.good / found.requests,
                    "requests": found.requests,
                    "failed": found.failed,
                    "errors": sorted({each.error for each in run.samples if each.error})[:5],
                    "ttft_p50_ms": None if found.ttft is None else found.ttft.p50,
                    "ttft_p99_ms": None if found.ttft is None else found.ttft.p99,
                    "tpot_p50_ms": None if found.tpot is None else found.tpot.p50,
                    "tpot_p99_ms": None if found.tpot is None else found.tpot.p99,
                    "client_late_ms": found.max_lateness_ms,
                }
            )
    return rows


def limits_text(slo: SloLimits) -> str:
    """Return the limits in milliseconds, as in "500/50"."""
    return f"{slo.ttft_s * 1e3:g}/{slo.tpot_s * 1e3:g}"


def _at_rate(scaling: Scaling, rate: float) -> Scaling:
    return Scaling(
        rate, scaling.duration_s, scaling.input_mean, scaling.output_mean, scaling.max_tokens,
        scaling.vocabulary,
    )  # fmt: skip


def compare(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Compare the modes per trace, rate and limits.

    A row has each mode's mean goodput, its least and most (`spread`), whether `auto` reaches
    `colocated`, and the least and most difference between these two, round by round.
    """
    table: dict[tuple[str, float, str], dict[str, list[float]]] = {}
    for row in rows:
        modes = table.setdefault((row["trace"], row["rate"], row["limits"]), {})
        modes.setdefault(row["mode"], []).append(row["goodput"])
    found: list[dict[str, Any]] = []
    for (trace, rate, limits), modes in table.items():
        mean = {mode: sum(values) / len(values) for mode, values in modes.items()}
        spread = {mode: (min(values), max(values)) for mode, values in modes.items()}
        row: dict[str, Any] = {"trace": trace, "rate": rate, "limits": limits, **mean}
        row["spread"] = spread
        if {"auto", "colocated"} <= modes.keys():
            row["auto_not_below"] = mean["auto"] >= mean["colocated"]
            pairs = zip(modes["auto"], modes["colocated"], strict=True)
            differences = [ours - theirs for ours, theirs in pairs]
            row["auto_over_colocated"] = (min(differences), max(differences))
        found.append(row)
    return found


def plot(compared: Sequence[dict[str, Any]], slo: SloLimits) -> str:
    """Return an SVG of one of the limits, with one panel per trace and one line per mode."""
    limits = f"TTFT {slo.ttft_s * 1e3:g} ms, TPOT {slo.tpot_s * 1e3:g} ms"
    compared = [row for row in compared if row["limits"] == limits_text(slo)]
    panels: list[Panel] = []
    for trace in dict.fromkeys(row["trace"] for row in compared):
        rows = [row for row in compared if row["trace"] == trace]
        lines = [
            Line(mode, [(row["rate"], row[mode]) for row in rows if mode in row])
            for mode in ("remote", "auto", "colocated")
            if any(mode in row for row in rows)
        ]
        title = trace.replace("_", " ")
        panels.append(Panel(title, "requests/s", f"goodput/s ({limits})", lines))
    return svg(panels)
