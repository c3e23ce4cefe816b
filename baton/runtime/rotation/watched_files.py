"""WatchedFiles: a value that is made of files, and made again when they have changed.

Nothing runs in the background: whoever uses the value looks at the files first, at most once in
LOOK_S. A file counts as changed if it was written, or if another one is in its place; symbolic
links are followed, because Kubernetes replaces the files of a Secret by moving a link. Files that
cannot be used, or that change while they are read, leave the value as it was (file_metrics.py shows
it).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Generic, TypeVar

from baton.protocol.errors import ConfigError

log = logging.getLogger(__name__)
T = TypeVar("T")
LOOK_S: Final = 1.0
FileState = tuple[tuple[int, ...] | None, ...]


class WatchedFiles(Generic[T]):
    """The value that `read` makes of the files at `paths`. Any thread.

    `name`: the option that names the files. `succeeded`: whether the files as they are now could be
    read. `read_at`: when the value was made, in seconds since 1970.
    """

    def __init__(
        self,
        name: str,
        paths: Sequence[Path],
        read: Callable[[], T],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Make the first value. Raises ConfigError of `read`."""
        self.name = name
        self._paths = tuple(paths)
        self._read = read
        self._now = now
        self._lock = threading.Lock()
        self._seen = state_of(self._paths)
        self._look_at = now() + LOOK_S
        self._value = read()
        self._complaint: str | None = None
        self.read_at = time.time()

    @property
    def succeeded(self) -> bool:
        return self._complaint is None

    def value(self) -> T:
        """Return the value of the files as they are now, or the last good one."""
        if self._now() >= self._look_at:
            with self._lock:
                if self._now() >= self._look_at:
                    self._look()
        return self._value

    def _look(self) -> None:
        self._look_at = self._now() + LOOK_S
        state = state_of(self._paths)
        if state == self._seen and self._complaint is None:
            return
        try:
            value = self._read()
            if state_of(self._paths) != state:
                raise ConfigError("the files change while they are read", field=self.name)
        except (ConfigError, OSError) as error:
            complaint = error.message if isinstance(error, ConfigError) else str(error)
            if complaint != self._complaint:
                log.error("%s: the old files stay in use: %s", self.name, complaint)
            self._complaint = complaint
            return
        self._value, self._seen, self._complaint = value, state, None
        self.read_at = time.time()
        log.info("%s: read again: %s", self.name, ", ".join(map(str, self._paths)))


def state_of(paths: Sequence[Path]) -> FileState:
    """Return values that change when a file is written or replaced; None for a missing one."""
    return tuple(_state(path) for path in paths)


def _state(path: Path) -> tuple[int, ...] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino, found.st_dev
