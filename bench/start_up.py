"""How long `baton up` takes, and what it holds: `python -m bench.start_up --model DIR`.

A cluster of one prefill and one decode node starts with private weights and with shared ones, in
turns (`--rounds`), and answers after each of these:

    ready        seconds from the command to the ready line
    memory       sum of the proportional set sizes (PSS) of all its processes, MB, after an answer
    killed       seconds from `kill -9` of the decode node until a request that was sent then is
                 answered: the launcher starts the node again

    private        each node reads and packs its own weights
    first start    shared weights; no earlier start has left packed ones
    second start   with `--kept`, in each round after it: the same command again, which finds those
                   that the first start has kept on the disk (`--shared-weights-cache auto`)

All starts have a cache folder of the bench's own, a temporary one ($TMPDIR names another disk), in
place of the user's: it is removed in the end, packed weights before each first start. One start
before the rounds is not measured; it compiles the kernels there. The checkpoint stays in the page
cache, and so do packed weights. `--kept` ends with an error where nothing is kept: a checkpoint
below 64 MiB, or a disk without large pages.
`--beside`: another cluster of the same model runs all the time, so first starts map its weights.
Figures are medians with their range; ratios are within a round.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any, Final

import httpx

from baton.engine.checkpoint.weight_folder import held_bytes
from baton.protocol.errors import ConfigError
from baton.runtime.cache_folder import cache_folder
from baton.runtime.config import AUTO
from bench.cluster import cluster

WAIT_S: Final = 120.0  # for an answer
DECODE: Final = "decode_node"
PRIVATE, FIRST, SECOND = "private", "first start", "second start"


def processes(root: int | None = None) -> list[int]:
    """Return the processes that `root` (None: this one) has started, and those that they have."""
    parents = {int(path.name): _parent(path) for path in Path("/proc").glob("[0-9]*")}
    found, more = list[int](), [os.getpid() if root is None else root]
    while more:
        above = more.pop()
        below = [process for process, parent in parents.items() if parent == above]
        found += below
        more += below
    return found


def _parent(path: Path) -> int:
    try:
        return int((path / "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:  # it has ended
        return 0


def memory_mb(of: Sequence[int]) -> float:
    """Return the sum of the processes' proportional set sizes."""
    total = 0
    for process in of:
        try:
            lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
        except OSError:  # it has ended
            continue
        total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total / 1e3


def decode_node(of: Sequence[int]) -> int:
    """Return the decode node among some processes."""
    return next(each for each in of if DECODE in Path(f"/proc/{each}/cmdline").read_text())


async def answer(url: str, model: str) -> None:
    """Ask for a few tokens, and wait for all of them. Raises httpx.HTTPError."""
    asked: dict[str, Any] = {
        "model": model,
        "prompt": [9, 8, 7],
        "max_tokens": 4,
        "ignore_eos": True,
    }
    async with httpx.AsyncClient(timeout=WAIT_S) as client:
        (await client.post(f"{url}/v1/completions", json=asked)).raise_for_status()


@dataclass(frozen=True, slots=True)
class OwnCache:
    """A cache folder for the clusters alone, in place of the user's."""

    folder: Path

    @property
    def environ(self) -> dict[str, str]:
        """What the clusters' processes are given."""
        return {**os.environ, "XDG_CACHE_HOME": str(self.folder)}

    @property
    def weights(self) -> Path:
        """Where they keep packed weights."""
        return cache_folder("weights", self.environ)

    def forget_weights(self) -> None:
        """Remove the packed weights, while no cluster runs."""
        shutil.rmtree(self.weights, ignore_errors=True)


async def one_start(flags: Sequence[str], environ: Mapping[str, str]) -> dict[str, float]:
    """Return the figures of one cluster."""
    before = set(processes())
    began = time.perf_counter()
    async with cluster(flags, environ) as ready:
        found = {"ready": time.perf_counter() - began}
        await answer(ready["url"], ready["model"])
        own = [each for each in processes() if each not in before]
        found["memory"] = memory_mb(own)
        began = time.perf_counter()
        os.kill(decode_node(own), signal.SIGKILL)
        await answer(ready["url"], ready["model"])
        found["killed"] = time.perf_counter() - began
    return found


async def measure(
    model: Path, rounds: int, beside: bool, kept: bool, cache: OwnCache
) -> dict[str, list[dict[str, float]]]:
    """Return the figures of each round, by way to start. Not `beside` and `kept` at once.

    Raises ConfigError if weights are to be `kept`, and are not.
    """
    given = ["--model", str(model), "--num-gpu-blocks-override", "64", "--insecure"]
    shared, environ = [*given, "--shared-weights-cache", AUTO], cache.environ
    found: dict[str, list[dict[str, float]]] = defaultdict(list)
    async with AsyncExitStack() as stack:
        if beside:
            await stack.enter_async_context(cluster(shared, environ))
        else:
            await one_start(shared, environ)
        if kept and not held_bytes(cache.weights):
            raise ConfigError(
                f"no packed weights are kept in {cache.folder}: the checkpoint is below 64 MiB, or "
                "the disk has no large pages (TMPDIR names another)"
            )
        for _ in range(rounds):
            found[PRIVATE].append(await one_start([*given, "--no-shared-weights"], environ))
            if not beside:
                cache.forget_weights()
            found[FIRST].append(await one_start(shared, environ))
            if kept:
                found[SECOND].append(await one_start(shared, environ))
    return found


def table(found: Mapping[str, Sequence[Mapping[str, float]]]) -> str:
    """Return the figures as rows of Markdown, and the ratio of each two ways to start."""
    pairs = list(combinations(found, 2))
    titles = ["", *found, *(f"{later} over {way}" for way, later in pairs)]
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for name in ("ready", "memory", "killed"):
        figures = {way: [each[name] for each in rounds] for way, rounds in found.items()}
        ratios = [
            [ours / theirs for ours, theirs in zip(figures[later], figures[way], strict=True)]
            for way, later in pairs
        ]
        cells = [
            f"{statistics.median(each):.2f} ({min(each):.2f}-{max(each):.2f})"
            for each in (*figures.values(), *ratios)
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return 0. Raises SystemExit."""
    parser = argparse.ArgumentParser(prog="python -m bench.start_up", description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    either = parser.add_mutually_exclusive_group()  # beside a cluster no start is without weights
    either.add_argument("--beside", action="store_true")
    either.add_argument("--kept", action="store_true")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="baton-start-up-") as folder:
        measuring = measure(
            given.model, given.rounds, given.beside, given.kept, OwnCache(Path(folder))
        )
        try:
            found = asyncio.run(measuring)
        except ConfigError as error:
            parser.exit(1, f"{error}\n")
    sys.stdout.write(f"{table(found)}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
