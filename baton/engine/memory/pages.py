"""Frees a tensor's memory while its address stays, and takes memory again. Linux, CPU.

Anonymous memory is zero and untouched afterwards: it is taken page by page, as it is written. Pages
of a file (shared memory) are cut out of the file. They are taken again at once, because touching
one when the file system has no room would end the process. Source: madvise(2).
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
from functools import cache
from typing import Any, Final

from torch import Tensor

from baton.protocol.errors import Unavailable

_DONTNEED: Final = 4
_REMOVE: Final = 9
_HUGEPAGE: Final = 14
_POPULATE_WRITE: Final = 23  # Linux 5.14
_COLLAPSE: Final = 25  # Linux 6.1


def give_back(memory: Tensor) -> bool:
    """Free the tensor's memory; return whether that could be done. Pages shared with other data
    stay.
    """
    start, size = _whole_pages(memory)
    if sys.platform != "linux" or not size:
        return False
    return not _madvise(start, size, _REMOVE) or not _madvise(start, size, _DONTNEED)


def take_again(memory: Tensor) -> None:
    """Take memory again after give_back.

    Raises Unavailable where the memory is a file's and there is no room.
    """
    start, size = _whole_pages(memory)
    if not size or _madvise(start, size, _REMOVE):
        return  # anonymous memory is taken as it is touched
    error = _madvise(start, size, _POPULATE_WRITE)
    if error not in (0, errno.EINVAL):  # EINVAL: the kernel does not know this advice
        raise Unavailable(f"no room for the KV pool: {os.strerror(error)}")


def collapse(start: int, size: int) -> bool:
    """Whether the pages at these addresses are pages of 2 MiB now; both are multiples of that."""
    return not _madvise(start, size, _COLLAPSE)


def advise_large(start: int, size: int) -> None:
    """Ask for pages of 2 MiB at these addresses, wherever pages are made from now on."""
    _madvise(start, size, _HUGEPAGE)


def _whole_pages(memory: Tensor) -> tuple[int, int]:
    """Return (address, bytes) of the pages that hold nothing but this tensor."""
    page = mmap.PAGESIZE
    start = -(-memory.data_ptr() // page) * page
    end = (memory.data_ptr() + memory.nbytes) // page * page
    return start, max(0, end - start)


def _madvise(start: int, size: int, advice: int) -> int:
    """Call madvise; return 0, or the error's number."""
    if _libc().madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), ctypes.c_int(advice)):
        return ctypes.get_errno()
    return 0


@cache
def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)
