"""Host memory for tensors that every step reads as a whole: in pages of 2 MiB where that works.

A core that streams through pages of 4 KiB waits for their addresses: with one thread, decode steps
over weights in pages of 2 MiB took 0.82 to 0.91 of the time. Tensors that fill few such pages lie
side by side: all weights of a small model are such. Shared memory is not here: its file system lays
it out.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import sys
import threading
import weakref
from typing import Final

import torch
from torch import Tensor

from baton.engine.memory.state_sizes import aligned

HUGE: Final = 2 << 20
SHARED: Final = 32 << 20  # bytes of a mapping for several tensors
SMALLEST: Final = 64 << 10  # of a tensor; a smaller one is read in no time


def zeros(*shape: int, dtype: torch.dtype, alone: bool = False) -> Tensor:
    """Return a tensor of zeros. Its memory is taken as it is touched, and freed with the tensor, or
    with the last one of those that lie beside it.

    `alone`: nothing lies beside it, since its pages are given back while it lives (pages.py).
    Tensors of less than SMALLEST lie in ordinary pages, as what is left at the end of one that lies
    alone; so does all where the kernel has no others.
    """
    count = math.prod(shape)
    size = count * dtype.itemsize
    if size < SMALLEST or sys.platform != "linux":
        return torch.zeros(*shape, dtype=dtype)
    beside = size < SHARED // 2 and not alone
    area, start = shared_mapping.place(size) if beside else _mapped(size)
    return torch.frombuffer(area, dtype=dtype, count=count, offset=start).view(*shape)


class SharedMapping:
    """Room in the mapping that several tensors share. Only they keep it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._area: weakref.ref[mmap.mmap] | None = None
        self._next = 0
        self._end = 0

    def place(self, size: int) -> tuple[mmap.mmap, int]:
        """Return a mapping and where in it `size` bytes of zeros are free."""
        with self._lock:
            area = None if self._area is None else self._area()
            if area is None or self._next + size > self._end:
                area, self._next = _mapped(SHARED)
                self._area, self._end = weakref.ref(area), self._next + SHARED
            start = self._next
            self._next += aligned(size)
            return area, start


shared_mapping = SharedMapping()


def _mapped(size: int) -> tuple[mmap.mmap, int]:
    """Return a mapping, and where in it a page of 2 MiB begins that `size` bytes may follow."""
    area = mmap.mmap(-1, size + HUGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = -torch.frombuffer(area, dtype=torch.uint8).data_ptr() % HUGE
    with contextlib.suppress(OSError):
        area.madvise(mmap.MADV_HUGEPAGE, start, size // HUGE * HUGE)
    return area, start
