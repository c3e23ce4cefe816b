"""How torch's threads wait: asleep wherever Baton computes, as others want it where others do."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

import baton
from bench.peer import environment

DEFAULT_SPINS = "300000"


def spins(statement: str, **variables: str) -> str:
    """Return how often OpenMP's threads spin, in a process that begins with `statement`."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
    }
    told = subprocess.run(
        [sys.executable, "-c", f"{statement}; import torch"], capture_output=True, text=True,
        env={**environment, "OMP_DISPLAY_ENV": "VERBOSE", **variables}, check=True,
    ).stderr  # fmt: skip
    return re.findall(r"GOMP_SPINCOUNT = '(\d+)'", told)[0]


@pytest.mark.parametrize("module", ["baton.llm", "encode_node.__main__", "bench.engine"])
def test_threads_sleep_where_baton_computes(module: str) -> None:
    assert spins(f"import {module}") == "0"


def test_the_user_has_the_last_word() -> None:
    assert int(spins("import baton.llm", OMP_WAIT_POLICY="ACTIVE")) > int(DEFAULT_SPINS)


def test_peers_wait_as_without_baton() -> None:
    assert spins("import bench.peers.protocol") == DEFAULT_SPINS
    assert ("OMP_WAIT_POLICY" in environment()) is not baton.sets_wait_policy
