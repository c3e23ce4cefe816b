"""Files on a local disk as memory: whether the kernel maps them in pages of 2 MiB.

A file that is mapped lies in the page cache: all processes share it, the kernel may drop its pages,
and it outlives its processes and the machine's power. A file system with large folios (ext4 from
Linux 6.16 on, XFS) maps it in pages of 2 MiB at once, if it was written in pieces of that size.
Others have pages of 4 KiB only, through which weights are read slower (huge_pages.py); files in
memory can be turned into large pages there (shared_area.py).
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Final

from baton.engine.memory import pages
from baton.engine.memory.address_range import AddressRange
from baton.engine.memory.huge_pages import HUGE

PROC: Final = Path("/proc/self")
_TRIED: Final = 2  # pages that a trial maps


def maps_large(folder: Path) -> bool:
    """Whether files in `folder` are mapped in pages of 2 MiB: one is written, mapped and removed.

    Raises OSError if no file can be written there.
    """
    with tempfile.TemporaryFile(dir=folder) as file:
        size = _TRIED * HUGE
        for _ in range(_TRIED):
            file.write(bytes(HUGE))
            file.flush()
        area = AddressRange(size + HUGE)
        start = -area.address % HUGE
        area.map_file(file.fileno(), start, size, writable=False)
        pages.advise_large(area.address + start, size)
        mapped = area.tensor(start, size)
        assert not mapped[:: os.sysconf("SC_PAGE_SIZE")].any(), "zeros were written"
        return _large_bytes(area.address + start) >= size


def _large_bytes(address: int, proc: Path = PROC) -> int:
    """Return the bytes in large pages of the mapping of a file that begins at `address`."""
    inside = False
    for line in (proc / "smaps").read_text().splitlines():
        if line.startswith(f"{address:x}-"):
            inside = True
        elif inside and line.startswith("FilePmdMapped:"):
            return int(line.split()[1]) * 1024
    return 0
