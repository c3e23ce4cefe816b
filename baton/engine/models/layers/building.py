"""Builds a decoder's layers: one after the other, or in two threads while their weights are written
to a file. There one thread reads and packs a layer, while the other one's is written.

Other processes that need the same weights wait for the file meanwhile (shared_weights.py), so the
threads also use the spare cores, idle or not. Each thread holds at most one product's weights
outside the file.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Final

import torch

from baton.engine.models.layers.layer import DecoderLayer

NUM_THREADS: Final = 2  # writes to a file go one by one, so more threads would wait for each other
# Returns what a function makes of the layers 0 to count - 1; it may call it from several threads.
BuildLayers = Callable[[Callable[[int], DecoderLayer], int], list[DecoderLayer]]


def in_turn(make: Callable[[int], DecoderLayer], count: int) -> list[DecoderLayer]:
    """Implements BuildLayers: one layer after the other."""
    return [make(index) for index in range(count)]


def in_threads(
    cores: set[int], make: Callable[[int], DecoderLayer], count: int
) -> list[DecoderLayer]:
    """Implements BuildLayers, once it has the `cores`: at least NUM_THREADS, of which some may be
    other processes'."""
    before = torch.get_num_threads()

    def begin() -> None:
        with suppress(OSError):  # then on the own cores
            os.sched_setaffinity(0, cores)
        torch.set_num_threads(len(cores) // NUM_THREADS)

    try:
        with ThreadPoolExecutor(NUM_THREADS, "layers", begin) as pool:
            return list(pool.map(make, range(count)))
    finally:
        torch.set_num_threads(before)  # of threads that begin later
