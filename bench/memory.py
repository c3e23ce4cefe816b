"""What the processes of `baton up` hold in memory: `python -m bench.memory --model DIR`.

A cluster of one prefill and one decode node starts, with its own Redis, and answers a request of
`--prompt` and `--new` tokens; with `--of PID` a running launcher's processes are read as they are.
Figures are MB of proportional set size (`/proc/PID/smaps`): a page that two processes have mapped
counts half in each. Linux only. By what is mapped:

    weights    the file of packed weights that a host holds once
    KV         pages of the KV pool that have been touched
    libraries  programs and shared objects; their pages come from files, the kernel may drop them
    files      other files, such as a checkpoint
    own        anonymous memory: heaps, buffers of torch and kernels, weights that are not shared

The last line compares prefill and decode nodes with one copy of the weights and the KV in use. One
copy is the checkpoint's bytes or, if that is less (integers), the bytes of the file of weights.
`--largest N` names each process' largest mappings. Further flags after `--` go to `baton up`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

import httpx

from bench.cluster import cluster
from bench.idle import name_of
from bench.start_up import WAIT_S, processes

NODES: Final = ("prefill", "decode")
# In this order: the first that is found in a mapping's name counts.
KINDS: Final[Mapping[str, re.Pattern[str]]] = {
    "weights": re.compile(r"\.weights$|/baton-weights-\d+/"),
    "KV": re.compile(r"^/dev/shm/baton-|^/memfd:baton-kv"),
    "libraries": re.compile(r"\.so(\.|$)|/bin/"),
    "files": re.compile(r"^/"),
    "own": re.compile(""),
}
_HEADER: Final = re.compile(r"^([0-9a-f]+-[0-9a-f]+) \S+ \S+ \S+ \S+ *(.*)$")


@dataclass(frozen=True, slots=True)
class Mapped:
    """One mapping of a process: its addresses, the file or the kernel's name for it, its PSS."""

    addresses: str
    name: str
    pss_kib: int

    @property
    def kind(self) -> str:
        return next(kind for kind, pattern in KINDS.items() if pattern.search(self.name))


def mapped(smaps: str) -> Iterator[Mapped]:
    """Yield the mappings of a process from the text of its smaps."""
    addresses, name = "", ""
    for line in smaps.splitlines():
        if header := _HEADER.match(line):
            addresses, name = header[1], header[2]
        elif line.startswith("Pss:"):
            yield Mapped(addresses, name, int(line.split()[1]))


def _mb(kib: int) -> float:
    return kib * 1024 / 1e6  # what smaps calls kB are KiB


def by_kind(of: Sequence[Mapped]) -> dict[str, float]:
    """Return the MB of a process by kind, `PSS` (their sum) first."""
    sums = Counter[str]()
    for each in of:
        sums[each.kind] += each.pss_kib
    return {"PSS": _mb(sums.total())} | {kind: _mb(sums[kind]) for kind in KINDS}


def weight_files(of: Mapping[str, Sequence[Mapped]]) -> set[Path]:
    """Return the files of packed weights that the processes have mapped."""
    every = (each for maps in of.values() for each in maps)
    return {Path(each.name) for each in every if each.kind == "weights"}


def one_copy_mb(files: set[Path], model: Path) -> float:
    """Return the MB of the weights, held once."""
    stored = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    mapped_bytes = sum(path.stat().st_blocks * 512 for path in files)
    return min(size for size in (stored, mapped_bytes) if size) / 1e6


def table(found: Mapping[str, Mapping[str, float]], weights_mb: float) -> str:
    """Return the processes as rows of Markdown, their sum, and the ratio of the two nodes."""
    lines = [f"| process | {' | '.join(next(iter(found.values())))} |", "|---" * 7 + "|"]
    whole = Counter[str]()
    for name, row in found.items():
        lines.append(_row(name, row))
        whole.update(row)
    lines.append(_row("all", whole))
    nodes = [row for name, row in found.items() if name.split()[0] in NODES]
    held, used = (sum(row[kind] for row in nodes) for kind in ("PSS", "KV"))
    lines.append(
        f"\nprefill and decode nodes hold {held:,.0f} MB, {held / (weights_mb + used):.2f} "
        f"times one copy of the weights ({weights_mb:,.0f} MB) and the KV in use ({used:,.1f})"
    )
    return "\n".join(lines)


def _row(name: str, row: Mapping[str, float]) -> str:
    return f"| {name} | {' | '.join(f'{value:,.1f}' for value in row.values())} |"


def largest(found: Mapping[str, Sequence[Mapped]], count: int) -> str:
    """Return lines of the largest mappings of each process."""
    lines = list[str]()
    for name, maps in found.items():
        ranked = sorted(maps, key=lambda each: -each.pss_kib)[:count]
        lines += [
            f"{name:<10} {_mb(each.pss_kib):9.1f} MB  {each.kind:<9} {each.name or each.addresses}"
            for each in ranked
        ]
    return "\n".join(lines)


def read(root: int | None = None) -> dict[str, list[Mapped]]:
    """Return the mappings of a launcher and of the processes below it, by the process' name. None:
    of all that this process has started."""
    found = dict[str, list[Mapped]]()
    for process in processes() if root is None else [root, *processes(root)]:
        try:
            name, text = name_of(process), Path(f"/proc/{process}/smaps").read_text()
        except OSError:  # it has ended
            continue
        same = sum(each.split()[0] == name for each in found)
        found[f"{name} {same + 1}" if same else name] = list(mapped(text))
    return found


Found: TypeAlias = tuple[dict[str, list[Mapped]], float]


async def measure(model: str, flags: Sequence[str], prompt: int, new: int) -> Found:
    """Start a cluster, let it answer a request of that many tokens; return `read`'s mappings and
    the MB of one copy of the weights.

    Raises ConfigError, httpx.HTTPError.
    """
    asked = {"prompt": [9 + each % 1000 for each in range(prompt)], "max_tokens": new}
    async with (
        cluster(["--model", model, *flags]) as ready,
        httpx.AsyncClient(timeout=WAIT_S) as client,
    ):
        body = {"model": ready["model"], "ignore_eos": True, **asked}
        (await client.post(f"{ready['url']}/v1/completions", json=body)).raise_for_status()
        found = read()
        return found, one_copy_mb(weight_files(found), Path(model))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return 0."""
    parser = argparse.ArgumentParser(prog="python -m bench.memory", description=__doc__)
    parser.add_argument("--model", default="demo_model", help="a folder (%(default)s)")
    parser.add_argument("--of", type=int, metavar="PID", help="a running launcher, read as it is")
    parser.add_argument("--prompt", type=int, default=512, help="tokens (%(default)s)")
    parser.add_argument("--new", type=int, default=32, help="tokens of the answer (%(default)s)")
    parser.add_argument("--largest", type=int, default=0, metavar="N")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("flags", nargs="*", help="of `baton up`, after --")
    given = parser.parse_args(arguments)
    if given.of is None:
        work = measure(given.model, given.flags, given.prompt, given.new)
        maps, weights_mb = asyncio.run(work)
    else:
        maps = read(given.of)
        weights_mb = one_copy_mb(weight_files(maps), Path(given.model))
    found = {name: by_kind(of) for name, of in maps.items()}
    if given.json:
        sys.stdout.write(json.dumps({"weights": weights_mb, "processes": found}) + "\n")
        return 0
    sys.stdout.write(f"{table(found, weights_mb)}\n")
    if given.largest:
        sys.stdout.write(f"\n{largest(maps, given.largest)}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
