"""Settings of the garbage collector for a process that starts and serves.

Imports make hundreds of thousands of objects, and hardly one of them is garbage. A collector that
looks for it took an eighth of a node's imports.

A router's modules, templates and metrics are some 200,000 objects that live as long as the process.
By default CPython collects young objects at every 700th allocation, and older ones with them from
time to time. That took a seventh of a request's CPU time, and paused streams for 10 ms and more.
Nearly all objects of a request are freed by their reference counts; the collector is needed only
for cycles.
"""

from __future__ import annotations

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

THRESHOLDS: Final = (20_000, 20, 50)  # of gc.set_threshold, per generation


@contextmanager
def importing() -> Iterator[None]:
    """Collect nothing while the block imports modules, and never what they have made, until the
    process ends: modules of C++ then look for what nobody has freed, and print it."""
    atexit.register(gc.unfreeze)
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def settle() -> None:
    """Exclude all present objects from collection and collect rarely. Call once, before serving."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
