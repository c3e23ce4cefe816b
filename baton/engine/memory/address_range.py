"""A reserved range of addresses into which files are mapped at chosen places.

Reserving costs no memory; touching an address that is not mapped faults. One tensor over the whole
range sees whatever is mapped later, so page `i` of it may lie in another process' file. The range
is given back when the last tensor over it is gone, never earlier: no view can dangle.

Linux only (MAP_FIXED over a reservation of our own); it uses ctypes, as Python's mmap takes no
address.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections.abc import Callable
from typing import Final

import torch

PAGE_BYTES: Final = mmap.PAGESIZE

_MAP_FIXED: Final = 0x10
_MAP_NORESERVE: Final = 0x4000
_PROT_NONE: Final = 0
_FAILED: Final = ctypes.c_void_p(-1).value


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [
        ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
    ]  # fmt: skip
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return libc


class AddressRange:
    """A range of `num_bytes` addresses, a multiple of the system's page; nothing is mapped at
    first.
    """

    def __init__(self, num_bytes: int) -> None:
        """Raises OSError if the system does not grant so many addresses."""
        self._libc = _libc()
        self.num_bytes = num_bytes
        nothing = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        self.address = self._mmap(None, num_bytes, _PROT_NONE, nothing, -1)
        self._array = (ctypes.c_ubyte * num_bytes).from_address(self.address)
        weakref.finalize(self._array, self._libc.munmap, self.address, num_bytes).atexit = False

    def tensor(self, offset: int = 0, num_bytes: int = -1) -> torch.Tensor:
        """Return uint8 [num_bytes] from `offset` on (-1 = all that follows); the tensor keeps the
        range alive."""
        return torch.frombuffer(self._array, dtype=torch.uint8, count=num_bytes, offset=offset)

    def when_gone(self, call: Callable[[], object]) -> None:
        """Call `call` once, when the last tensor over the range is gone or the process ends."""
        weakref.finalize(self._array, call)

    def map_file(self, descriptor: int, offset: int, num_bytes: int, *, writable: bool) -> None:
        """Map the first `num_bytes` of a file at `offset`. Raises OSError.

        A write through a read-only mapping kills the process: that is better than damage to another
        node's memory.
        """
        self._check(offset, num_bytes)
        access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        flags = mmap.MAP_SHARED | _MAP_FIXED
        self._mmap(self.address + offset, num_bytes, access, flags, descriptor)

    def map_copy_on_write(self, descriptor: int, offset: int, num_bytes: int) -> None:
        """Map the first `num_bytes` of a file at `offset`. What this process writes there, it alone
        sees. Raises OSError."""
        self._check(offset, num_bytes)
        access = mmap.PROT_READ | mmap.PROT_WRITE
        flags = mmap.MAP_PRIVATE | _MAP_NORESERVE | _MAP_FIXED
        self._mmap(self.address + offset, num_bytes, access, flags, descriptor)

    def unmap(self, offset: int, num_bytes: int) -> None:
        """Remove the mapping of these bytes; their addresses stay reserved."""
        self._check(offset, num_bytes)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE | _MAP_FIXED
        self._mmap(self.address + offset, num_bytes, _PROT_NONE, flags, -1)

    def _check(self, offset: int, num_bytes: int) -> None:
        assert num_bytes > 0, num_bytes
        assert 0 <= offset <= self.num_bytes - num_bytes, offset
        assert offset % PAGE_BYTES == 0, offset

    def _mmap(
        self, address: int | None, num_bytes: int, access: int, flags: int, descriptor: int
    ) -> int:
        where = self._libc.mmap(address, num_bytes, access, flags, descriptor, 0)
        if where == _FAILED:
            number = ctypes.get_errno()
            raise OSError(number, f"mmap of {num_bytes} bytes: {os.strerror(number)}")
        return where
