"""The garbage collector while modules are imported."""

from __future__ import annotations

import gc

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
