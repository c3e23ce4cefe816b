"""The pairs that a lane keeps, and how two processes agree on the pair for a conversation.

    exporter                        fetcher
      WANTED             -->          takes an idle pair with us, or proposes a new one
                         <--          OFFER id (or nothing: no room)
      USE                -->          as offered | build it under this id | none
      STORE *            <->          STORE *             (building: a few addresses)

Either end may have closed a pair that the other still thinks idle: then they build a new one.
"""

from __future__ import annotations

import enum
import secrets
import threading
from collections import OrderedDict
from typing import Final

from baton.protocol.errors import KVCorrupt
from kv_transfer.lanes.pair_groups import EXPORTER, FETCHER, Groups, Pair
from kv_transfer.lanes.records import RecordSocket, Tag

PAIR_ID_BYTES: Final = 16


class Use(enum.IntEnum):
    """The exporter's answer to an offer."""

    NONE = 0
    AS_OFFERED = 1
    BUILD = 2


class Pairs:
    """All pairs of one lane, at most `limit`. Idle ones are kept; the oldest is closed first."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._idle: OrderedDict[bytes, tuple[str, Pair]] = OrderedDict()  # by id: (peer, pair)
        self._num_pairs = 0  # idle, in use, and being built
        self._num_built = 0
        self._closed = False

    @property
    def num_pairs(self) -> int:
        return self._num_pairs

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    @property
    def num_built(self) -> int:
        return self._num_built

    def take(self, pair_id: bytes) -> Pair | None:
        """Return the idle pair with that id, which the caller now owns; None if there is none."""
        with self._lock:
            entry = self._idle.pop(pair_id, None)
            return None if entry is None else entry[1]

    def take_with(self, peer: str) -> Pair | None:
        """Return the idle pair with `peer` that was used last; None if there is none. The caller
        owns it.
        """
        with self._lock:
            for pair_id in reversed(self._idle):
                if self._idle[pair_id][0] == peer:
                    return self._idle.pop(pair_id)[1]
        return None

    def reserve(self) -> bool:
        """Reserve room for one more pair, closing the oldest idle one if needed. False if there is
        no room.
        """
        with self._lock:
            if self._closed:
                return False
            if self._num_pairs < self._limit:
                self._num_pairs += 1
                return True
            if not self._idle:
                return False
            _, (_, oldest) = self._idle.popitem(last=False)
        oldest.close()
        return True

    def leave(self) -> None:
        """Give back the room of a pair that has been closed or was never built."""
        with self._lock:
            self._num_pairs -= 1

    def build(self, groups: Groups, control: RecordSocket, rank: int, pair_id: bytes) -> Pair:
        """Build a pair in the room that the caller has reserved. If this raises, the room is given
        back.
        """
        try:
            pair = Pair(pair_id, groups, groups.build(control, rank))
        except BaseException:
            self.leave()
            raise
        with self._lock:
            self._num_built += 1
        return pair

    def give_back(self, peer: str, pair: Pair) -> None:
        """Take back the pair of an ended conversation: keep it for the next one, or close it if it
        failed.
        """
        with self._lock:
            if pair.usable and not self._closed:
                self._idle[pair.id] = (peer, pair)
                return
        pair.close()
        self.leave()

    def close(self) -> None:
        """Close the idle pairs; those in use are closed when they are given back."""
        with self._lock:
            self._closed = True
            idle = [pair for _, pair in self._idle.values()]
            self._idle.clear()
            self._num_pairs -= len(idle)
        for pair in idle:
            pair.close()


def agree_as_exporter(pairs: Pairs, groups: Groups, control: RecordSocket) -> Pair | None:
    """Ask for a pair. Return None if big frames must travel as records.

    Raises KVLost, KVTimeout, KVCorrupt.
    """
    control.send(Tag.WANTED)
    offer = control.receive(groups.timeout_s)
    if offer.tag is not Tag.OFFER or len(offer.body) not in (0, PAIR_ID_BYTES):
        raise KVCorrupt(f"{offer.tag.name} of {len(offer.body)} bytes, not an offer of a pair")
    pair_id = bytes(offer.body)
    if not pair_id:
        return None
    pair = pairs.take(pair_id)
    if pair is not None:
        _send_use(control, Use.AS_OFFERED)
        return pair
    if not pairs.reserve():
        _send_use(control, Use.NONE)
        return None
    try:
        _send_use(control, Use.BUILD)
    except BaseException:
        pairs.leave()
        raise
    return pairs.build(groups, control, EXPORTER, pair_id)


def agree_as_fetcher(pairs: Pairs, groups: Groups, control: RecordSocket, peer: str) -> Pair | None:
    """Answer WANTED. Return a pair or None, and raise, as agree_as_exporter does."""
    idle = pairs.take_with(peer)
    if idle is None and not pairs.reserve():
        control.send(Tag.OFFER)
        return None
    pair_id = secrets.token_bytes(PAIR_ID_BYTES) if idle is None else idle.id
    try:
        control.send(Tag.OFFER, pair_id)
        use = _receive_use(control, groups.timeout_s)
        if use is Use.AS_OFFERED and idle is None:
            raise KVCorrupt("a pair that was never built")
    except BaseException:
        if idle is not None:
            idle.close()
        pairs.leave()
        raise
    if use is Use.BUILD:
        if idle is not None:
            idle.close()
        return pairs.build(groups, control, FETCHER, pair_id)
    if use is Use.NONE:
        if idle is not None:
            idle.close()
        pairs.leave()
        return None
    return idle


def _send_use(control: RecordSocket, use: Use) -> None:
    control.send(Tag.USE, bytes([use]))


def _receive_use(control: RecordSocket, timeout_s: float) -> Use:
    record = control.receive(timeout_s)
    if record.tag is not Tag.USE or len(record.body) != 1 or record.body[0] > max(Use):
        raise KVCorrupt(f"{record.tag.name}, not which pair to use")
    return Use(record.body[0])
