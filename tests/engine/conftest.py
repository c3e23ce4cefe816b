"""Fixtures of the engine's tests."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest

from baton.engine.kernels.cpu import library
from baton.engine.kernels.cpu.build import INSTRUCTION_SETS, CannotBuild, CompilerFailed
from baton.engine.kernels.cpu.library import CpuKernels


@pytest.fixture(scope="module", params=INSTRUCTION_SETS, ids=lambda each: each.name)
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
