"""How fast the link to each peer is, as past fetches have shown, and which codec that asks for.

A fetch is as slow as the prefill that it follows. So the time in which the exporter had nothing to
send does not count; END says how long that was. Time that overlaps with it counts in favour of the
link, so `auto` rather chooses exact KV than int8. Any thread.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Final

from kv_transfer.protocol.messages import INT8, RAW

AUTO: Final = "auto"
WIRE_CODECS: Final = (RAW, INT8, AUTO)
FAST_LINK: Final = 3e9  # bytes/s from which int8 costs more than it saves (docs/kv_transfer.md)
MIN_BYTES: Final = 4 << 20  # less says more about round trips than about the link
WEIGHT: Final = 0.3  # of the newest fetch in the moving average
PROBE_EVERY: Final = (
    32  # fetches of a slow link; one raw, to see whether quantising is what is slow
)
MAX_PEERS: Final = 1024


class LinkSpeeds:
    """Bytes per second by peer (its boot id), a moving average."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._speeds: OrderedDict[str, float] = OrderedDict()
        self._choices: OrderedDict[str, int] = OrderedDict()

    def observe(self, peer: str, num_bytes: int, seconds: float) -> None:
        """A fetch moved `num_bytes` in `seconds`, without the time of waiting for the prefill."""
        if num_bytes < MIN_BYTES or seconds <= 0:
            return
        speed = num_bytes / seconds
        with self._lock:
            last = self._speeds.pop(peer, speed)
            self._speeds[peer] = last + WEIGHT * (speed - last)
            if len(self._speeds) > MAX_PEERS:
                self._speeds.popitem(last=False)

    def speed(self, peer: str) -> float | None:
        """Bytes per second; None before the first fetch worth measuring."""
        with self._lock:
            return self._speeds.get(peer)

    def codec(self, peer: str) -> str:
        """The codec that `auto` takes for the next fetch: int8 once the link has proved slow."""
        speed = self.speed(peer)
        if speed is None or speed >= FAST_LINK:
            return RAW
        with self._lock:
            count = self._choices.pop(peer, 0)
            self._choices[peer] = count + 1
            if len(self._choices) > MAX_PEERS:
                self._choices.popitem(last=False)
        return RAW if count % PROBE_EVERY == PROBE_EVERY - 1 else INT8
