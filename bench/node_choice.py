"""All nodes or two drawn ones? `python -m bench.node_choice`: waits in simulated time.

R routers send Poisson prompts at 85 % load to N prefill nodes, with the router's own policy. Each
router knows at once what it has sent itself. Of the other routers' prompts it knows only what nodes
report, every REPORT mean prompt times. No wall clock; one process, seconds of CPU.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from baton.protocol.handles import NodeLoad, Role
from router.nodes.policy import Ask, NodeSnapshot, PolicySettings, choose_route

LOAD: Final = 0.85
MEAN_TOKENS: Final = 100
WARM_SHARE: Final = 0.1


@dataclass(frozen=True, slots=True)
class Case:
    """One case. `report`: the time between a node's reports, in mean prompt times."""

    nodes: int
    routers: int
    report: float


class Nodes:
    """Prefill nodes in simulated time (one token per unit), and what each router knows of them."""

    def __init__(self, case: Case, rng: random.Random) -> None:
        self._case = case
        self._free_at = [0.0] * case.nodes
        self._period = case.report * MEAN_TOKENS
        self._phase = [rng.random() * self._period for _ in range(case.nodes)]
        self._period_of = [-1] * case.nodes
        self._reported = [0] * case.nodes
        self._sent = [[0] * case.nodes for _ in range(case.routers)]  # since the last report

    def seen_by(self, router: int, now: float) -> list[NodeSnapshot]:
        for node, free_at in enumerate(self._free_at):
            period = int((now - self._phase[node]) // self._period)
            if period != self._period_of[node]:
                self._period_of[node] = period
                told_at = period * self._period + self._phase[node]
                self._reported[node] = int(max(0.0, free_at - told_at))
                for sent in self._sent:
                    sent[node] = 0
        return [
            _snapshot(str(node), Role.PREFILL, self._reported[node], self._sent[router][node])
            for node in range(self._case.nodes)
        ]

    def send(self, router: int, node: int, tokens: int, now: float) -> float:
        """Send a prompt; return how long it waits, in mean prompt times."""
        start = max(now, self._free_at[node])
        self._free_at[node] = start + tokens
        self._sent[router][node] += tokens
        return (start - now) / MEAN_TOKENS


def _snapshot(name: str, role: Role, waiting: int, sent: int) -> NodeSnapshot:
    return NodeSnapshot(
        name, name, role, "m", "layout", 16, "float32",
        load=NodeLoad(waiting_tokens=waiting), unreported_tokens=sent,
    )  # fmt: skip


def waits(case: Case, settings: PolicySettings, requests: int, seed: int) -> list[float]:
    """Return the sorted waits before a prompt is computed, in mean prompt times, after a
    warm-up.
    """
    rng = random.Random(seed)
    nodes, decode = Nodes(case, rng), _snapshot("d", Role.DECODE, 0, 0)
    ask, now, found = Ask((1,)), 0.0, list[float]()
    for _ in range(requests):
        now += rng.expovariate(case.nodes * LOAD / MEAN_TOKENS)
        tokens = max(1, int(rng.expovariate(1 / MEAN_TOKENS)))
        router = rng.randrange(case.routers)
        route = choose_route(ask, [*nodes.seen_by(router, now), decode], settings, rng.random())
        assert route.prefill is not None, "there are prefill nodes"
        found.append(nodes.send(router, int(route.prefill.node_id), tokens, now))
    return sorted(found[int(requests * WARM_SHARE) :])


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.node_choice", description=__doc__)
    parser.add_argument("--requests", type=int, default=8000, help="of each case")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(argv)
    for case in (Case(n, r, t) for n in (4, 16, 32) for r in (1, 4, 8) for t in (0.05, 1.0)):
        row: dict[str, float] = {
            "nodes": case.nodes,
            "routers": case.routers,
            "report": case.report,
        }
        for name, settings in (
            ("all", PolicySettings()),
            ("two", PolicySettings(two_choices=True)),
        ):
            sorted_waits = waits(case, settings, options.requests, options.seed)
            row[f"{name}_mean"] = round(sum(sorted_waits) / len(sorted_waits), 2)
            row[f"{name}_p99"] = round(sorted_waits[int(0.99 * len(sorted_waits))], 2)
        sys.stdout.write(json.dumps(row) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
