"""The end of a connection, and the callbacks that wait for it (base.Incoming.on_closed)."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Closing:
    """Knows if a connection is over and calls back those who wait for it. Every method from any
    thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._over = False
        self._callbacks: list[Callable[[], None]] = []

    @property
    def over(self) -> bool:
        return self._over

    def on_closed(self, callback: Callable[[], None]) -> None:
        """See base.Incoming.on_closed."""
        with self._lock:
            if not self._over:
                self._callbacks.append(callback)
                return
        callback()

    def notify(self) -> None:
        """Mark the connection as over and call each callback once. Idempotent."""
        with self._lock:
            self._over = True
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()
