"""Engines beside busy loops (bench.engine_neighbours), with programs that play engines."""

from __future__ import annotations

import sys
from pathlib import Path

from bench.engine_neighbours import DECODED, ROWS, baton_command, busy, compared
from bench.peer import PeerServer

FAKE = f"{sys.executable} -m tests.bench.fake_peer"  # 0.25 s for each new token of an answer


def test_each_side_is_measured_without_loops_and_beside_them() -> None:
    with (
        PeerServer.start(FAKE, Path("/m"), "none", 2) as one,
        PeerServer.start(FAKE, Path("/m"), "none", 2) as other,
    ):
        found = compared({"one": one, "other": other}, "M", 1000, loops=1, rounds=2)
    rates = [(512 if batch == 0 else batch) / 0.25 for _, batch in ROWS]
    assert [(line["loops"], line["side"], line["tokens/s"], line["kept"]) for line in found] == [
        (loops, side, rate, 1.0 if loops else None)
        for loops in (0, 1)
        for rate in rates
        for side in ("one", "other")
    ]
    assert {line["over first"] for line in found} == {"1.00 (1.00-1.00)"}
    assert DECODED > 1


def test_loops_end_with_the_measurement() -> None:
    with busy(2) as processes:
        assert [process.poll() for process in processes] == [None, None]
    assert [process.returncode for process in processes] == [-9, -9]


def test_variables_reach_the_side_that_names_them() -> None:
    command = baton_command("A=1 B='2 3'")
    assert command.startswith("env A=1 'B=2 3' ")
    assert command.endswith("-m bench.engine_process")
    assert baton_command("") == f"env {sys.executable} -m bench.engine_process"
