"""The end of a connection, and the callbacks that wait for it (base.Incoming.on_closed)."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Closing:
    """Whether a connection is over, and whom to call back. Every method from any thread."""

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
        """It is over: call back whoever asked, each once. Idempotent."""
        with self._lock:
            self._over = True
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()
