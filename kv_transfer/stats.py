"""Counters of one connector, read by the metrics exporter: plain ints and floats, monotonic."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field


@dataclass(slots=True)
class TransferStats:
    """Fields are read without the lock; they are written by the methods only, from any thread.

    `exposed_tail_seconds` sums, over `exposed_tails` acknowledged fetches, the time from "prefill
    complete" (or, for a late fetch, from its FETCH) to the ACK, as the exporter sees it.
    """

    bytes_sent: dict[str, int] = field(default_factory=dict[str, int])  # payload bytes by lane
    bytes_received: dict[str, int] = field(default_factory=dict[str, int])
    frames_sent: int = 0
    frames_received: int = 0
    fetches: int = 0  # successful ones
    fetch_seconds: float = 0.0  # of the successful ones
    exposed_tails: int = 0
    exposed_tail_seconds: float = 0.0
    failures: dict[str, int] = field(default_factory=dict[str, int])  # of fetches, by error code
    corrupt: int = 0  # frames refused, either side
    retries: int = 0  # fetches started again after a corrupt frame
    exports: int = 0
    expired_leases: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @property
    def total_sent(self) -> int:
        """Payload bytes over all lanes. Any thread."""
        return sum(dict(self.bytes_sent).values())

    @property
    def total_received(self) -> int:
        """Payload bytes over all lanes. Any thread."""
        return sum(dict(self.bytes_received).values())

    @property
    def total_failures(self) -> int:
        """Failed fetches of every code. Any thread."""
        return sum(dict(self.failures).values())

    def sent(self, lane: str, num_bytes: int) -> None:
        with self._lock:
            self.bytes_sent[lane] = self.bytes_sent.get(lane, 0) + num_bytes
            self.frames_sent += 1

    def received(self, lane: str, num_bytes: int) -> None:
        with self._lock:
            self.bytes_received[lane] = self.bytes_received.get(lane, 0) + num_bytes
            self.frames_received += 1

    def fetched(self, seconds: float) -> None:
        with self._lock:
            self.fetches += 1
            self.fetch_seconds += seconds

    def failed(self, code: str) -> None:
        with self._lock:
            self.failures[code] = self.failures.get(code, 0) + 1

    def tail(self, seconds: float) -> None:
        with self._lock:
            self.exposed_tails += 1
            self.exposed_tail_seconds += seconds

    def refused_frame(self) -> None:
        with self._lock:
            self.corrupt += 1

    def retried(self) -> None:
        with self._lock:
            self.retries += 1

    def exported(self) -> None:
        with self._lock:
            self.exports += 1

    def expired(self, count: int) -> None:
        with self._lock:
            self.expired_leases += count
