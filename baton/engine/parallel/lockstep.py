"""Lockstep: the ranks of a data-parallel group run their forwards at the same time.

Each rank has requests of its own, and the experts are spread over all ranks. So a forward on one
rank needs all ranks. A rank without rows takes part by an empty forward, in which only the sparse
layers exchange rows (exchange.py). The ranks share single forwards, not steps of their schedulers.

    asleep   no rank computes; every engine thread waits for its inbox, nothing is polled
    wave     a rank that has rows wakes the others (a datagram with the wave's number); rounds begin
    round    all ranks agree how many rows each has (one sum), then run one forward together
    end      a round without rows ends the wave, on all ranks at once

Waves are numbered. All ranks end a wave in the same round. So the next wave gets the same number
from whichever rank begins it, also if two ranks begin it at once. A datagram with the number of a
past wave is ignored.

Ranks stop together. A rank that wants to stop says so in each round, and its thread ends after the
round in which all ranks say it (EngineThread.stop). After an error the group cannot be used again,
and nothing is retried: ranks may have stopped at different collectives.
"""

from __future__ import annotations

import logging
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, Protocol

import torch

from baton.engine.parallel.group import RankGroup
from baton.engine.state.place import RankPlace
from baton.protocol.errors import InternalError

log = logging.getLogger(__name__)

_NUMBER: Final = struct.Struct("<Q")


class Wakes(Protocol):
    """How the ranks wake each other."""

    def call(self, wave: int) -> None:
        """Tell all other ranks that this wave has begun. Does not raise if a rank has ended."""
        ...

    def listen(self, heard: Callable[[int], None]) -> None:
        """Call `heard` with each wave that another rank begins, on a thread of its own."""
        ...


class Lockstep:
    """One rank's part in the waves. The callback `called` runs on another thread. `on_lost` may be
    called on any thread, the other methods on the thread that runs the model's forwards."""

    def __init__(self, group: RankGroup, wakes: Wakes) -> None:
        self.place = group.place
        self.rows: tuple[int, ...] = ()  # how many rows each rank has in the current round
        self.num_rounds = 0
        self.all_leave = False  # whether all ranks have said that they want to stop
        self._group = group
        self._wakes = wakes
        self._wave = 0  # the last wave in which this rank has taken part
        self._on = False  # whether that wave has not ended
        self._heard = 0  # the last wave that another rank has begun
        self._leaving = False
        self._lost = ""
        self._called: Callable[[], None] = _nothing
        self._end: Callable[[str], None] = _ignored
        self._empty_forward: Callable[[], None] = _nothing

    # ---- setup ----

    def start(self, called: Callable[[], None]) -> None:
        """Listen to the other ranks. `called` runs on another thread when one begins a wave."""
        self._called = called
        self._wakes.listen(self._hear)

    def set_empty_forward(self, forward: Callable[[], None]) -> None:
        """Set what this rank runs in a round in which only other ranks have rows."""
        self._empty_forward = forward

    def on_lost(self, callback: Callable[[str], None]) -> None:
        """Call `callback` once, with the reason, when the group is lost."""
        self._end = callback

    # ---- rounds ----

    @property
    def ended(self) -> bool:
        """Whether there will be no more rounds: all ranks have left, or the group is lost."""
        return self.all_leave or bool(self._lost)

    @property
    def wanted(self) -> bool:
        """Whether a wave is on, or another rank has begun one: then this rank must make rounds."""
        return not self._lost and (self._on or self._heard > self._wave)

    def begin(self, num_rows: int) -> None:
        """Make a round in which this rank has rows; the caller must run its forward next. Begins a
        wave if none is on. Raises InternalError if the group is lost."""
        if num_rows < 1:
            raise InternalError("a round of no rows is no forward's")
        with self.fatal():
            if not self.wanted:
                self._wakes.call(self._wave + 1)
            self._round(num_rows)

    def take_part(self) -> None:
        """Make a round without rows of this rank; run the empty forward if other ranks have rows.
        Raises InternalError if the group is lost."""
        with self.fatal():
            self._round(0)
            if self._on:
                self._empty_forward()

    def leave(self) -> None:
        """Say in every round from now on that this rank wants to stop. Begins a wave if none is on,
        so that the other ranks learn it. The group ends in the round in which all ranks say so."""
        self._leaving = True
        if not (self.wanted or self._lost):
            self._wakes.call(self._wave + 1)
            self._begin_wave()

    def _begin_wave(self) -> None:
        self._wave, self._on = self._wave + 1, True

    def _round(self, num_rows: int) -> None:
        if not self._on:
            self._begin_wave()
        votes = torch.zeros(self.place.size + 1, dtype=torch.int64)
        votes[self.place.rank], votes[-1] = num_rows, int(self._leaving)
        *rows, leaving = self._group.all_reduce(votes).tolist()
        self.rows = tuple(rows)
        self.num_rounds += 1
        self._on = any(rows)
        self.all_leave = leaving == self.place.size and not self._on

    def _hear(self, wave: int) -> None:
        self._heard = max(self._heard, wave)
        self._called()

    # ---- the end ----

    @contextmanager
    def fatal(self) -> Iterator[None]:
        """Mark the group as lost if anything inside raises; call `on_lost`'s callback and reraise.
        Raises InternalError if the group is lost already."""
        if self._lost:
            raise InternalError(f"the data-parallel group has ended: {self._lost}")
        try:
            yield
        except Exception as error:
            self._lost = str(error) or type(error).__name__
            log.exception("rank %d: the data-parallel group is lost", self.place.rank)
            self._end(self._lost)
            raise


class WakeSockets:
    """Implements Wakes by datagrams between Unix sockets, one socket per rank, all in one folder.
    Such datagrams are neither lost nor reordered. Life: made -> listen() -> close()."""

    def __init__(self, directory: Path, place: RankPlace) -> None:
        self._path = directory / _name(place.rank)
        self._others = [
            str(directory / _name(rank)) for rank in range(place.size) if rank != place.rank
        ]
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(self._path))
        self._thread: threading.Thread | None = None

    def call(self, wave: int) -> None:
        """See Wakes."""
        for other in self._others:
            with suppress(OSError):  # that rank has ended: the collective will fail
                self._socket.sendto(_NUMBER.pack(wave), other)

    def listen(self, heard: Callable[[int], None]) -> None:
        """See Wakes."""

        def run() -> None:
            while message := self._socket.recv(_NUMBER.size):
                heard(*_NUMBER.unpack(message))

        self._thread = threading.Thread(target=run, name="wakes", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the listening thread and remove this rank's socket. Idempotent."""
        if self._socket.fileno() < 0:
            return
        if self._thread is not None:
            with suppress(OSError):  # the folder is gone already
                self._socket.sendto(b"", str(self._path))
                self._thread.join()
        self._path.unlink(missing_ok=True)
        self._socket.close()


def _name(rank: int) -> str:
    return f"wake-{rank}"


def _nothing() -> None:
    pass


def _ignored(reason: str) -> None:
    pass
