"""The simulation of placements: its arithmetic, and what it is asked about."""

from __future__ import annotations

from bench.measure import SloLimits
from bench.placement import Machine, PlacementWay, Simulation, compare
from bench.recorded import Scaling, bundled, read_trace
from bench.workload import PlannedRequest

MACHINE = Machine(
    tokens_per_s=1000.0, both=2.0, both_decode=1.0, chunk_s=0.0, context_s=0.0, step_s=0.01,
    stream_s=0.001, hand_over_s=0.002, request_s=0.0, token_s=0.0,
)  # fmt: skip
COLOCATED = PlacementWay("colocated", 2048)
REMOTE = PlacementWay("remote", 128, 512)


def prompt(index: int, size: int, at_s: float = 0.0, tokens: int = 3) -> PlannedRequest:
    return PlannedRequest(index, at_s, tuple(range(1000 * index, 1000 * index + size)), tokens)


def times(way: PlacementWay, *plan: PlannedRequest) -> list[list[float]]:
    asked = Simulation(MACHINE, way).run(plan)
    return [[round(at, 6) for at in each.token_times] for each in asked]


def test_one_prompt_is_plain_arithmetic() -> None:
    assert times(COLOCATED, prompt(1, 400)) == [[0.2, 0.211, 0.222]]
    assert times(REMOTE, prompt(1, 400)) == [[0.4, 0.413, 0.424]]
    assert times(REMOTE, prompt(1, 400, at_s=1.0, tokens=1)) == [[1.4]]


def test_what_was_computed_before_is_a_hit() -> None:
    [first, second] = times(REMOTE, prompt(1, 400), prompt(1, 400, at_s=1.0))
    assert first[0] == 0.4
    assert second[0] == 1.016, "twelve blocks are known"


def test_prompts_that_come_together_leave_one_by_one_in_small_steps() -> None:
    burst = [prompt(index, 100, tokens=1) for index in range(4)]
    large = times(PlacementWay("large", 128, 2048), *burst)
    small = times(PlacementWay("small", 128, 128), *burst)
    assert [at for [at] in large] == [0.1, 0.4, 0.4, 0.4], "the first came alone"
    assert [at for [at] in small] == [0.1, 0.228, 0.356, 0.4]


def test_a_prompt_waits_at_the_gate_while_a_node_has_half_a_second_of_work() -> None:
    burst = [prompt(index, 400, tokens=1) for index in range(3)]
    assert times(PlacementWay("large", 128, 2048), *burst) == [[0.4], [0.8], [1.2]]


def test_a_burst_spreads_over_both_nodes() -> None:
    burst = [prompt(index, 500, tokens=1) for index in range(4)]
    simulation = Simulation(MACHINE, PlacementWay("auto", 128, 512, auto=True))
    asked = simulation.run(burst)
    assert simulation.num_local == 2
    assert max(each.token_times[0] for each in asked) < 1.1


def test_a_burst_that_waits_at_the_gate_spreads_as_well() -> None:
    burst = [prompt(index, 500, tokens=20) for index in range(24)]
    auto = Simulation(MACHINE, PlacementWay("auto", 128, 512, auto=True))
    last = max(each.token_times[-1] for each in auto.run(burst))
    assert 6 <= auto.num_local <= 12
    assert last < 0.75 * max(map(max, times(REMOTE, *burst)))


def test_the_comparison_says_what_the_log_says() -> None:
    """On the bundled trace: decisions beat none, small steps beat large ones."""
    trace = read_trace(bundled()["mooncake_conversation"])
    scaling = Scaling(4.0, 8.0, 192, 32, 1800, (300, 4000))
    ways = compare(trace, Machine(3500.0), scaling, SloLimits(0.5, 0.05), draws=8)
    within = {name: way["within"] for name, way in ways.items()}
    assert within["auto, steps of 512"] > within["auto, steps of 2048"]
    assert within["auto, steps of 512"] > within["remote, steps of 512"] + 0.1
    assert ways["remote, steps of 512"]["local"] == 0.0
    assert 0.3 < ways["auto, steps of 512"]["local"] < 0.7
