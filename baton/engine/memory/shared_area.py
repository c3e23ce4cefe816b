"""Memory that several processes map from one file: one writes it, all read it, in pages of 2 MiB.

Large pages speed up reading weights as a whole (huge_pages.py). A file in memory has them after
MADV_COLLAPSE, whatever the kernel's default for shared memory is. If the kernel refuses, the pages
stay small and nothing else changes. Linux only. Source: madvise(2), Linux 6.1 and newer for shared
memory.
"""

from __future__ import annotations

import ctypes
import math
import os
import sys
import weakref
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from baton.engine.memory.huge_pages import HUGE

ALIGNMENT: Final = 64  # of tensors, bytes: a cache line
_READ, _WRITE = 1, 2
_SHARED, _PRIVATE, _FIXED, _ANONYMOUS, _NO_RESERVE = 0x01, 0x02, 0x10, 0x20, 0x4000
_COLLAPSE: Final = 25
_FAILED: Final = ctypes.c_void_p(-1).value


class SharedArea:
    """A mapped file of at most `capacity` bytes. It stays mapped while a tensor of it lives.

    `fd` stays open for as long, and the area closes it: so a lock on `fd` shows who maps the file.
    """

    def __init__(self, fd: int, capacity: int, *, writable: bool) -> None:
        """Raises OSError where the file cannot be mapped."""
        if sys.platform != "linux":
            raise OSError("shared areas are for Linux")
        self._libc = _libc()
        self._fd = fd
        self._size = capacity
        # First reserve room for a start at a multiple of HUGE; then map the file into it.
        room = self._map(None, capacity + HUGE, 0, _PRIVATE | _ANONYMOUS | _NO_RESERVE, -1)
        self._start = room + -room % HUGE
        access = _READ | (_WRITE if writable else 0)
        try:
            self._map(self._start, capacity, access, _SHARED | _FIXED, fd)
        except OSError:
            self._libc.munmap(room, capacity + HUGE)
            raise
        self._bytes = (ctypes.c_uint8 * capacity).from_address(self._start)
        self._then: list[Callable[[], object]] = []
        weakref.finalize(self._bytes, _unmap, room, capacity + HUGE, fd, self._then)

    def then(self, call: Callable[[], object]) -> None:
        """Call `call` once the area is unmapped and the file closed, at the process' end as
        well.
        """
        self._then.append(call)

    def tensor(self, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        """Return a tensor over the numbers at `offset`. Writing to a sealed area is a fault."""
        count = math.prod(shape)
        if not count:
            return torch.empty(shape, dtype=dtype)
        flat: Any = torch.frombuffer(self._bytes, dtype=dtype, count=count, offset=offset)
        return flat.view(shape)

    def seal(self, size: int) -> None:
        """Make the area read-only, its first `size` bytes in large pages where that works."""
        self._libc.mprotect(self._start, self._size, _READ)
        whole = size // HUGE * HUGE
        if whole:
            self._libc.madvise(self._start, whole, _COLLAPSE)

    def view(self, start: int, stop: int) -> memoryview:
        """Return bytes [start, stop), not copied."""
        return memoryview(self._bytes).cast("B")[start:stop]

    def _map(self, at: int | None, size: int, access: int, flags: int, fd: int) -> int:
        found = self._libc.mmap(at, size, access, flags, fd, 0)
        if found == _FAILED:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        return int(found)


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    libc.mmap.argtypes = (pointer, size, number, number, number, ctypes.c_long)
    libc.mmap.restype = pointer
    for function in (libc.mprotect, libc.madvise):
        function.argtypes = (pointer, size, number)
    libc.munmap.argtypes = (pointer, size)
    return libc


def _unmap(room: int, size: int, fd: int, then: list[Callable[[], object]]) -> None:
    _libc().munmap(room, size)
    os.close(fd)
    for call in then:
        call()
