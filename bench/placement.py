"""Where prompts are computed and in how large steps, simulated: `python -m bench.placement`.

Requests of recorded traces, scaled as `baton bench serve --goodput` scales them, meet one core for
prefill and one for decode, or both cores in one node. The decision is the router's own
(router/nodes/placement.py), from what it would know: loads as of each node's last step, and what it
has sent, and who waits at its gate. A prompt leaves the gate when the node that gets it is soon
done with its queue. There is no wall clock and no model, only seconds of CPU. The simulation knows
nothing of the machine but the numbers in `Machine`.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import xxhash

from baton.protocol.handles import NodeLoad
from bench.measure import SloLimits
from bench.recorded import Scaling, TraceRequest, bundled, plan_trace, read_trace
from bench.workload import PlannedRequest
from router.nodes.placement import Prompt, placement_costs, queued_tokens
from router.request.gate.gate import GateSettings

BLOCK: Final = 32  # tokens of a prefix block
FADING: Final = 0.9  # of what a node's rate is measured over, per step
WINDOW_S: Final = GateSettings().prefill_window_s
WARM: Final = 100.0  # tokens computed before the first request


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine's numbers, in seconds unless said otherwise.

    `both`: how much faster two cores compute a prompt than one. `both_decode`: the same for a step
    of streams. `chunk_s`: the part of a step with prompts that does not depend on its size.
    `context_s`: per token and token before it. `request_s`, `token_s`: the router's work, on the
    prefill node's core.
    """

    tokens_per_s: float = 5000.0  # of one core
    both: float = 1.8
    both_decode: float = 1.3
    chunk_s: float = 0.004
    context_s: float = 3e-8
    step_s: float = 0.006
    stream_s: float = 0.0008
    hand_over_s: float = 0.005
    request_s: float = 0.004
    token_s: float = 6e-5


@dataclass(frozen=True, slots=True)
class PlacementWay:
    """A way to serve. `prefill_step` None: one node does both. `auto`: the router decides, else
    remote.
    """

    name: str
    decode_step: int
    prefill_step: int | None = None
    auto: bool = False


WAYS: Final = (
    PlacementWay("colocated", 2048),
    PlacementWay("remote, steps of 512", 128, 512),
    PlacementWay("auto, steps of 2048", 128, 2048, auto=True),
    PlacementWay("auto, steps of 512", 128, 512, auto=True),
)


@dataclass(slots=True, eq=False)
class SimulatedRequest:
    """One request, and what became of it."""

    planned: PlannedRequest
    blocks: list[int]  # chained hashes
    left: int = 0  # prompt tokens to compute
    uncached: int = 0  # at the start
    token_times: list[float] = field(default_factory=list[float])

    @property
    def ttft_s(self) -> float:
        return self.token_times[0] - self.planned.at_s

    def within(self, slo: SloLimits) -> bool:
        times = self.token_times
        per_token = (times[-1] - times[0]) / max(1, len(times) - 1)
        return self.ttft_s <= slo.ttft_s and per_token <= slo.tpot_s


