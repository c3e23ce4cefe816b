"""Connections kept between two conversations: the next one needs no handshake.

A connection is kept only after a conversation that ended well, together with the HELLO by which its
exporter proved itself. The exporter closes a connection that is silent for too long, so idle ones
are dropped here before that. If the exporter has closed one all the same, the first `receive`
notices it, and fetcher.py begins again on a fresh connection.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from typing import Final, TypeAlias

from baton.protocol.clock import Clock
from kv_transfer.protocol.base import Wire
from kv_transfer.protocol.messages import Hello

KEPT_PER_PEER: Final = 4

PeerKey: TypeAlias = tuple[str, str, str]  # lane name, address, boot id


@dataclass(frozen=True, slots=True)
class Kept:
    wire: Wire
    peer: Hello
    until: float


class WirePool:
    """Idle connections by peer; the youngest is taken first. Any thread."""

    def __init__(self, clock: Clock, idle_s: float) -> None:
        self._clock = clock
        self._idle_s = idle_s
        self._lock = threading.Lock()
        self._idle: dict[PeerKey, deque[Kept]] = {}
        self._closed = False

    def take(self, key: PeerKey) -> Kept | None:
        """A connection to the peer that nobody else uses now; None if there is none."""
        with self._lock:
            dropped = self._prune()
            idle = self._idle.get(key)
            kept = idle.pop() if idle else None
        _finish(dropped)
        return kept

    def give(self, key: PeerKey, wire: Wire, peer: Hello) -> None:
        """Keep a connection whose conversation has ended well, or drop it if there are enough."""
        kept = Kept(wire, peer, self._clock.monotonic() + self._idle_s)
        with self._lock:
            dropped = self._prune()
            idle = self._idle.setdefault(key, deque())
            if self._closed or len(idle) >= KEPT_PER_PEER:
                dropped.append(kept)
            else:
                idle.append(kept)
        _finish(dropped)

    def drop_old(self) -> None:
        """Drop connections that have been idle for too long.

        Otherwise they, and the memory of a dead peer that they hold, would stay until the next
        conversation.
        """
        with self._lock:
            dropped = self._prune()
        _finish(dropped)

    def close(self) -> None:
        """Drop all connections, and each one given later. Idempotent."""
        with self._lock:
            self._closed = True
            dropped = [kept for idle in self._idle.values() for kept in idle]
            self._idle.clear()
        _finish(dropped)

    def _prune(self) -> list[Kept]:
        now = self._clock.monotonic()
        dropped: list[Kept] = []
        for key, idle in list(self._idle.items()):
            while idle and idle[0].until <= now:
                dropped.append(idle.popleft())
            if not idle:
                del self._idle[key]
        return dropped


def _finish(dropped: list[Kept]) -> None:
    for kept in dropped:
        kept.wire.finish()
