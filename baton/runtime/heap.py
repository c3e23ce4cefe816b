"""Gives freed memory back to the machine.

glibc keeps the memory that a large piece of work has freed in the arena of its thread. So a router
that has tokenized a few megabytes once would keep hundreds of megabytes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Final

LARGE_BYTES: Final = 2 << 20  # smaller work leaves too little memory for a trim


def _trimmer() -> Callable[[int], int] | None:
    """Return glibc's malloc_trim; None with another C library."""
    return getattr(ctypes.CDLL(None), "malloc_trim", None)


_TRIM: Final = _trimmer()


def give_back(num_bytes: int) -> None:
    """Trim the heap if the work on `num_bytes` was large.

    It takes milliseconds without the GIL, so call it off the event loop.
    """
    if num_bytes >= LARGE_BYTES:
        trim()


def trim() -> None:
    """Let the allocator free the memory that it keeps in reserve."""
    if _TRIM is not None:
        _TRIM(0)
