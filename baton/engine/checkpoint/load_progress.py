"""How far a load of weights is, for whoever waits: lines of the log, none of a short load."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Final

log = logging.getLogger(__name__)
LOG_EVERY_S: Final = 2.0


class LoadProgress:
    """Of one reader of tensors. Any thread."""

    def __init__(self, total_bytes: int, now: Callable[[], float] = time.monotonic) -> None:
        """`now`: seconds of any monotonic clock."""
        self._total = total_bytes
        self._now = now
        self._began = self._logged_at = now()
        self._done = 0
        self._lock = threading.Lock()

    def add(self, num_bytes: int) -> None:
        """So many bytes of the files have been read."""
        with self._lock:
            self._done = done = min(self._total, self._done + num_bytes)
            now = self._now()
            if now - self._logged_at < LOG_EVERY_S:
                return
            self._logged_at = now
        left = (self._total - done) * (now - self._began) / done
        log.info(
            "loading weights: %d %% of %.1f GB, about %.0f s more",
            100 * done // self._total, self._total / 1e9, left,
        )  # fmt: skip
