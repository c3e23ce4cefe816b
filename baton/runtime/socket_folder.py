"""A short-lived folder where processes meet, and the removal of those that a kill -9 left behind.

A Unix socket's path may have 107 bytes only, so it lives in the temporary directory and not among
a run's data. Whoever made a folder holds a lock in it; the kernel drops the lock with the process.
That also holds where pids mean nothing: they are used again, and containers may share /tmp.
Whoever makes the next folder of that prefix removes those that nobody holds.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from typing import Final

LOCK: Final = "lock"


class SocketFolder:
    """`path`, whose name begins with `prefix`, exists until `remove`, or until the process has
    ended and another one makes its own."""

    def __init__(self, prefix: str) -> None:
        remove_stale(prefix)
        self.path = Path(tempfile.mkdtemp(prefix=prefix))
        # It gets its name once it is locked: nobody finds one that is not.
        unnamed = self.path / "lock.new"
        self._lock: int | None = os.open(unnamed, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        unnamed.rename(self.path / LOCK)

    def remove(self) -> None:
        """Twice is safe."""
        if self._lock is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = None


def remove_stale(prefix: str) -> list[Path]:
    """Remove the folders of processes that have ended; returns them. Others' are left alone."""
    removed: list[Path] = []
    for lock in Path(tempfile.gettempdir()).glob(f"{prefix}*/{LOCK}"):
        try:
            descriptor = os.open(lock, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:  # another user's, or gone by now
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # in use
            continue
        else:
            shutil.rmtree(lock.parent, ignore_errors=True)
            removed.append(lock.parent)
        finally:
            os.close(descriptor)
    return removed
