"""How often products ask memory for what comes next: the choice, where it is kept, and that it
changes no result."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import torch

from baton.engine.kernels.cpu import asking
from baton.engine.kernels.cpu.asking import LINES, SWITCH, choose_asking, fastest
from baton.engine.kernels.cpu.library import CpuKernels

NEXT = "of the weights that come next"


@pytest.fixture(autouse=True)
def as_before(cpu_kernels: CpuKernels, monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.delenv(SWITCH, raising=False)
    yield
    cpu_kernels.ask_every(LINES[0])


@pytest.mark.parametrize(
    ("rounds", "best"),
    [
        ([[1.0, 0.9, 0.95]] * 3, 2),
        ([[1.0, 0.95, 0.9]] * 3, 4),
        ([[1.0, 0.98, 1.2]] * 3, 1),  # too little for a change
        ([[1.0, 0.5, 0.5], [1.0, 1.1, 1.1], [1.0, 1.1, 1.1]], 1),  # one round's luck
        ([[1.0, 1.1, 1.2]] * 3, 1),
    ],
)
def test_the_fastest_serves_if_it_gains_enough(rounds: list[list[float]], best: int) -> None:
    assert fastest(rounds) == best


def test_a_measurement_is_kept(cpu_kernels: CpuKernels, tmp_path: Path) -> None:
    with mock.patch.object(asking, "measure", return_value=4) as measure:
        first = choose_asking(cpu_kernels, tmp_path)
        again = choose_asking(cpu_kernels, tmp_path)
    assert measure.call_count == 1
    assert first == f"asks memory for every fourth cache line {NEXT}: measured"
    assert again == f"asks memory for every fourth cache line {NEXT}: measured before"


def test_another_number_of_threads_is_measured_anew(
    cpu_kernels: CpuKernels, tmp_path: Path
) -> None:
    with mock.patch.object(asking, "measure", return_value=2) as measure:
        choose_asking(cpu_kernels, tmp_path)
        with mock.patch.object(torch, "get_num_threads", return_value=77):
            choose_asking(cpu_kernels, tmp_path)
    assert measure.call_count == 2


def test_beside_other_work_nothing_is_kept(
    cpu_kernels: CpuKernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each look says that the threads have waited for a core as long again."""
    monkeypatch.setattr(asking, "BUDGET_S", 0.05)
    monkeypatch.setattr(asking, "OUTPUTS", 640)
    looks = iter(range(1_000_000))
    monkeypatch.setattr(asking, "_waited_s", lambda: float(next(looks)))
    told = choose_asking(cpu_kernels, tmp_path)
    why = "not measured, because other programs used the cores"
    assert told == f"asks memory for each cache line {NEXT}: {why}"
    assert not list(tmp_path.glob("*.json"))


def test_a_quiet_machine_is_measured(
    cpu_kernels: CpuKernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asking, "BUDGET_S", 60.0)
    monkeypatch.setattr(asking, "OUTPUTS", 640)
    monkeypatch.setattr(asking, "_waited_s", lambda: 0.0)
    assert choose_asking(cpu_kernels, tmp_path).endswith(": measured")
    [kept] = tmp_path.glob("*.json")
    assert kept.read_text() in map(str, LINES)


def test_a_file_that_is_cut_short_is_measured_again(
    cpu_kernels: CpuKernels, tmp_path: Path
) -> None:
    with mock.patch.object(asking, "measure", return_value=2) as measure:
        choose_asking(cpu_kernels, tmp_path)
        [kept] = tmp_path.glob("*.json")
        kept.write_text("")
        assert choose_asking(cpu_kernels, tmp_path).endswith(": measured")
    assert measure.call_count == 2


def test_the_user_may_choose(
    cpu_kernels: CpuKernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SWITCH, "2")
    with mock.patch.object(asking, "measure") as measure:
        told = choose_asking(cpu_kernels, tmp_path)
    assert told == f"asks memory for every second cache line {NEXT}: {SWITCH} is 2"
    assert not measure.called


def test_a_choice_that_there_is_not_is_told(
    cpu_kernels: CpuKernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SWITCH, "3")
    with mock.patch.object(asking, "measure", return_value=1):
        told = choose_asking(cpu_kernels, tmp_path)
    ignored = f"{SWITCH}=3 is ignored: it is none of (1, 2, 4)"
    assert told == f"asks memory for each cache line {NEXT}: measured; {ignored}"


@pytest.mark.parametrize("rows", [1, 4, 6, 7, 16])
def test_results_do_not_depend_on_it(cpu_kernels: CpuKernels, rows: int) -> None:
    make = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 96, generator=make).bfloat16()
    panels = cpu_kernels.pack(torch.randn(200, 96, generator=make).bfloat16())
    found = []
    for lines in LINES:
        cpu_kernels.ask_every(lines)
        found.append(cpu_kernels.linear(x, panels, None, 200))
    assert all(torch.equal(found[0], each) for each in found)
