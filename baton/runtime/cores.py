"""The cores of a process: the option `--cpu-cores`, affinity, a container's CPU limit, and which
cores of other nodes are idle.

OpenMP teams with more threads than cores stall for 10-16 ms at every barrier. So each node gets its
own cores and exactly as many threads.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from baton.protocol.errors import ConfigError

MOST_CORES: Final = 1024  # what sched_setaffinity(2) takes without more ado
IDLE: Final = 1  # else busy, or nobody's


def parse_cores(text: str, option: str = "cpu_cores") -> tuple[int, ...]:
    """Return the sorted core numbers of "0,1" or "0,4-7". Raises ConfigError, naming `option`."""
    cores: set[int] = set()
    try:
        for part in text.split(","):
            first, dash, last = part.strip().partition("-")
            low, high = int(first), int(last) if dash else int(first)
            if low < 0 or high < low:
                raise ValueError(part)
            cores.update(range(low, high + 1))
    except ValueError as error:
        raise ConfigError(
            f'{option}: {text!r} is not a list like "0,1" or "4-7"', field=option
        ) from error
    return tuple(sorted(cores))


def check_cores(cores: tuple[int, ...], option: str = "cpu_cores") -> None:
    """Raise ConfigError, naming `option`, for a core that this process may not use."""
    allowed = os.sched_getaffinity(0)
    missing = [core for core in cores if core not in allowed]
    if missing:
        raise ConfigError(
            f"{option}: {missing} are not among the cores of this process ({sorted(allowed)})",
            field=option,
        )


def pin_process(cores: tuple[int, ...]) -> None:
    """Bind this thread, and all threads that it starts later, to `cores`.

    Call it before torch runs. Raises ConfigError for a core that this process may not use.
    """
    check_cores(cores)
    os.sched_setaffinity(0, cores)


def live_threads() -> list[int]:
    """Return Linux' ids of this thread and of the others that Python has started."""
    this = threading.current_thread()  # its own note of its id may be that before a fork
    others = [each.native_id for each in threading.enumerate() if each is not this]
    return [threading.get_native_id(), *(each for each in others if each is not None)]


def quota_cores(cgroup: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Return how many whole cores the container's CPU limit allows, at least 1; None without a
    limit.

    With more threads than that, all threads are stopped together for most of each period.
    """
    try:
        if (cgroup / "cpu.max").exists():
            quota, period = (cgroup / "cpu.max").read_text().split()
        else:  # control groups of version 1
            names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
            quota, period = ((cgroup / "cpu" / name).read_text().strip() for name in names)
        return None if quota in ("max", "-1") else max(1, int(quota) // int(period))
    except (OSError, ValueError):
        return None


class CoreBoard:
    """A file in which the nodes of a host tell which of their cores are idle: a byte for each core.

    A core's bytes are written by the node that owns it alone. A node that is killed leaves them as
    they were: until it starts again, its cores are idle for the others, or are not. Any thread.
    """

    def __init__(self, path: Path, own: Iterable[int]) -> None:
        """Open or make the file. `own`: the cores of this process, busy from now on. Raises
        ConfigError."""
        self._own = tuple(own)
        try:
            with path.open("a+b") as file:
                file.truncate(MOST_CORES)
                self._bytes = mmap.mmap(file.fileno(), MOST_CORES)
        except OSError as error:
            text = f"core_board: {path} cannot be mapped ({error.strerror or error})"
            raise ConfigError(text, field="core_board") from error
        self.tell(idle=False)

    def tell(self, *, idle: bool) -> None:
        """Tell whether this process computes nothing now."""
        for core in self._own:
            self._bytes[core] = IDLE if idle else 0

    def idle(self, cores: Iterable[int]) -> tuple[int, ...]:
        """Return those of `cores` whose owners compute nothing now."""
        return tuple(core for core in cores if self._bytes[core] == IDLE)
