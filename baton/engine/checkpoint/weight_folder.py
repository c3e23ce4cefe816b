"""The folder of weight files: where it is, who removes a file, and when.

on a disk   the user's cache, if files stay for the next start and the disk serves as well as memory
in memory   FOLDER, else

mapped      each process that maps a file holds a shared lock on it; nobody removes it
let go      the last process that lets a file go removes it, or leaves it for the next start
            (`keep_bytes` > 0)
left over   also by a killed process: the next process that opens the folder, or lets a file
            go, keeps the last used ones that fit into its `keep_bytes`, and removes the others
"""

from __future__ import annotations

import fcntl
import os
import struct
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

FOLDER: Final = Path("/dev/shm")
LEAST_BYTES: Final = 64 << 20  # smaller checkpoints are not shared: nothing is gained
LOCK: Final = "lock"  # a file; each byte of it is a lock
_CLEANING: Final = 1 << 60  # the byte of whoever cleans up; keys have those below
SUFFIX: Final = ".weights"
AUTO_SHARE: Final = 4  # the automatic bound is this part of the disk's free space
_BLOCK: Final = 512  # of st_blocks


class CannotShare(Exception):
    """These weights stay private; the text says why."""


@dataclass(frozen=True, slots=True)
class WeightCache:
    """What is kept for the next start. `num_bytes`: at most, 0 = nothing; None = as much of a disk
    as AUTO_SHARE says, nothing in memory. `stored_bytes`: of the checkpoint to be loaded. `asked`:
    somebody has named the bound."""

    num_bytes: int | None = 0
    stored_bytes: int = 0
    asked: bool = False


@dataclass(frozen=True, slots=True)
class WeightFolder:
    """A folder of this user's alone. `keep_bytes`: what files that nobody maps may take.
    `on_disk`: they take no memory then."""

    place: Path
    keep_bytes: int = 0
    on_disk: bool = False

    def path(self, name: str) -> Path:
        """Return where the file of a key is."""
        return self.place / f"{name}{SUFFIX}"

    def open_lock(self) -> int:
        """Return a descriptor of the lock file. Raises OSError."""
        return os.open(self.place / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def let_go(self, fd: int, path: Path) -> None:
        """Close `fd`, a file that this process has mapped, and remove what is not to be kept.

        The lock is not given up first but turned into an exclusive one, which succeeds for the last
        holder alone. A mapping keeps its descriptor's lock, also while its process ends; so that
        of a file that is kept becomes a shared one again.
        """
        try:
            with suppress(OSError):
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(fd).st_ino != path.stat().st_ino:
                    return
                if not self.keep_bytes:
                    path.unlink()
                    return
                os.utime(path)  # used until now
                self.clean(own=(path, fd))
                fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        finally:
            os.close(fd)

    def clean(self, but: Path | None = None, own: tuple[Path, int] | None = None) -> None:
        """Of the files that no process maps, but for `but`, keep the last used ones that fit into
        `keep_bytes`. Any process may call this at any time. `own`: a file that this process maps
        last, and its descriptor with an exclusive lock; it counts as one that no process maps."""
        with suppress(OSError):
            lock = self.open_lock()
            try:
                wait_for(lock, _CLEANING)
                self._clean(but, own)
            finally:
                os.close(lock)

    def _clean(self, but: Path | None, own: tuple[Path, int] | None) -> None:
        unheld = [] if own is None else [_unheld(*own)]
        others = (path for path in self.place.iterdir() if path != but and path.name != LOCK)
        for path in others:
            with suppress(OSError):  # it is gone, or held
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError:
                    os.close(fd)
                    continue
                unheld.append(_unheld(path, fd))
        room = self.keep_bytes
        for _, size, path, fd in sorted(unheld, reverse=True):
            if path.suffix == SUFFIX and size <= room:
                room -= size
            else:
                path.unlink(missing_ok=True)
            if own is None or fd != own[1]:
                os.close(fd)


def _unheld(path: Path, fd: int) -> tuple[float, int, Path, int]:
    """Return when the file was last used, its bytes, and what was given."""
    found = os.fstat(fd)
    return found.st_mtime, found.st_blocks * _BLOCK, path, fd


def held_bytes(place: Path) -> int:
    """Return what the files of a folder take, also those that a killed process left unfinished.

    0 if there is no folder. Raises OSError.
    """
    held = 0
    for path in place.glob("*"):
        with suppress(FileNotFoundError):  # another process has removed it
            held += path.stat().st_blocks * _BLOCK
    return held


def wait_for(lock: int, at: int) -> None:
    """Wait for the lock on one byte of the lock file; closing `lock` gives it up."""
    wanted = struct.pack("hhqqixxxx", fcntl.F_WRLCK, os.SEEK_SET, at, 1, 0)
    fcntl.fcntl(lock, fcntl.F_OFD_SETLKW, wanted)
