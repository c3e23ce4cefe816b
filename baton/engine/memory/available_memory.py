"""How much main memory is left, as the kernel reports it. Linux. Imports no torch."""

from __future__ import annotations

import stat
from contextlib import suppress
from pathlib import Path
from typing import Final

from baton.protocol.errors import ConfigError

PROC: Final = Path("/proc")
CGROUP: Final = Path("/sys/fs/cgroup")
SHARED: Final = Path("/dev/shm")
POOLS: Final = "baton-*"  # in SHARED; kv_transfer/lanes/shm_arena.py
_BLOCK: Final = 512  # of st_blocks


def available_memory(proc: Path = PROC, cgroup: Path = CGROUP, shared: Path = SHARED) -> int:
    """Return the bytes that new memory can have: the machine's, or the container's if that is less,
    without what KV pools in `shared` have still to take.

    Raises ConfigError if the kernel does not report it.
    """
    meminfo = proc / "meminfo"
    try:
        machine = kilobytes(meminfo, "MemAvailable")
    except (OSError, StopIteration, ValueError) as error:
        raise ConfigError(
            f"cannot read the available memory from {meminfo}: set kv_cache_memory",
            field="kv_cache_memory",
        ) from error
    container = _container_memory(cgroup)
    found = machine if container is None else min(machine, container)
    return max(0, found - _promised(shared))


def _promised(shared: Path) -> int:
    """Return the bytes by which files of KV pools will still grow in memory."""
    total = 0
    with suppress(OSError):
        for path in shared.glob(POOLS):
            with suppress(OSError):  # it is gone
                found = path.lstat()
                if stat.S_ISREG(found.st_mode):
                    total += max(0, found.st_size - found.st_blocks * _BLOCK)
    return total


def _container_memory(cgroup: Path) -> int | None:
    """Return the bytes that the control group still allows (page cache counts as free); None = no
    limit.
    """
    names = ("memory.max", "memory.current", "inactive_file")
    if (cgroup / "memory").is_dir():  # control groups of version 1
        cgroup /= "memory"
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    try:
        limit, current = ((cgroup / name).read_text().strip() for name in names[:2])
        if limit == "max":
            return None
        stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        return max(0, int(limit) - int(current) + int(stat.get(names[2], "0")))
    except (OSError, ValueError):
        return None  # no limit is known


def kilobytes(file: Path, name: str) -> int:
    """Return the bytes that the line `name:  123 kB` of a file stands for."""
    lines = file.read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(f"{name}:"))) * 1024
