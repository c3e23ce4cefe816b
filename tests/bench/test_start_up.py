"""How starts are measured: which of them find packed weights, and in whose folder."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from baton.protocol.errors import ConfigError
from bench import start_up
from bench.start_up import FIRST, PRIVATE, SECOND, OwnCache, measure, table

FIGURES = {"ready": 2.0, "memory": 100.0, "killed": 1.0}


class Starts:
    """Stands for clusters: shared ones leave `num_bytes` of weights. `found`: whether each start
    shares weights, and how many files of them were there."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.found: list[tuple[bool, int]] = []

    async def one_start(self, flags: Sequence[str], environ: Mapping[str, str]) -> dict[str, float]:
        self.start(flags, environ)
        return FIGURES

    def start(self, flags: Sequence[str], environ: Mapping[str, str]) -> None:
        shared = "--no-shared-weights" not in flags
        folder = Path(environ["XDG_CACHE_HOME"], "baton", "weights")
        self.found.append((shared, len(list(folder.glob("*.weights")))))
        if shared:
            assert flags[-2:] == ["--shared-weights-cache", "auto"], "not what the user has set"
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "packed.weights").write_bytes(bytes(self.num_bytes))


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> Starts:
    made = Starts(4096)
    monkeypatch.setattr(start_up, "one_start", made.one_start)
    return made


async def test_only_a_second_start_finds_packed_weights(starts: Starts, tmp_path: Path) -> None:
    before = dict(os.environ)
    found = await measure(
        tmp_path / "m", 2, beside=False, kept=True, cache=OwnCache(tmp_path / "c")
    )
    assert list(found) == [PRIVATE, FIRST, SECOND]
    _, *measured = starts.found
    assert measured == 2 * [(False, 1), (True, 0), (True, 1)]
    assert dict(os.environ) == before


async def test_without_kept_there_are_first_starts_alone(starts: Starts, tmp_path: Path) -> None:
    found = await measure(tmp_path / "m", 2, beside=False, kept=False, cache=OwnCache(tmp_path))
    assert {way: len(rounds) for way, rounds in found.items()} == {PRIVATE: 2, FIRST: 2}
    assert [num_files for shared, num_files in starts.found if shared] == [0, 0, 0]


async def test_a_second_start_needs_kept_weights(starts: Starts, tmp_path: Path) -> None:
    starts.num_bytes = 0
    with pytest.raises(ConfigError, match="no packed weights are kept"):
        await measure(tmp_path / "m", 2, beside=False, kept=True, cache=OwnCache(tmp_path))
    assert len(starts.found) == 1


def test_ratios_are_of_each_two_ways() -> None:
    found = {PRIVATE: [FIGURES], FIRST: [FIGURES], SECOND: [{**FIGURES, "ready": 1.0}]}
    head, _, ready, *_ = table(found).splitlines()
    assert head.count("over") == 3
    assert ready.split(" | ")[4:] == ["1.00 (1.00-1.00)", "0.50 (0.50-0.50)", "0.50 (0.50-0.50) |"]
