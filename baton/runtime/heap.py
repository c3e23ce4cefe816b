"""Memory that was freed goes back to the machine.

glibc keeps what a large piece of work has freed, in the arena of the thread that did it: a router
that has tokenized a few megabytes once would hold hundreds of them for good.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Final

LARGE_BYTES: Final = 2 << 20  # work on less leaves nothing that is worth the walk


def _trimmer() -> Callable[[int], int] | None:
    """glibc's malloc_trim; None with another C library."""
    return getattr(ctypes.CDLL(None), "malloc_trim", None)


_TRIM: Final = _trimmer()


def give_back(num_bytes: int) -> None:
    """After work on so many bytes. Milliseconds, without the GIL; call it off the event loop."""
    if _TRIM is not None and num_bytes >= LARGE_BYTES:
        _TRIM(0)
