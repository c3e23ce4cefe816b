"""What one streamed chat of four tokens goes through: `python -m tools.trace_request`.

Files, functions and calls entered, by stage, and the classes that stand for the request on its way
(tools/trace_types.py says what that means). `--list` adds every function in the order of its first
entry and every class made meanwhile; `--json` says all of it to programs. How it is traced:
tools/traced_chat.py. tests/deploy/test_trace_request.py holds ceilings over the figures.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from baton.node.config import NodeConfig
from tools.trace_counts import Count, Counts, Entry, Stage, counts, first_entries, stage_of
from tools.trace_types import Kind, TypeReport, report
from tools.traced_chat import Traced, trace

BEFORE, AFTER = "  before a node hears of it", "  after"
WHOLE = "whole"


@dataclass(frozen=True, slots=True)
class Findings:
    """Everything that there is to say of one traced request."""

    counts: Counts
    functions: dict[Stage, list[Entry]]
    types: list[TypeReport]
    idle: list[Entry]
    answer: list[str]


def findings(traced: Traced) -> Findings:
    return Findings(
        counts(traced.entries),
        first_entries(traced.entries),
        report(traced.made, len(traced.texts)),
        traced.idle,
        traced.texts,
    )


def home(kind: TypeReport) -> Stage:
    """The stage of the module that defines a class."""
    module = kind.name.rpartition(".")[0]
    return stage_of(f"{module.replace('.', '/')}.py")


def num_types(types: Iterable[TypeReport]) -> dict[Stage, dict[Kind, int]]:
    """How many classes of each kind, by the stage that defines them."""
    found = {stage: dict.fromkeys(Kind, 0) for stage in Stage}
    for each in types:
        found[home(each)][each.kind] += 1
    return found


def as_json(found: Findings) -> dict[str, Any]:
    """Stages and kinds by their values; a function is FILE:NAME."""
    of = found.counts
    return {
        "answer": found.answer,
        "stages": {stage.value: asdict(count) for stage, count in of.stages.items()},
        "router_before": asdict(of.router_before),
        "router_after": asdict(of.router_after),
        "whole": asdict(of.whole),
        "num_types": {
            stage.value: {kind.value: number for kind, number in numbers.items()}
            for stage, numbers in num_types(found.types).items()
        },
        "types": [
            {**asdict(each), "kind": each.kind.value, "stage": home(each).value}
            for each in found.types
        ],
        "functions": {
            stage.value: [str(entry) for entry in entries]
            for stage, entries in found.functions.items()
        },
        "idle": [str(entry) for entry in found.idle],
    }


def table(found: Findings) -> list[str]:
    """Figures by stage: code entered, then classes made."""
    rows: list[tuple[str, Count]] = []
    for stage, count in found.counts.stages.items():
        rows.append((stage.value, count))
        if stage is Stage.ROUTER:
            rows += [(BEFORE, found.counts.router_before), (AFTER, found.counts.router_after)]
    rows.append((WHOLE, found.counts.whole))
    lines = [f"{'code entered':<28} {'files':>7} {'functions':>10} {'calls':>7}"]
    lines += [f"{name:<28} {of.files:>7} {of.functions:>10} {of.calls:>7}" for name, of in rows]
    types = num_types(found.types)
    lines += ["", f"{'classes made':<28}" + "".join(f" {kind.value:>10}" for kind in Kind)]
    whole = {kind: sum(numbers[kind] for numbers in types.values()) for kind in Kind}
    for name, numbers in [*((s.value, n) for s, n in types.items()), (WHOLE, whole)]:
        lines.append(f"{name:<28}" + "".join(f" {numbers[kind]:>10}" for kind in Kind))
    return lines


def type_lines(types: Iterable[TypeReport], wanted: Sequence[Kind]) -> list[str]:
    """By kind: each class, where it is made, what it holds."""
    lines: list[str] = []
    for kind in wanted:
        lines += ["", f"{kind.value}, in the order in which the first of each class was made"]
        for each in types:
            if each.kind is kind:
                holds = ", ".join([*each.marked, *each.wraps]) or "nothing of the request"
                made = ", ".join(each.made_in)
                lines.append(f"  {each.name} ({each.num_made}), made in {made}; holds {holds}")
    return lines


def function_lines(functions: dict[Stage, list[Entry]]) -> list[str]:
    lines: list[str] = []
    for stage, entries in functions.items():
        lines += ["", f"{stage.value}, in the order of first entry"]
        lines += [f"  {entry}" for entry in entries]
    return lines


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="trace one streamed chat through all of Baton")
    parser.add_argument("--json", action="store_true", help="everything, for programs")
    parser.add_argument("--list", action="store_true", help="every function, every class")
    parser.add_argument(
        "--lanes", default=NodeConfig().kv_lanes, help="KV lanes, best first (default: a node's)"
    )
    options = parser.parse_args(arguments)
    found = findings(trace(options.lanes.split(",")))
    if options.json:
        print(json.dumps(as_json(found), indent=1))
        return 0
    lines = table(found)
    kinds = list(Kind) if options.list else [Kind.CARRIER, Kind.ROW, Kind.SIDE_CAR]
    lines += type_lines(found.types, kinds)
    if options.list:
        lines += function_lines(found.functions)
    if found.idle:
        lines += ["", "left out, for it was entered without a request too:"]
        lines += [f"  {entry}" for entry in dict.fromkeys(found.idle)]
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
