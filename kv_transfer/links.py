"""How fast the link to each peer is, measured by past fetches, and which codec suits that speed.

A fetch is as slow as the prefill that it follows, so the time in which the exporter had nothing to
send does not count; END says how long that was. Bytes sent during that time still count, which
makes the link look faster, so `auto` tends to choose exact KV. Any thread.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Final

from baton.runtime.config import AUTO
from kv_transfer.protocol.messages import INT8, RAW

WIRE_CODECS: Final = (RAW, INT8, AUTO)
# bytes/s; on faster links int8 costs more than it saves (docs/kv_transfer.md)
FAST_LINK: Final = 3e9
MIN_BYTES: Final = 4 << 20  # the time of a smaller fetch is mostly round trips
WEIGHT: Final = 0.3  # weight of the newest fetch in the moving average
PROBE_EVERY: Final = (
    32  # fetches of a slow link; one raw, to see whether quantising is what is slow
)
MAX_PEERS: Final = 1024


class LinkSpeeds:
    """The speed of the link to each peer (by boot id): a moving average of bytes per second."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._speeds: OrderedDict[str, float] = OrderedDict()
        self._choices: OrderedDict[str, int] = OrderedDict()

    def observe(self, peer: str, num_bytes: int, seconds: float) -> None:
        """Record a fetch of `num_bytes` in `seconds`; time spent waiting for the prefill is not in
        `seconds`.
        """
        if num_bytes < MIN_BYTES or seconds <= 0:
            return
        speed = num_bytes / seconds
        with self._lock:
            last = self._speeds.pop(peer, speed)
            self._speeds[peer] = last + WEIGHT * (speed - last)
            if len(self._speeds) > MAX_PEERS:
                self._speeds.popitem(last=False)

    def speed(self, peer: str) -> float | None:
        """Return the bytes per second; None before the first fetch that was large enough to
        measure.
        """
        with self._lock:
            return self._speeds.get(peer)

    def codec(self, peer: str) -> str:
        """Return the codec that `auto` takes for the next fetch: int8 if the link has proved slow,
        else raw.

        One of PROBE_EVERY fetches over a slow link is raw, to measure the link without
        quantisation.
        """
        speed = self.speed(peer)
        if speed is None or speed >= FAST_LINK:
            return RAW
        with self._lock:
            count = self._choices.pop(peer, 0)
            self._choices[peer] = count + 1
            if len(self._choices) > MAX_PEERS:
                self._choices.popitem(last=False)
        return RAW if count % PROBE_EVERY == PROBE_EVERY - 1 else INT8
