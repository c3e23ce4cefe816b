"""Counters of one connector, read by the metrics exporter: plain ints and floats, monotonic."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Final

from baton.protocol.events import KVFlow

MOST_PEERS: Final = 1024
MOST_TOLD: Final = 64  # flows in one heartbeat: some 5 kB
MOST_RECENT: Final = 64  # fetches of which the percentiles are
TOLD_S: Final = 10.0  # a flow is told for so long after its last fetch
NO_LANE: Final = "none"  # stands for the lane of an export that nobody has asked for


@dataclass(slots=True)
class LaneStats:
    """The counters of one lane. Bytes are payload.

    `fetches` counts those that succeeded; `fetch_seconds` is their time. `tail_seconds` sums, over
    `tails` acknowledged fetches, the time from "prefill complete" (or, for a late fetch, from its
    FETCH) to the ACK, as the exporter sees it; for a fetcher that adopts, to END, however long it
    then reads the pages. `expired` counts by the lane of the last FETCH.
    """

    bytes_sent: int = 0
    bytes_received: int = 0
    bytes_adopted: int = 0  # read where they lie: neither sent nor received
    frames_sent: int = 0
    frames_received: int = 0
    fetches: int = 0
    fetch_seconds: float = 0.0
    tails: int = 0
    tail_seconds: float = 0.0
    corrupt: int = 0  # frames refused by either side
    retries: int = 0  # fetches started again after a corrupt frame
    fallbacks: int = 0  # conversations that went on to the next lane
    connections: int = 0  # opened from here
    reused: int = 0  # conversations on a connection that was kept
    expired: int = 0  # exports whose lease ended before anybody released them
    state_bytes: int = 0  # of those received: recurrent state


@dataclass(slots=True)
class PeerFlow:
    """Fetches from one peer by one lane. `at`: when the last one ended, by the fetcher's clock."""

    at: float = 0.0
    num_bytes: int = 0
    transfers: int = 0
    faults: int = 0
    recent_ms: deque[float] = field(default_factory=lambda: deque[float](maxlen=MOST_RECENT))


