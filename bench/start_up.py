"""How long `baton up` takes, and what it holds: `python -m bench.start_up --model DIR`.

A cluster of one prefill and one decode node starts with shared weights and with private ones, in
turns (`--rounds`), and answers after each of these:

    ready        seconds from the command to the ready line
    memory       sum of the proportional set sizes (PSS) of all its processes, MB, after an answer
    killed       seconds from `kill -9` of the decode node until a request that was sent then is
                 answered: the launcher starts the node again

`--beside`: another cluster of the same model runs already, so its weights are mapped (warm).
`--kept`: shared starts find what an earlier start left (`--shared-weights-cache`); it is cleared in
the end.
Figures are medians with their range; ratios are within a round.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final

import httpx

from bench.cluster import cluster

WAIT_S: Final = 120.0  # for an answer
DECODE: Final = "decode_node"


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


async def one_start(flags: Sequence[str]) -> dict[str, float]:
    """Return the figures of one cluster."""
    before = set(processes())
    began = time.perf_counter()
    async with cluster(flags) as ready:
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
    model: Path, rounds: int, beside: bool, kept: bool
) -> dict[str, list[dict[str, float]]]:
    """Return the figures of each round, by whether weights are shared."""
    given = ["--model", str(model), "--num-gpu-blocks-override", "64", "--insecure"]
    found: dict[str, list[dict[str, float]]] = defaultdict(list)
    shared = [*given, "--shared-weights-cache", "1TB"] if kept else given
    async with AsyncExitStack() as stack:
        if beside:
            await stack.enter_async_context(cluster(given))
        if kept:
            await one_start(shared)
        for _ in range(rounds):
            found["private"].append(await one_start([*given, "--no-shared-weights"]))
            found["shared"].append(await one_start(shared))
        if kept:
            await one_start(given)
    return found


def table(found: dict[str, list[dict[str, float]]]) -> str:
    """Return the figures as rows of Markdown."""
    lines = ["| | private | shared | shared over private |", "|---|---|---|---|"]
    for name in ("ready", "memory", "killed"):
        private, shared = ([each[name] for each in found[way]] for way in ("private", "shared"))
        ratios = [ours / theirs for ours, theirs in zip(shared, private, strict=True)]
        cells = [
            f"{statistics.median(each):.2f} ({min(each):.2f}-{max(each):.2f})"
            for each in (private, shared, ratios)
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return 0."""
    parser = argparse.ArgumentParser(prog="python -m bench.start_up", description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--beside", action="store_true")
    parser.add_argument("--kept", action="store_true")
    given = parser.parse_args(arguments)
    found = asyncio.run(measure(given.model, given.rounds, given.beside, given.kept))
    sys.stdout.write(f"{table(found)}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
