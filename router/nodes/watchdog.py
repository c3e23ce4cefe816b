"""Watchdog: ends the session of a node that is silent though it has requests of this router.

A node says something with every step, and at least once a heartbeat, however long its step takes;
whether its engine hangs it says itself (baton/node/progress.py). So silence means that the node's
event loop hangs, though gRPC's own threads still answer pings. Nothing is expected of a node
without requests of ours.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from baton.protocol.clock import Clock


class Watchdog:
    """`busy`: has the node requests of ours? The life: heard() and began() as they happen, `bite`
    as a task of each session."""

    def __init__(self, clock: Clock, stall_s: float, busy: Callable[[], bool]) -> None:
        self._clock = clock
        self._stall_s = stall_s
        self._busy = busy
        self._since = clock.monotonic()  # the last word, or the first request after a pause

    def heard(self) -> None:
        self._since = self._clock.monotonic()

    def began(self) -> None:
        """It has a request of ours, and had none before."""
        self.heard()

    async def bite(self) -> None:
        """Returns once the node has been silent for too long."""
        while True:
            left = self._stall_s
            if self._busy():
                left -= self._clock.monotonic() - self._since
            if left <= 0:
                return
            await asyncio.sleep(left)