@dataclass(slots=True)
class TransferStats:
    """The counters of a connector. Fields are read without the lock; only the methods write them,
    from any thread.
    """

    lanes: dict[str, LaneStats] = field(default_factory=dict[str, LaneStats])
    failures: dict[str, int] = field(default_factory=dict[str, int])  # of fetches, by error code
    exports: int = 0
    held_back: int = 0  # exports that found no room in the byte budget, counted at each look
    window_bytes: int = 0  # not fetched: no later token would have seen them
    # (boot id of the exporter, lane) -> the fetches from it, the least recent first
    peers: OrderedDict[tuple[str, str], PeerFlow] = field(
        default_factory=OrderedDict[tuple[str, str], PeerFlow]
    )
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def lane(self, name: str) -> LaneStats:
        """Return the counters of one lane. Whoever writes them must hold the lock."""
        found = self.lanes.get(name)
        return found if found is not None else self.lanes.setdefault(name, LaneStats())

    # ---- totals, any thread --------------------------------------------------------------------
    def _each(self) -> list[LaneStats]:
        return list(dict(self.lanes).values())

    @property
    def bytes_sent(self) -> dict[str, int]:
        """Bytes sent, by lane; lanes that sent nothing are left out."""
        return {name: s.bytes_sent for name, s in dict(self.lanes).items() if s.bytes_sent}

    @property
    def bytes_received(self) -> dict[str, int]:
        """Bytes received, by lane; lanes that received nothing are left out."""
        return {name: s.bytes_received for name, s in dict(self.lanes).items() if s.bytes_received}

    @property
    def total_sent(self) -> int:
        return sum(lane.bytes_sent for lane in self._each())

    @property
    def total_received(self) -> int:
        return sum(lane.bytes_received for lane in self._each())

    @property
    def total_adopted(self) -> int:
        return sum(lane.bytes_adopted for lane in self._each())

    @property
    def total_failures(self) -> int:
        """The number of failed fetches, of every error code."""
        return sum(dict(self.failures).values())

    @property
    def frames_sent(self) -> int:
        return sum(lane.frames_sent for lane in self._each())

    @property
    def frames_received(self) -> int:
        return sum(lane.frames_received for lane in self._each())

    @property
    def fetches(self) -> int:
        return sum(lane.fetches for lane in self._each())

    @property
    def fetch_seconds(self) -> float:
        return sum(lane.fetch_seconds for lane in self._each())

    @property
    def exposed_tails(self) -> int:
        return sum(lane.tails for lane in self._each())

    @property
    def exposed_tail_seconds(self) -> float:
        return sum(lane.tail_seconds for lane in self._each())

    @property
    def corrupt(self) -> int:
        return sum(lane.corrupt for lane in self._each())

    @property
    def retries(self) -> int:
        return sum(lane.retries for lane in self._each())

    @property
    def expired_leases(self) -> int:
        return sum(lane.expired for lane in self._each())

    # ---- what happened -------------------------------------------------------------------------
    def sent(self, lane: str, num_bytes: int) -> None:
        with self._lock:
            stats = self.lane(lane)
            stats.bytes_sent += num_bytes
            stats.frames_sent += 1

    def received(self, lane: str, num_bytes: int) -> None:
        with self._lock:
            stats = self.lane(lane)
            stats.bytes_received += num_bytes
            stats.frames_received += 1

    def state_received(self, lane: str, num_bytes: int) -> None:
        """Count bytes of recurrent state among those received."""
        with self._lock:
            self.lane(lane).state_bytes += num_bytes

    def adopted(self, lane: str, num_bytes: int) -> None:
        with self._lock:
            self.lane(lane).bytes_adopted += num_bytes

    def fetched(
        self, lane: str, seconds: float, peer: str, at: float, num_bytes: int, waited_s: float = 0.0
    ) -> None:
        """Count a fetch from `peer` (a boot id) that ended at the time `at`.

        `waited_s`: of its seconds, those in which the exporter still computed.
        """
        with self._lock:
            stats = self.lane(lane)
            stats.fetches += 1
            stats.fetch_seconds += seconds
            flow = self.peers[peer, lane] = self.peers.pop((peer, lane), None) or PeerFlow()
            flow.at = at
            flow.num_bytes += num_bytes
            flow.transfers += 1
            flow.recent_ms.append(max(0.0, seconds - waited_s) * 1000)
            if len(self.peers) > MOST_PEERS:
                self.peers.popitem(last=False)

    def peer_failed(self, peer: str, lane: str, at: float) -> None:
        """Count a fetch from `peer` (a boot id) that a lane could not make, at the time `at`."""
        with self._lock:
            flow = self.peers[peer, lane] = self.peers.pop((peer, lane), None) or PeerFlow()
            flow.at = at
            flow.faults += 1

    def flows(self, now: float) -> tuple[KVFlow, ...]:
        """Return the flows of the last seconds, the most recent ones if there are many."""
        with self._lock:
            recent = [each for each in self.peers.items() if now - each[1].at <= TOLD_S]
        return tuple(_told(*each) for each in recent[-MOST_TOLD:])

    def tail(self, lane: str, seconds: float) -> None:
        with self._lock:
            stats = self.lane(lane)
            stats.tails += 1
            stats.tail_seconds += seconds

    def refused_frame(self, lane: str) -> None:
        with self._lock:
            self.lane(lane).corrupt += 1

    def retried(self, lane: str) -> None:
        with self._lock:
            self.lane(lane).retries += 1

    def fell_back(self, lane: str, peer: str, at: float) -> None:
        """Count a conversation with `peer` (a boot id) that went on from `lane` to the next one at
        the time `at`: a fault of that lane."""
        with self._lock:
            self.lane(lane).fallbacks += 1
        self.peer_failed(peer, lane, at)

    def connected(self, lane: str, reused: bool) -> None:
        with self._lock:
            stats = self.lane(lane)
            stats.connections += not reused
            stats.reused += reused

    def failed(self, code: str) -> None:
        with self._lock:
            self.failures[code] = self.failures.get(code, 0) + 1

    def exported(self) -> None:
        with self._lock:
            self.exports += 1

    def expired(self, lane: str) -> None:
        with self._lock:
            self.lane(lane).expired += 1

    def no_room(self) -> None:
        with self._lock:
            self.held_back += 1

    def skipped(self, num_bytes: int) -> None:
        with self._lock:
            self.window_bytes += num_bytes


def _told(name: tuple[str, str], flow: PeerFlow) -> KVFlow:
    peer, lane = name
    times = sorted(flow.recent_ms) or [0.0]
    p50, p99 = (round(times[int(share * (len(times) - 1))], 3) for share in (0.5, 0.99))
    return KVFlow(peer, lane, flow.num_bytes, flow.transfers, flow.faults, p50, p99)
