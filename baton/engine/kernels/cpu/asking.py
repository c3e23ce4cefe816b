"""How often a product of few rows asks memory for what comes next: measured once per machine.

While a product multiplies one panel it asks memory for the next one (linear.h), for every cache
line or for every second or fourth. Some processors fetch the lines between by themselves, and only
so many requests are under way at once: on a Zen 4 asking less often reads 8 to 14 % faster, on
others it reads slower. What was faster is kept in the user's cache, per processor, cores, threads
and compiled library. A round beside other work does not count.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from baton.runtime.cache_folder import alone, cache_folder, keep

if TYPE_CHECKING:
    from baton.engine.kernels.cpu.library import CpuKernels

logger = logging.getLogger(__name__)
SWITCH: Final = "BATON_CPU_ASKING"  # lines, instead of a measurement
LINES: Final = (1, 2, 4)  # asks for every line, every second, every fourth
OUTPUTS, INPUTS = 32_768, 2048  # 128 MiB: more than caches hold
ROWS: Final = (1, 4)
ROUNDS: Final = 7
BUDGET_S: Final = 1.0  # for all rounds, those that are disturbed too
GAIN: Final = 1.03  # how much faster than with every line a choice must be
MOST_WAITING: Final = 0.02  # share of the time that threads may wait for a core
_CPUINFO: Final = Path("/proc/cpuinfo")
_TASKS: Final = Path("/proc/self/task")


def choose_asking(kernels: CpuKernels, folder: Path | None = None) -> str:
    """Make `kernels` ask as often as is fastest here; return a text that says how often, and why.

    `folder`: where measurements are kept (default: the user's cache).
    """
    given = os.environ.get(SWITCH)
    if given is not None:
        if given in map(str, LINES):
            kernels.ask_every(int(given))
            return _text(int(given), f"{SWITCH} is {given}")
        logger.warning("%s is %s, which is none of %s", SWITCH, given, LINES)
    lines, why = _found(kernels, folder)
    kernels.ask_every(lines)
    ignored = "" if given is None else f"; {SWITCH}={given} is ignored: it is none of {LINES}"
    return _text(lines, why + ignored)


def _text(lines: int, why: str) -> str:
    every = {1: "each cache line", 2: "every second cache line", 4: "every fourth cache line"}
    return f"asks memory for {every[lines]} of the weights that come next: {why}"


def _found(kernels: CpuKernels, folder: Path | None) -> tuple[int, str]:
    """Return the lines and where they are from: the file, or a measurement now."""
    try:
        folder = cache_folder("asking") if folder is None else folder
        path = folder / f"{_key(kernels)}.json"
        with alone(folder):
            kept = _read(path)
            if kept is not None:
                return kept, "measured before"
            lines = measure(kernels)
            if lines is None:
                return LINES[0], "not measured, because other programs used the cores"
            keep(path, json.dumps(lines))
            return lines, "measured"
    except OSError as error:
        return LINES[0], f"nothing is measured ({error})"


def measure(kernels: CpuKernels) -> int | None:
    """Return which of LINES is fastest, in half a second; None if other work takes the cores for
    BUDGET_S."""
    panels = kernels.pack(torch.ones(OUTPUTS, INPUTS, dtype=torch.bfloat16))
    inputs = [torch.ones(rows, INPUTS, dtype=torch.bfloat16) for rows in ROWS]
    rounds: list[list[float]] = []
    until = time.perf_counter() + BUDGET_S
    while len(rounds) < ROUNDS and time.perf_counter() < until:
        waited = _waited_s()
        seconds = [_seconds(kernels, lines, inputs, panels) for lines in LINES]
        if _waited_s() - waited <= MOST_WAITING * sum(seconds):
            rounds.append(seconds)
    return fastest(rounds) if len(rounds) == ROUNDS else None


def fastest(rounds: Sequence[Sequence[float]]) -> int:
    """Return which of LINES was fastest; every line unless another one gains GAIN in the median
    of `rounds`, each of which has the seconds of LINES."""
    gains = [statistics.median(every[0] / every[i] for every in rounds) for i in range(len(LINES))]
    best = max(range(len(LINES)), key=gains.__getitem__)
    return LINES[best] if gains[best] >= GAIN else LINES[0]


def _seconds(kernels: CpuKernels, lines: int, inputs: Sequence[Tensor], panels: Tensor) -> float:
    kernels.ask_every(lines)
    began = time.perf_counter()
    for x in inputs:
        kernels.linear(x, panels, None, OUTPUTS)
    return time.perf_counter() - began


def _waited_s() -> float:
    """Return how long this process's threads have waited for a core; 0 if Linux does not tell."""
    total = 0
    for task in _TASKS.glob("*/schedstat"):
        try:
            total += int(task.read_text().split()[1])
        except (OSError, ValueError, IndexError):  # the thread has ended
            continue
    return total / 1e9


def _key(kernels: CpuKernels) -> str:
    """Return a name for all that the choice depends on."""
    wanted = ("vendor_id", "cpu family", "model", "model name", "stepping")
    first, _, _ = _CPUINFO.read_text().partition("\n\n")
    pairs = (line.partition(":") for line in first.splitlines())
    processor = [value.strip() for name, _, value in pairs if name.strip() in wanted]
    cores = len(os.sched_getaffinity(0))
    parts = [processor, cores, torch.get_num_threads(), kernels.identity]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:20]


def _read(path: Path) -> int | None:
    try:
        lines = json.loads(path.read_text())
    except (OSError, ValueError):
        return None  # not there, or cut short
    return lines if lines in LINES else None
