"""A node's cores: affinity and thread count.

OpenMP teams that outnumber their cores stall for 10-16 ms at every barrier (DESIGN.md section 4),
so each node gets its own cores and exactly as many threads.
"""

from __future__ import annotations

import os

from baton.errors import ConfigError


def parse_cores(text: str) -> tuple[int, ...]:
    """Sorted core numbers of "0,1" or "0,4-7". Raises ConfigError."""
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
            f'cpu_cores: {text!r} is not a list like "0,1" or "4-7"', field="cpu_cores"
        ) from error
    return tuple(sorted(cores))


def pin_process(cores: tuple[int, ...]) -> None:
    """Bind this thread, and all threads it starts from now on, to `cores`. Before torch runs.

    Raises ConfigError for a core that this process may not use.
    """
    allowed = os.sched_getaffinity(0)
    missing = [core for core in cores if core not in allowed]
    if missing:
        raise ConfigError(
            f"cpu_cores: {missing} are not among the cores of this process ({sorted(allowed)})",
            field="cpu_cores",
        )
    os.sched_setaffinity(0, cores)
