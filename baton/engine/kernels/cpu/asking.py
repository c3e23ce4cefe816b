"""How kernels ask memory for what comes next: measured once per machine.

While a product of few rows multiplies one panel it asks memory for the next one (linear.h), for
every cache line or for every second or fourth. Some processors fetch the lines between by
themselves, and only so many requests are under way at once: on a Zen 4 asking less often reads 8 to
14 % faster, on others it reads slower. Decode attention asks for keys and values (attention.h),
into a core's first cache or its second: on a Zen 5 the first is faster. What was faster is kept in
the user's cache, per processor, cores, threads and compiled library. A round beside other work does
not count.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch

from baton.engine.memory import huge_pages
from baton.runtime.cache_folder import alone, cache_folder, keep

if TYPE_CHECKING:
    from baton.engine.kernels.cpu.library import CpuKernels

logger = logging.getLogger(__name__)
OUTPUTS, INPUTS = 32_768, 2048  # weights of 128 MiB: more than caches hold
ROWS: Final = (1, 4)
KV_ROWS, KEYS = 8, 4096  # of attention, KV of 128 MiB likewise
KV_HEADS, DIM, BLOCK = 8, 128, 16
ROUNDS: Final = 7
BUDGET_S: Final = 1.0  # for all rounds of a question, those that are disturbed too
GAIN: Final = 1.03  # how much faster than the first choice another one must be
MOST_WAITING: Final = 0.02  # share of the time that threads may wait for a core
_CPUINFO: Final = Path("/proc/cpuinfo")
_TASKS: Final = Path("/proc/self/task")


@dataclass(frozen=True, slots=True)
class Question:
    """What is measured. `choices`: words of `switch`, the environment variable that answers
    instead, with what each is called; the first serves unless another one is faster. `choose` makes
    kernels ask so. `work` returns what is timed."""

    switch: str
    choices: dict[str, str]
    choose: Callable[[CpuKernels, str], None]
    work: Callable[[CpuKernels], Callable[[], None]]


def _products(kernels: CpuKernels) -> Callable[[], None]:
    panels = kernels.pack(torch.ones(OUTPUTS, INPUTS, dtype=torch.bfloat16))
    inputs = [torch.ones(rows, INPUTS, dtype=torch.bfloat16) for rows in ROWS]

    def work() -> None:
        for x in inputs:
            kernels.linear(x, panels, None, OUTPUTS)

    return work


def _attention(kernels: CpuKernels) -> Callable[[], None]:
    from baton.engine.kernels.cpu.library import DecodeLayer, DecodeRows  # imports this module

    width = KEYS // BLOCK
    pool = huge_pages.zeros(2, KV_ROWS * width, BLOCK, KV_HEADS, DIM, dtype=torch.bfloat16)
    pool.fill_(1.0)  # each page is touched
    layer = DecodeLayer(pool[0], pool[1], DIM**-0.5)
    numbers, tables = torch.arange(KV_ROWS), torch.arange(KV_ROWS * width).view(KV_ROWS, width)
    rows = DecodeRows(numbers, numbers, torch.full((KV_ROWS,), KEYS), 0 * numbers, tables)
    q = torch.ones(KV_ROWS, 2 * KV_HEADS, DIM, dtype=torch.bfloat16)
    out = torch.empty_like(q)
    return lambda: kernels.decode_attention(q, out, layer, rows)


WEIGHTS: Final = Question(
    switch="BATON_CPU_ASKING",
    choices={
        "1": "each cache line of the weights that come next",
        "2": "every second cache line of the weights that come next",
        "4": "every fourth cache line of the weights that come next",
    },
    choose=lambda kernels, lines: kernels.ask_every(int(lines)),
    work=_products,
)
KEYS_AND_VALUES: Final = Question(
    switch="BATON_CPU_ASKING_KEYS",
    choices={
        "far": "keys and values into a core's second cache",
        "near": "keys and values into a core's first cache",
    },
    choose=lambda kernels, cache: kernels.ask_keys_near(cache == "near"),
    work=_attention,
)


def choose_asking(kernels: CpuKernels, folder: Path | None = None) -> str:
    """Make `kernels` ask as is fastest here; return a text that says how, and why.

    `folder`: where measurements are kept (default: the user's cache).
    """
    told = (_answer(question, kernels, folder) for question in (WEIGHTS, KEYS_AND_VALUES))
    return "asks memory for " + "; for ".join(told)


def _answer(question: Question, kernels: CpuKernels, folder: Path | None) -> str:
    given = os.environ.get(question.switch)
    if given in question.choices:
        question.choose(kernels, given)
        return f"{question.choices[given]}: {question.switch} is {given}"
    choice, why = _found(question, kernels, folder)
    question.choose(kernels, choice)
    told = f"{question.choices[choice]}: {why}"
    if given is None:
        return told
    ignored = f"{question.switch}={given} is ignored: it is none of {', '.join(question.choices)}"
    logger.warning("%s", ignored)
    return f"{told}; {ignored}"


def _found(question: Question, kernels: CpuKernels, folder: Path | None) -> tuple[str, str]:
    """Return the choice and where it is from: the file, or a measurement now."""
    usual = next(iter(question.choices))
    try:
        folder = cache_folder("asking") if folder is None else folder
        path = folder / f"{_key(question, kernels)}.json"
        with alone(folder):
            kept = _read(path)
            if kept in question.choices:
                return kept, "measured before"
            choice = measure(question, kernels)
            if choice is None:
                return usual, "not measured, because other programs used the cores"
            keep(path, json.dumps(choice))
            return choice, "measured"
    except OSError as error:
        return usual, f"nothing is measured ({error})"


def measure(question: Question, kernels: CpuKernels) -> str | None:
    """Return which choice is fastest; None if other work takes the cores for BUDGET_S."""
    work = question.work(kernels)
    choices = list(question.choices)
    rounds: list[list[float]] = []
    until = time.perf_counter() + BUDGET_S
    while len(rounds) < ROUNDS and time.perf_counter() < until:
        waited = _waited_s()
        seconds = list[float]()
        for choice in choices:
            question.choose(kernels, choice)
            began = time.perf_counter()
            work()
            seconds.append(time.perf_counter() - began)
        if _waited_s() - waited <= MOST_WAITING * sum(seconds):
            rounds.append(seconds)
    return choices[fastest(rounds)] if len(rounds) == ROUNDS else None


def fastest(rounds: Sequence[Sequence[float]]) -> int:
    """Return which choice was fastest; the first unless another one gains GAIN in the median of
    `rounds`, each of which has the seconds of all choices."""
    count = len(rounds[0])
    gains = [statistics.median(every[0] / every[i] for every in rounds) for i in range(count)]
    best = max(range(count), key=gains.__getitem__)
    return best if gains[best] >= GAIN else 0


def _waited_s() -> float:
    """Return how long this process's threads have waited for a core; 0 if Linux does not tell."""
    total = 0
    for task in _TASKS.glob("*/schedstat"):
        try:
            total += int(task.read_text().split()[1])
        except (OSError, ValueError, IndexError):  # the thread has ended
            continue
    return total / 1e9


def _key(question: Question, kernels: CpuKernels) -> str:
    """Return a name for all that the choice depends on."""
    wanted = ("vendor_id", "cpu family", "model", "model name", "stepping")
    first, _, _ = _CPUINFO.read_text().partition("\n\n")
    pairs = (line.partition(":") for line in first.splitlines())
    processor = [value.strip() for name, _, value in pairs if name.strip() in wanted]
    cores = len(os.sched_getaffinity(0))
    parts = [question.switch, processor, cores, torch.get_num_threads(), kernels.identity]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:20]


def _read(path: Path) -> str:
    try:
        return str(json.loads(path.read_text()))
    except (OSError, ValueError):
        return ""  # not there, or cut short
