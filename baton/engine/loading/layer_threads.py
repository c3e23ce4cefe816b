"""Builds a model's layers in two threads while their weights are written to a file: one thread
reads and packs a layer, while the other one's is written.

Other processes that need the same weights wait for the file meanwhile (shared_weights.py), so the
threads also use the spare cores, idle or not. Each thread holds at most one product's weights
outside the file.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Final

import torch

from baton.engine.checkpoint.shared_weights import Shared, WeightSource
from baton.engine.config import EngineConfig
from baton.engine.models.decoder import BuildLayers, in_turn
from baton.engine.models.layers.layer import DecoderLayer
from baton.runtime.cores import parse_cores

NUM_THREADS: Final = 2  # writes to a file go one by one, so more threads would wait for each other


def layer_builder(config: EngineConfig, source: WeightSource) -> BuildLayers:
    """Return what builds the layers whose weights come from `source`: one after the other, unless
    `source` writes them to a file."""
    cores = os.sched_getaffinity(0)
    if config.spare_cores is not None:
        cores = cores | set(parse_cores(config.spare_cores, "spare_cores"))
    writes = isinstance(source, Shared) and source.writes
    return partial(_in_threads, cores) if writes and len(cores) > 1 else in_turn


def _in_threads(
    cores: set[int], make: Callable[[int], DecoderLayer], count: int
) -> list[DecoderLayer]:
    """Build layers 0 to count - 1 on `cores`."""
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