class SimulatedNode:
    """A node on `cores` cores: first come, first served; streams come first in each step."""

    def __init__(self, machine: Machine, step_tokens: int, cores: int) -> None:
        self.waiting: list[SimulatedRequest] = []
        self.streams: list[SimulatedRequest] = []
        self.busy = False
        self.debt_s = 0.0  # of the router on this node's core
        # As router.nodes.placement.Node needs it: the load of the last step, and what was sent
        # since. The rate says that a prompt has been computed here before.
        rate = machine.tokens_per_s
        self.load = NodeLoad(prefill_tokens_per_s=rate, own_prefill_tokens_per_s=rate)
        self.unreported_tokens = self.pooling = 0
        self._machine = machine
        self._step_tokens = step_tokens
        self._cores = cores
        self._known: set[int] = set()
        self._recent = (WARM, WARM / machine.tokens_per_s)  # tokens, seconds

    @property
    def assigned(self) -> int:
        return len(self.waiting) + len(self.streams)

    @property
    def assigned_tokens(self) -> int:
        return sum(each.uncached for each in self.waiting)

    def cached(self, asked: SimulatedRequest) -> int:
        known = sum(1 for _ in itertools.takewhile(self._known.__contains__, asked.blocks))
        return min(known * BLOCK, len(asked.planned.prompt) - 1)

    def know(self, asked: SimulatedRequest) -> None:
        self._known.update(asked.blocks)

    def take(self, asked: SimulatedRequest) -> None:
        asked.left = asked.uncached = len(asked.planned.prompt) - self.cached(asked)
        self.unreported_tokens += asked.uncached
        self.waiting.append(asked)

    def begin_step(
        self,
    ) -> tuple[float, list[SimulatedRequest], list[tuple[SimulatedRequest, int]]]:
        """Return the step's seconds, the streams in it, and its prompts with their numbers of
        tokens.
        """
        machine, streams = self._machine, list(self.streams)
        room = self._step_tokens - len(streams)
        chunks: list[tuple[SimulatedRequest, int]] = []
        for asked in self.waiting:
            if room > 0:
                chunks.append((asked, min(asked.left, room)))
                room -= chunks[-1][1]
        both, both_decode = machine.both, machine.both_decode
        if self._cores == 1:
            both = both_decode = 1.0
        seconds = self.debt_s
        if streams:
            seconds += (machine.step_s + machine.stream_s * len(streams)) / both_decode
        tokens = sum(count for _, count in chunks)
        if chunks:
            pairs = sum(
                count * (len(asked.planned.prompt) - asked.left + count / 2)
                for asked, count in chunks
            )
            seconds += machine.chunk_s
            seconds += (tokens / machine.tokens_per_s + pairs * machine.context_s) / both
            before, spent = self._recent
            self._recent = FADING * before + tokens, FADING * spent + seconds
        self.debt_s = 0.0
        return seconds, streams, chunks

    def report(self) -> None:
        tokens, seconds = self._recent
        self.load = NodeLoad(
            running=len(self.streams),
            waiting=len(self.waiting),
            waiting_tokens=sum(each.left for each in self.waiting),
            prefill_tokens_per_s=tokens / seconds,
            own_prefill_tokens_per_s=tokens / seconds,
        )
        self.unreported_tokens = self.pooling = 0


class Simulation:
    """One way to serve, through one plan."""

    def __init__(self, machine: Machine, way: PlacementWay) -> None:
        self._machine = machine
        self._way = way
        apart = way.prefill_step is not None
        self._decode = SimulatedNode(machine, way.decode_step, 1 if apart else 2)
        self._prefill = SimulatedNode(machine, way.prefill_step, 1) if way.prefill_step else None
        self._line: list[SimulatedRequest] = []  # those that wait at the gate
        self._events: list[tuple[float, int, SimulatedRequest | SimulatedNode, object]] = []
        self._order = itertools.count()
        # The router shares all cores of one node, or the prefill node's.
        self._router_share = 1.0 if apart else 0.5
        self.num_local = 0

    def run(self, plan: Sequence[PlannedRequest]) -> list[SimulatedRequest]:
        asked = [SimulatedRequest(each, _chain(each.prompt)) for each in plan]
        for each in asked:
            self._push(each.planned.at_s, each, False)
        while self._events:
            now, _, who, what = heapq.heappop(self._events)
            if isinstance(who, SimulatedNode):
                self._end_step(who, now, what)
            elif what:  # handed over
                self._decode.streams.append(who)
                self._decode.know(who)
                self._begin_step(self._decode, now)
            else:
                self._arrive(who, now)
        return asked

    def _push(self, at: float, who: SimulatedRequest | SimulatedNode, what: object) -> None:
        heapq.heappush(self._events, (at, next(self._order), who, what))

    @property
    def _beside_router(self) -> SimulatedNode:
        return self._prefill or self._decode

    def _arrive(self, asked: SimulatedRequest, now: float) -> None:
        self._beside_router.debt_s += self._machine.request_s * self._router_share
        self._line.append(asked)
        self._let_in(now)

    def _let_in(self, now: float) -> None:
        while self._line:
            asked, first = self._line[0], self._prefill or self._decode
            if _has_room(first, asked):
                node = self._chosen(asked)
            else:
                node = self._chosen(asked, len(self._line) - 1)
                if node is first or not _has_room(node, asked):
                    return
            del self._line[0]
            self.num_local += node is self._decode
            node.take(asked)
            self._begin_step(node, now)

    def _chosen(self, asked: SimulatedRequest, behind: int = 0) -> SimulatedNode:
        prefill, decode = self._prefill, self._decode
        if prefill is None or not self._way.auto:
            return prefill or decode
        size = len(asked.planned.prompt)
        prompt = Prompt(size, prefill.cached(asked), decode.cached(asked), behind)
        costs = placement_costs(prompt, prefill, decode)
        return decode if costs is not None and costs.local_is_cheaper else prefill

    def _begin_step(self, node: SimulatedNode, now: float) -> None:
        if not node.busy and (node.waiting or node.streams):
            node.busy = True
            seconds, *plan = node.begin_step()
            self._push(now + seconds, node, plan)

    def _end_step(self, node: SimulatedNode, now: float, what: object) -> None:
        assert isinstance(what, list)
        streams, chunks = what
        node.busy = False
        for asked in streams:
            asked.token_times.append(now)
            if len(asked.token_times) >= asked.planned.max_tokens:
                node.streams.remove(asked)
                node.know(asked)
        self._beside_router.debt_s += len(streams) * self._machine.token_s * self._router_share
        for asked, count in chunks:
            asked.left -= count
            if asked.left == 0:
                self._computed(node, asked, now)
        node.report()
        self._let_in(now)
        self._begin_step(node, now)

    def _computed(self, node: SimulatedNode, asked: SimulatedRequest, now: float) -> None:
        node.waiting.remove(asked)
        node.know(asked)
        asked.token_times.append(now)
        if asked.planned.max_tokens > 1 and node is self._decode:
            node.streams.append(asked)
        elif asked.planned.max_tokens > 1:
            self._push(now + self._machine.hand_over_s, asked, True)


