"""Fixtures of the engine's tests."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from baton.engine.checkpoint import shared_weights
from baton.engine.kernels.cpu import library
from baton.engine.kernels.cpu.build import INSTRUCTION_SETS, CannotBuild, CompilerFailed, missing
from baton.engine.kernels.cpu.library import CpuKernels
from baton.engine.loading import loading

_SETS = {each.name: each for each in INSTRUCTION_SETS}
# AMX's kernels on any processor with AVX-512: tiles.h's instructions as the manual defines them.
EMULATED_TILES = replace(
    _SETS["avx512"],
    name="tiles",
    title="AVX-512 with emulated tiles",
    compiler_flags=(*_SETS["avx512"].compiler_flags, "-DBATON_EMULATED_TILES"),
    tiles=True,
)
_SHOWN = [each for each in INSTRUCTION_SETS if not (each.tiles and missing(each.cpu_flags))]
_SHOWN.append(EMULATED_TILES)
_SHOWN.sort(key=lambda each: bool(missing(each.cpu_flags)))  # what this processor has comes first


@pytest.fixture(scope="module", params=_SHOWN, ids=lambda each: each.name)
def cpu_kernels(request: pytest.FixtureRequest) -> Iterator[CpuKernels]:
    """Each instruction set's kernels in turn, which meanwhile serve the engine."""
    try:
        found = CpuKernels(request.param)
    except CompilerFailed:
        raise
    except CannotBuild as error:
        pytest.skip(str(error))
    with mock.patch.object(library, "_found", return_value=(found, "")):
        yield found


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where files of shared weights are; small models are shared, too. The disk has small pages,
    so that files lie in memory."""
    place = tmp_path / "shared"
    place.mkdir()
    monkeypatch.setattr(shared_weights, "FOLDER", place)
    monkeypatch.setattr(shared_weights, "cache_folder", lambda name: place / name)
    monkeypatch.setattr(shared_weights, "maps_large", lambda _: False)
    monkeypatch.setattr(loading, "LEAST_BYTES", 0)
    return place
