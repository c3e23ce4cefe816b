"""Deadlines for blocking calls without a timeout: one thread calls back when a guard runs out."""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from baton.protocol.clock import Clock


class Deadlines:
    """Guards for blocking calls: `with guard(seconds, break_it): blocking_call()`.

    `break_it` is called unless the blocking call ends in time. The thread starts with the first
    guard and sleeps until the earliest deadline.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._waiting: list[tuple[float, int]] = []  # heap of (deadline, guard)
        self._callbacks: dict[int, Callable[[], object]] = {}  # guards still in force
        self._numbers = itertools.count()
        self._thread: threading.Thread | None = None
        self._stopped = False

    @contextmanager
    def guard(self, seconds: float, on_deadline: Callable[[], object]) -> Iterator[None]:
        """Call `on_deadline` at most once, from another thread, if the context takes longer than
        `seconds`.

        `on_deadline` must not block.
        """
        number = next(self._numbers)
        with self._changed:
            self._callbacks[number] = on_deadline
            heapq.heappush(self._waiting, (self._clock.monotonic() + seconds, number))
            if self._thread is None and not self._stopped:
                self._thread = threading.Thread(target=self._run, name="kv-deadlines", daemon=True)
                self._thread.start()
            elif self._waiting[0][1] == number:
                self._changed.notify()
        try:
            yield
        finally:
            with self._changed:
                self._callbacks.pop(number, None)

    def stop(self) -> None:
        """End the thread; no callback is called any more. Idempotent."""
        with self._changed:
            self._stopped = True
            self._changed.notify()
            thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        while (callback := self._next()) is not None:
            callback()

    def _next(self) -> Callable[[], object] | None:
        """Wait for the next deadline that is still in force and return its callback; None when
        stopped.
        """
        with self._changed:
            while not self._stopped:
                if not self._waiting:
                    self._changed.wait()
                    continue
                deadline, number = self._waiting[0]
                left = deadline - self._clock.monotonic()
                if left > 0 and number in self._callbacks:
                    self._changed.wait(left)
                    continue
                heapq.heappop(self._waiting)
                callback = self._callbacks.pop(number, None)
                if callback is not None:
                    return callback
        return None