def _has_room(node: SimulatedNode, asked: SimulatedRequest) -> bool:
    queued, rate = queued_tokens(node), node.load.prefill_tokens_per_s
    return not queued or queued + len(asked.planned.prompt) <= rate * WINDOW_S


def _chain(prompt: str | tuple[int, ...]) -> list[int]:
    whole = range(0, len(prompt) - BLOCK + 1, BLOCK)
    return list(itertools.accumulate((_digest(prompt[at : at + BLOCK]) for at in whole), _link))


def _link(parent: int, block: int) -> int:
    return _digest((parent, block))


def _digest(value: object) -> int:
    return xxhash.xxh3_64_intdigest(repr(value).encode())


def compare(
    trace: Sequence[TraceRequest], machine: Machine, scaling: Scaling, slo: SloLimits, draws: int
) -> dict[str, dict[str, float]]:
    """Return, by way, the share of requests within both limits, TTFT p99, and the local share."""
    found: dict[str, dict[str, float]] = {}
    for way in WAYS:
        asked: list[SimulatedRequest] = []
        num_local = 0
        for seed in range(1, draws + 1):
            simulation = Simulation(machine, way)
            asked += simulation.run(plan_trace(trace, scaling, seed))
            num_local += simulation.num_local
        ttfts = sorted(each.ttft_s for each in asked)
        found[way.name] = {
            "within": round(sum(each.within(slo) for each in asked) / len(asked), 3),
            "ttft_p99_ms": round(ttfts[int(0.99 * len(ttfts))] * 1e3),
            "local": round(num_local / len(asked), 2),
        }
    return found


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.placement", description=__doc__)
    parser.add_argument("--draws", type=int, default=16, help="plans of 8 s, of each case")
    parser.add_argument("--slo-ttft-ms", type=float, default=500.0)
    parser.add_argument("--slo-tpot-ms", type=float, default=50.0)
    options = parser.parse_args(argv)
    slo = SloLimits(options.slo_ttft_ms / 1e3, options.slo_tpot_ms / 1e3)
    for name, path in bundled().items():
        trace = read_trace(path)
        for speed in (5000.0, 3500.0, 2500.0):
            for rate in (1.0, 2.0, 4.0, 8.0):
                scaling = Scaling(rate, 8.0, 192, 32, 1800, (300, 4000))
                ways = compare(trace, Machine(speed), scaling, slo, options.draws)
                row = {"trace": name, "tokens_per_s": speed, "rate": rate, "ways": ways}
                sys.stdout.write(json.dumps(row) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
