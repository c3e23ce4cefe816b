"""The garbage collector while modules are imported."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from baton.runtime.collector import importing


def test_imports_are_not_collected_and_what_they_made_is_frozen() -> None:
    before = gc.get_freeze_count()
    try:
        with importing():
            assert not gc.isenabled()
            made = [[each] for each in range(1000)]
        assert gc.isenabled()
        assert gc.get_freeze_count() >= before + len(made)
    finally:
        gc.unfreeze()


def test_a_failed_import_leaves_the_collector_on() -> None:
    try:
        with pytest.raises(ImportError), importing():
            raise ImportError
        assert gc.isenabled()
    finally:
        gc.unfreeze()


def test_nothing_is_frozen_when_the_process_ends() -> None:
    program = """
import atexit, gc
atexit.register(lambda: print(gc.get_freeze_count()))
from baton.runtime.collector import importing
with importing():
    import json
assert gc.get_freeze_count() > 0
"""
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert ended.stdout == "0\n"
