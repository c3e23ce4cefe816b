"""How torch's threads wait: briefly awake wherever Baton computes, as others want it elsewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

import baton
from bench.peer import environment

OWN = int(baton.WAITING["GOMP_SPINCOUNT"])
OF_OPENMP = 300_000


def spins(statement: str, **variables: str) -> int:
    """Return how often OpenMP's threads spin, in a process that begins with `statement`."""
    others = {name: value for name, value in os.environ.items() if name not in baton.WAITING}
    told = subprocess.run(
        [sys.executable, "-c", f"{statement}; import torch"], capture_output=True, text=True,
        env={**others, "OMP_DISPLAY_ENV": "VERBOSE", **variables}, check=True,
    ).stderr  # fmt: skip
    return int(re.findall(r"GOMP_SPINCOUNT = '(\d+)'", told)[0])


@pytest.mark.parametrize("module", ["baton.llm", "encode_node.__main__", "bench.engine"])
def test_threads_sleep_soon_where_baton_computes(module: str) -> None:
    assert spins(f"import {module}") == OWN


def test_the_user_has_the_last_word() -> None:
    assert spins("import baton.llm", OMP_WAIT_POLICY="PASSIVE") == 0


def test_peers_wait_as_without_baton() -> None:
    assert spins("import bench.peers.protocol") == OF_OPENMP
    assert baton.WAITING.keys().isdisjoint(environment()) is baton.sets_waiting
