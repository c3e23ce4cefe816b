"""The console's bench: its figures are there, and what it sends keeps its bound at full size."""

from __future__ import annotations

import pytest

from bench.console import LoopTurns, Simulated, alone, one_round

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
    assert watched["turns"].late_ms(0.99) > 0


def test_how_late_a_timer_comes() -> None:
    """Uniform in each turn: of a turn of 1 ms a hundredth of the moments waits 0.99 ms or more."""
    assert LoopTurns([0.001] * 500, 0.5).late_ms(0.99) == pytest.approx(0.99, abs=0.001)
    # A tenth of the time is one turn of 100 ms: the last hundredth of all moments is 10 ms of it.
    turns = LoopTurns([0.0001] * 9000 + [0.1], 1.0)
    assert turns.late_ms(0.99) == pytest.approx(90, abs=0.1)
    assert turns.late_ms(0.5) < 0.1
    idle = LoopTurns([0.001] * 5, 1.0)
    assert idle.late_ms(0.99) < 0.001, "fewer than a hundredth of the moments meet a turn"
