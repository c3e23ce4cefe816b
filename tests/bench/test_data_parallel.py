"""Data-parallel ranks against one: the comparison by hand, and CPU time of a process that ran."""

from __future__ import annotations

import os
import time

import pytest

from bench.data_parallel import RankRun, compared, cpu_seconds
from bench.start_up import processes


def test_ratios_are_of_rounds() -> None:
    rounds = [
        {1: RankRun(100.0, 2.0), 2: RankRun(50.0, 4.0)},
        {1: RankRun(120.0, 3.0), 2: RankRun(180.0, 4.0)},
        {1: RankRun(80.0, 2.0), 2: RankRun(80.0, 1.0)},
    ]
    one, two = compared(rounds)
    assert one == {
        "ranks": 1, "tokens/s": 100.0, "CPU ms": 2.0,
        "times as fast by CPU time": "1.00 (1.00-1.00)", "by the clock": "1.00 (1.00-1.00)",
    }  # fmt: skip
    assert two == {
        "ranks": 2, "tokens/s": 80.0, "CPU ms": 4.0,
        "times as fast by CPU time": "0.75 (0.50-2.00)", "by the clock": "1.00 (0.50-1.50)",
    }  # fmt: skip


def test_cpu_time_of_processes() -> None:
    this_process = os.getpid()
    before, own = cpu_seconds([this_process]), time.process_time()
    while time.process_time() < own + 0.05:
        sum(range(1000))
    assert cpu_seconds([this_process]) - before == pytest.approx(
        time.process_time() - own, abs=0.03
    )
    assert this_process not in processes(), "those that it has started"
