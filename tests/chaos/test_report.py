"""What the runner says at the end: a case that cannot run here is told as skipped, not as kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos import hosts
from tests.chaos.__main__ import line, summary
from tests.chaos.cases import Case, Ground, Outcome, World, run_cases
from tests.chaos.partitions import partition_cases


async def _never(world: World) -> str:
    raise AssertionError(f"{world} was made for a case that cannot run")


async def test_a_case_that_cannot_run_is_skipped_with_its_reason() -> None:
    nowhere = Ground(Path(), {}, Path(), Path(), seed=1)
    cases = [Case("partition", "a cable", _never, skip="needs root")]
    [outcome] = [outcome async for outcome in run_cases(nowhere, cases)]
    assert outcome.ok
    assert outcome.word == "skipped"
    assert line(outcome).endswith("needs root")


def test_the_count_is_of_those_that_ran() -> None:
    ran = Case("stop", "p0", _never)
    outcomes = [Outcome(ran, 1.0, "T"), Outcome(ran, 1.0, error="no"), Outcome(ran, 1.0, "T")]
    assert summary(outcomes) == "2 of 3 cases kept every promise"
    outcomes.append(Outcome(Case("partition", "a cable", _never, skip="needs root"), 0.0))
    assert summary(outcomes) == "2 of 3 cases kept every promise, 1 skipped"


def test_partitions_without_root_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts.os, "geteuid", lambda: 1000)
    assert {case.skip for case in partition_cases()} == {"needs root"}
    assert len(partition_cases()) == 6
