"""What main memory has left, by the kernel's account. Linux. Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from baton.protocol.errors import ConfigError

PROC: Final = Path("/proc")
CGROUP: Final = Path("/sys/fs/cgroup")


def available_memory(proc: Path = PROC, cgroup: Path = CGROUP) -> int:
    """Bytes that new memory can have: the machine's, or the container's if that is less.

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
    return machine if container is None else min(machine, container)


def _container_memory(cgroup: Path) -> int | None:
    """Bytes that the control group still allows (page cache counts as free); None = no limit."""
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
        return None  # nothing known to limit us


def kilobytes(file: Path, name: str) -> int:
    """Bytes of the line `name:  123 kB`."""
    lines = file.read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(f"{name}:"))) * 1024
