"""The console's bench: its figures are there, and what it sends keeps its bound at full size."""

from __future__ import annotations

from bench.console import Simulated, alone, one_round, p99

STREAM_BYTES = 200_000  # per second


async def test_deltas_of_a_thousand_nodes_are_bounded() -> None:
    simulated = Simulated.of(1000, 500)
    watching = simulated.feed.watch()
    first = await anext(watching)
    assert len(first) < 1_000_000
    for count in range(1, 8):
        simulated.registry.turn()
        for number in range(60):
            simulated.go_on(100 * count + number)
        await simulated.feed.tick()
        assert 10_000 < len(await anext(watching)) <= STREAM_BYTES
    await watching.aclose()


async def test_a_small_run_has_all_figures() -> None:
    simulated = Simulated.of(20, 50)
    found = await alone(simulated)
    assert {"snapshot_ms", "snapshot_kb", "delta_longest_slice_cpu_ms"} <= found.keys()
    quiet = await one_round(simulated, 1.5, watched=False)
    watched = await one_round(simulated, 1.5, watched=True)
    assert quiet["delta_bytes"] == []
    assert watched["delta_bytes"]
    assert p99(watched["late_ms"]) >= 0


def test_the_99th_percentile() -> None:
    assert p99([float(number) for number in range(101)]) == 99.0
