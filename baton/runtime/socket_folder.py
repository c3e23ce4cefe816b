"""A short-lived folder where processes meet, and the removal of folders that a kill -9 left behind.

The path of a Unix socket may have only 107 bytes, so the folder is in the temporary directory and
not among a run's data. The process that makes a folder holds a lock in it; the kernel drops the
lock when the process ends. Pids would not be reliable: they are used again, and containers may
share /tmp. Whoever makes the next folder with the same prefix removes those without a holder.
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
    """A folder `path` whose name begins with `prefix`.

    It exists until `remove`, or until its process has ended and another one makes a folder.
    """

    def __init__(self, prefix: str) -> None:
        remove_stale(prefix)
        self.path = Path(tempfile.mkdtemp(prefix=prefix))
        # The lock file gets its name after it is locked, so nobody finds it unlocked.
        unnamed = self.path / "lock.new"
        self._lock: int | None = os.open(unnamed, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        unnamed.rename(self.path / LOCK)

    def remove(self) -> None:
        """Remove the folder; may be called twice."""
        if self._lock is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = None


def remove_stale(prefix: str) -> list[Path]:
    """Remove the folders of processes that have ended, and return them; leave those in use."""
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
