"""FlowBook: the KV that one node fetches from others, by its reports; rates of the last seconds."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from baton.protocol.clock import Clock
from baton.protocol.events import KVFlow

WINDOW_S: Final = 5.0
MOST_LOOKS: Final = 16
MOST_FLOWS: Final = 128  # of one node


@dataclass(frozen=True, slots=True)
class FlowRate:
    """What a node fetches from `peer` (its boot id) by one lane, per second of the last seconds.
    `faults`: in these seconds. Milliseconds are of the last fetches."""

    peer: str
    lane: str
    bytes_per_s: float
    transfers_per_s: float
    faults: int
    ms_p50: float | None
    ms_p99: float | None


class FlowBook:
    """The reports of one session. The node reports with its heartbeats, while a flow is recent."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._looks: dict[tuple[str, str], deque[tuple[float, KVFlow]]] = {}

    def clear(self) -> None:
        self._looks.clear()

    def note(self, flows: Sequence[KVFlow]) -> None:
        """Take a node's report."""
        now = self._clock.monotonic()
        for flow in flows:
            name = flow.peer, flow.lane
            looks = self._looks.pop(name, None)
            if looks is None:  # what is told first has happened just now
                looks = deque([(now - 1.0, KVFlow(*name))], maxlen=MOST_LOOKS)
            self._looks[name] = looks
            looks.append((now, flow))
            while len(looks) > 2 and now - looks[1][0] > WINDOW_S:
                looks.popleft()
        while len(self._looks) > MOST_FLOWS:
            del self._looks[next(iter(self._looks))]

    def rates(self) -> Iterator[FlowRate]:
        """Yield the flows of the last seconds."""
        now = self._clock.monotonic()
        for (peer, lane), looks in self._looks.items():
            (start, before), (end, after) = looks[0], looks[-1]
            moved = after.transfers - before.transfers or after.faults - before.faults
            if now - end > WINDOW_S or not moved:
                continue
            seconds = max(end - start, 0.1)
            measured = after.transfers > 0
            yield FlowRate(
                peer,
                lane,
                bytes_per_s=round((after.num_bytes - before.num_bytes) / seconds),
                transfers_per_s=round((after.transfers - before.transfers) / seconds, 2),
                faults=after.faults - before.faults,
                ms_p50=after.ms_p50 if measured else None,
                ms_p99=after.ms_p99 if measured else None,
            )
