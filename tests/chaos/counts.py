"""What a process holds: descriptors and threads by the kernel's word, tasks by its own /metrics;
and whether it runs or is stopped, by the kernel's word.

After a case every process that lived through it holds what it held before, kind by kind, exactly;
`KEPT` names what may have come, and why.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_NUMBER: Final = re.compile(r":\[\d+\]$")  # socket:[4711]; anon_inode:[eventpoll] keeps its kind
_ARENA: Final = re.compile(r"^.*/baton-[0-9a-f]{32}$")  # a dead peer's says "(deleted)" behind it
_TASK: Final = re.compile(r'^baton_asyncio_tasks\{of="([^"]*)"\} (\S+)$', re.MULTILINE)


def runs(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def is_stopped(pid: int) -> bool:
    """By /proc/<pid>/stat, whose letter is then T. A process that is gone is not stopped."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return text.rpartition(")")[2].split()[0] == "T"


@dataclass(frozen=True)
class Vitals:
    """Of one process: how many of each kind."""

    pid: int
    descriptors: Counter[str]
    threads: Counter[str]
    tasks: Counter[str]


def descriptors_of(pid: int) -> Counter[str]:
    """By kind: "socket", "pipe", "anon_inode:[eventpoll]", "arena", or a file's name."""
    kinds: Counter[str] = Counter()
    place = Path(f"/proc/{pid}/fd")
    for name in os.listdir(place):
        try:
            kinds[_ARENA.sub("arena", _NUMBER.sub("", os.readlink(place / name)))] += 1
        except FileNotFoundError:
            continue  # closed meanwhile
    return kinds


def threads_of(pid: int) -> Counter[str]:
    """By the name that the kernel knows; those that Python makes have the process' own."""
    names: Counter[str] = Counter()
    place = Path(f"/proc/{pid}/task")
    for name in os.listdir(place):
        try:
            names[(place / name / "comm").read_text().strip()] += 1
        except (FileNotFoundError, ProcessLookupError):
            continue  # ended meanwhile
    return names


def tasks_in(metrics: str) -> Counter[str]:
    """Of a scrape."""
    return Counter({name: int(float(count)) for name, count in _TASK.findall(metrics)})


def grown(before: Vitals, now: Vitals, kept: Mapping[str, int]) -> dict[str, str]:
    """What has come beyond what may be `kept`, in words, by kind."""
    found: dict[str, str] = {}
    for what, then, there in (
        ("descriptors", before.descriptors, now.descriptors),
        ("threads", before.threads, now.threads),
        ("tasks", before.tasks, now.tasks),
    ):
        for kind, count in there.items():
            more = count - then[kind]
            if more > kept.get(kind, 0):
                found[f"{what} {kind}"] = f"{what} {kind}: {then[kind]} became {count}"
    return found
