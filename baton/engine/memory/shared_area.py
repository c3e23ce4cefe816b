"""Memory that several processes map from one file: one writes it, all read it, in pages of 2 MiB.

Pages of 2 MiB matter to a process that streams through weights (huge_pages.py). A file in memory
has them after MADV_COLLAPSE, whatever the kernel's default for shared memory is; a file on a disk
has them from its first write on, or never (file_pages.py). If the kernel refuses, the pages stay
small and nothing else changes. Nobody writes through a mapping: the writer calls `pwrite`, which
needs no fault for each page.
Source: madvise(2), Linux 6.1 and newer for shared memory.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from baton.engine.memory import pages
from baton.engine.memory.address_range import AddressRange
from baton.engine.memory.huge_pages import HUGE

ALIGNMENT: Final = 64  # of tensors, bytes: a cache line


class SharedArea:
    """A mapped file of at most `capacity` bytes. It stays mapped while a tensor of it lives."""

    def __init__(self, fd: int, capacity: int, *, on_disk: bool = False) -> None:
        """`on_disk`: the file is no memory of its own. Raises OSError where the file cannot be
        mapped."""
        if sys.platform != "linux":
            raise OSError("shared areas are for Linux")
        self._fd = fd
        self._capacity = capacity
        self._on_disk = on_disk
        # The range has room for a start at a multiple of HUGE, wherever it lies.
        self._range = AddressRange(capacity + HUGE)
        self._start = -self._range.address % HUGE
        self._range.map_file(fd, self._start, capacity, writable=False)
        self._advise()

    def when_gone(self, call: Callable[[], object]) -> None:
        """Call `call` once, when the last tensor of the area is gone or the process ends."""
        self._range.when_gone(call)

    def tensor(self, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        """Return a tensor over the numbers at `offset`. They are those of the file, also when it is
        written later. Writing to the tensor is a fault, unless `seal` has said otherwise."""
        size = math.prod(shape) * dtype.itemsize
        if not size:
            return torch.empty(shape, dtype=dtype)
        return self._range.tensor(self._start + offset, size).view(dtype).view(shape)

    def seal(self, size: int, copy_on_write: bool = False) -> None:
        """The file is written: make its first `size` bytes large pages where that works. With
        `copy_on_write` a page that is written from now on becomes this process's own."""
        if copy_on_write:
            self._range.map_copy_on_write(self._fd, self._start, self._capacity)
            self._advise()
        whole = size // HUGE * HUGE
        if whole and not self._on_disk:
            pages.collapse(self._range.address + self._start, whole)

    def _advise(self) -> None:
        if self._on_disk:
            pages.advise_large(self._range.address + self._start, self._capacity)
