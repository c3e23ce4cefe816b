"""Garbage collection of a serving process: what was there at the start is never looked at again.

A router's modules, templates and metrics are some 200,000 objects that live as long as it does, and
CPython's defaults look through the young ones at every 700th allocation: a seventh of the CPU time
of a request, and pauses of 10 ms and more in the middle of streams. Nearly all of a request's
objects go by their reference counts; cycles are what is left.
"""

from __future__ import annotations

import gc
from typing import Final

THRESHOLDS: Final = (20_000, 20, 50)  # young objects, collections of those, of the next older


def settle() -> None:
    """All is loaded: keep it out of the collector's sight. Once, before serving."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
