"""What a cluster costs while nobody asks it anything: `python -m bench.idle`.

`baton up` starts with its own Redis, one prefill and one decode node. After an answer and a pause
each process is watched for `--seconds`, `--rounds` times. A figure is the share of one core that
all its threads had (`/proc/PID/task/*/schedstat`, nanoseconds by the kernel's clock): the least and
the most of the rounds, in percent. Linux only. Further flags after `--` go to `baton up`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from bench.cluster import cluster
from bench.start_up import answer, processes

QUIET_S: Final = 12.0  # after the answer: leases end, threads fall asleep, no node is awaited
# A word of the command line -> the process's name here; the first that is found counts.
NAMES: Final[Mapping[str, str]] = {
    "redis-server": "redis", "prefill_node": "prefill", "decode_node": "decode",
    "router": "router", "deploy": "launcher",
}  # fmt: skip


def cpu_ns(process: int, proc: Path = Path("/proc")) -> int:
    """Return the nanoseconds that the process's living threads have run."""
    return sum(_ran_ns(thread) for thread in (proc / str(process) / "task").iterdir())


def _ran_ns(thread: Path) -> int:
    try:
        return int((thread / "schedstat").read_text().split()[0])
    except OSError:  # it has ended
        return 0


def name_of(process: int, proc: Path = Path("/proc")) -> str:
    """Return the name of a process, by its command line."""
    words = (proc / str(process) / "cmdline").read_text().split("\0")
    found = (name for key, name in NAMES.items() if any(key in word for word in words[:3]))
    return next(found, Path(words[0]).name)


async def shares(of: Mapping[str, int], seconds: float) -> dict[str, float]:
    """Return the percentage of a core that each process takes during `seconds` from now on."""
    before, began = {name: cpu_ns(process) for name, process in of.items()}, time.perf_counter()
    await asyncio.sleep(seconds)
    passed_ns = (time.perf_counter() - began) * 1e9
    return {name: 100 * (cpu_ns(of[name]) - before[name]) / passed_ns for name in of}


async def measure(flags: Sequence[str], rounds: int, seconds: float) -> list[dict[str, float]]:
    """Start a cluster with these flags of `baton up`; return each round's shares by process."""
    async with cluster(flags) as ready:
        await answer(ready["url"], ready["model"])
        named = {name_of(process): process for process in processes()}
        await asyncio.sleep(QUIET_S)
        return [await shares(named, seconds) for _ in range(rounds)]


def table(rounds: Sequence[Mapping[str, float]]) -> str:
    """Return the shares as rows of Markdown."""
    lines = ["| process | percent of a core |", "|---|---|"]
    for name in rounds[0]:
        found = [each[name] for each in rounds]
        lines.append(f"| {name} | {min(found):.2f}-{max(found):.2f} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return 0."""
    parser = argparse.ArgumentParser(prog="python -m bench.idle", description=__doc__)
    parser.add_argument("--model", default="demo_model")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each round")
    parser.add_argument("--json", action="store_true", help="print the rounds as JSON")
    parser.add_argument("flags", nargs="*", help="of `baton up`, after --")
    given = parser.parse_args(arguments)
    flags = ["--model", given.model, *given.flags]
    found = asyncio.run(measure(flags, given.rounds, given.seconds))
    sys.stdout.write(f"{json.dumps(found) if given.json else table(found)}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
