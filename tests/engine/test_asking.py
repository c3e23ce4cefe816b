"""How kernels ask memory for what comes next: the choice, where it is kept, and that it changes no
result."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch

from baton.engine.kernels.cpu import asking
from baton.engine.kernels.cpu.asking import (
    KEYS_AND_VALUES,
    WEIGHTS,
    Question,
    choose_asking,
    fastest,
)
from baton.engine.kernels.cpu.library import CpuKernels, DecodeLayer, DecodeRows

NEXT = "of the weights that come next"
KEYS = "for keys and values into a core's second cache"
QUESTIONS = (WEIGHTS, KEYS_AND_VALUES)


@pytest.fixture(autouse=True)
def as_before(cpu_kernels: CpuKernels, monkeypatch: pytest.MonkeyPatch) -> object:
    for question in QUESTIONS:
        monkeypatch.delenv(question.switch, raising=False)
    yield
    for question in QUESTIONS:
        question.choose(cpu_kernels, next(iter(question.choices)))


def found(weights: str | None, keys: str | None) -> Callable[[Question, CpuKernels], str | None]:
    """A measurement that finds so."""
    return lambda question, kernels: weights if question is WEIGHTS else keys


@pytest.mark.parametrize(
    ("rounds", "best"),
    [
        ([[1.0, 0.9, 0.95]] * 3, 1),
        ([[1.0, 0.95, 0.9]] * 3, 2),
        ([[1.0, 0.9]] * 3, 1),
        ([[1.0, 0.98, 1.2]] * 3, 0),  # too little for a change
        ([[1.0, 0.5, 0.5], [1.0, 1.1, 1.1], [1.0, 1.1, 1.1]], 0),  # one round's luck
        ([[1.0, 1.1, 1.2]] * 3, 0),
    ],
)
def test_the_fastest_serves_if_it_gains_enough(rounds: list[list[float]], best: int) -> None:
    assert fastest(rounds) == best


def test_a_measurement_is_kept(cpu_kernels: CpuKernels, tmp_path: Path) -> None:
    with mock.patch.object(asking, "measure", side_effect=found("4", "near")) as measure:
        first = choose_asking(cpu_kernels, tmp_path)
        again = choose_asking(cpu_kernels, tmp_path)
    assert measure.call_count == 2
    fourth, keys = f"every fourth cache line {NEXT}", "keys and values into a core's first cache"
    assert first == f"asks memory for {fourth}: measured; for {keys}: measured"
    assert again == f"asks memory for {fourth}: measured before; for {keys}: measured before"


def test_another_number_of_threads_is_measured_anew(
    cpu_kernels: CpuKernels, tmp_path: Path
) -> None:
    with mock.patch.object(asking, "measure", side_effect=found("2", "far")) as measure:
        choose_asking(cpu_kernels, tmp_path)
        with mock.patch.object(torch, "get_num_threads", return_value=77):
            choose_asking(cpu_kernels, tmp_path)
    assert measure.call_count == 4


def test_beside_other_work_nothing_is_kept(
    cpu_kernels: CpuKernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each look says that the threads have waited for a core as long again."""
    monkeypatch.setattr(asking, "BUDGET_S", 0.05)
    monkeypatch.setattr(asking, "OUTPUTS", 640)
    monkeypatch.setattr(asking, "KEYS", 32)
    looks = iter(range(1_000_000))
    monkeypatch.setattr(asking, "_waited_s", lambda: float(next(looks)))
    told = choose_asking(cpu_kernels, tmp_path)
    why = "not measured, because other programs used the cores"
    assert told == f"asks memory for each cache line {NEXT}: {why}; {KEYS}: {why}"
    assert not list(tmp_path.glob("*.json"))


def test_a_quiet_machine_is_measured(
    cpu_kernels: CpuKernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asking, "BUDGET_S", 60.0)
    monkeypatch.setattr(asking, "OUTPUTS", 640)
    monkeypatch.setattr(asking, "KEYS", 32)
    monkeypatch.setattr(asking, "_waited_s", lambda: 0.0)
    told = choose_asking(cpu_kernels, tmp_path)
    assert told.count(": measured") == 2
    kept = {json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    assert len(kept & {*WEIGHTS.choices}) == len(kept & {*KEYS_AND_VALUES.choices}) == 1


def test_a_file_that_is_cut_short_is_measured_again(
    cpu_kernels: CpuKernels, tmp_path: Path
) -> None:
    with mock.patch.object(asking, "measure", side_effect=found("2", "near")) as measure:
        choose_asking(cpu_kernels, tmp_path)
        for kept in tmp_path.glob("*.json"):
            kept.write_text("")
        assert choose_asking(cpu_kernels, tmp_path).endswith(": measured")
    assert measure.call_count == 4


def test_the_user_may_choose(
    cpu_kernels: CpuKernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(WEIGHTS.switch, "2")
    monkeypatch.setenv(KEYS_AND_VALUES.switch, "far")
    with mock.patch.object(asking, "measure") as measure:
        told = choose_asking(cpu_kernels, tmp_path)
    second = f"every second cache line {NEXT}: {WEIGHTS.switch} is 2"
    assert told == f"asks memory for {second}; {KEYS}: {KEYS_AND_VALUES.switch} is far"
    assert not measure.called


def test_a_choice_that_there_is_not_is_told(
    cpu_kernels: CpuKernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(WEIGHTS.switch, "3")
    with mock.patch.object(asking, "measure", side_effect=found("1", "far")):
        told = choose_asking(cpu_kernels, tmp_path)
    ignored = f"{WEIGHTS.switch}=3 is ignored: it is none of 1, 2, 4"
    each = f"each cache line {NEXT}: measured; {ignored}"
    assert told == f"asks memory for {each}; {KEYS}: measured"


@pytest.mark.parametrize("rows", [1, 4, 6, 7, 16])
def test_results_do_not_depend_on_it(cpu_kernels: CpuKernels, rows: int) -> None:
    make = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 96, generator=make).bfloat16()
    panels = cpu_kernels.pack(torch.randn(200, 96, generator=make).bfloat16())
    made = []
    for lines in WEIGHTS.choices:
        WEIGHTS.choose(cpu_kernels, lines)
        made.append(cpu_kernels.linear(x, panels, None, 200))
    assert all(torch.equal(made[0], each) for each in made)


# Groups of four keys and of eight, calls for a share of a token and for several tokens.
@pytest.mark.parametrize(
    ("queries", "heads", "dim"), [(16, 8, 128), (32, 8, 64), (4, 2, 64), (16, 1, 96), (3, 1, 32)]
)
def test_attention_does_not_depend_on_it(
    cpu_kernels: CpuKernels, queries: int, heads: int, dim: int
) -> None:
    make = torch.Generator().manual_seed(queries)
    pool = torch.randn(2, 12, 16, heads, dim, generator=make).bfloat16()
    q = torch.randn(2, queries, dim, generator=make).bfloat16()
    layer = DecodeLayer(pool[0], pool[1], dim**-0.5)
    numbers, tables = torch.arange(2), torch.randperm(12, generator=make).view(2, 6)
    rows = DecodeRows(numbers, numbers, torch.tensor([77, 96]), 0 * numbers, tables)
    made = []
    for cache in KEYS_AND_VALUES.choices:
        KEYS_AND_VALUES.choose(cpu_kernels, cache)
        made.append(torch.empty_like(q))
        cpu_kernels.decode_attention(q, made[-1], layer, rows)
    assert torch.equal(*made)
