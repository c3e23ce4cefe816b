"""A device that does what it must, as late and in as odd an order as it may.

Work is given to streams and is done when somebody waits for it, never before: work of one stream
in order, work of different streams in an order drawn by lot, but for the marks that it waits for.
Whoever reads without waiting, or lets work start too early, gets the bytes of before.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from kv_transfer.pool.staging import Mark, Places

COMPUTE = -1  # the stream of the engine


@dataclass(eq=False)
class Work:
    """One piece of work; done once its stream has come so far and all of `after` is done."""

    run: Callable[[], None]
    after: Sequence[Work] = ()
    done: bool = False


@dataclass
class FakeMark:
    """The work that must be done before the mark is reached."""

    device: FakeDevice
    work: Work

    def done(self) -> bool:
        with self.device.lock:
            return self.work.done

    def wait(self) -> None:
        self.device.run_until(self.work)


def nothing() -> None:
    """What a mark itself does."""


@dataclass(eq=False)
class FakeDevice:
    """staging.DeviceCopies over CPU tensors. `careless`: ignores what gather and scatter have to
    wait for, as a wrong device would. `lazy`: no lots, does what is waited for and nothing else."""

    seed: int
    careless: bool = False
    lazy: bool = False
    lock: threading.RLock = field(default_factory=threading.RLock)
    streams: dict[int, list[Work]] = field(default_factory=dict[int, list[Work]])
    num_gathered: int = 0
    num_held: int = 0  # times that the engine's stream was told to wait

    def __post_init__(self) -> None:
        self._draw = random.Random(self.seed)

    # ---- the device's own life ----
    def enqueue(self, stream: int, run: Callable[[], None], after: Sequence[Work] = ()) -> Work:
        with self.lock:
            work = Work(run, after)
            self.streams.setdefault(stream, []).append(work)
            return work

    def run_until(self, target: Work) -> None:
        """Do work that may be done, drawn by lot, until `target` is."""
        with self.lock:
            if self.lazy:
                self._force(target)
            while not target.done:
                ready = [
                    works[0]
                    for works in self.streams.values()
                    if works and all(work.done for work in works[0].after)
                ]
                assert ready, "the work waits for itself"
                self._do(self._draw.choice(ready))

    def finish(self) -> None:
        """Everything that was given is done."""
        with self.lock:
            while left := [works[-1] for works in self.streams.values() if works]:
                self.run_until(left[0])

    def _force(self, target: Work) -> None:
        if target.done:
            return
        for before in (*target.after, *self._before(target)):
            self._force(before)
        self._do(target)

    def _before(self, target: Work) -> list[Work]:
        works = next(works for works in self.streams.values() if target in works)
        return works[: works.index(target)]

    def _do(self, work: Work) -> None:
        for works in self.streams.values():
            if works and works[0] is work:
                del works[0]
        work.run()
        work.done = True

    # ---- DeviceCopies ----
    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        return torch.full((num_bytes,), 0xEE, dtype=torch.uint8)

    def mark(self) -> Mark:
        return FakeMark(self, self.enqueue(COMPUTE, nothing))

    def gather(
        self, lane: int, sources: Sequence[torch.Tensor], places: Places, host: torch.Tensor,
        after: Mark,
    ) -> Mark:  # fmt: skip
        def run() -> None:
            parts = [source[places.block, places.row].contiguous() for source in sources]
            host.copy_(torch.cat([part.view(torch.uint8).flatten() for part in parts]))
            self.num_gathered += 1

        return FakeMark(self, self.enqueue(lane, run, self._waits(after)))

    def scatter(
        self, lane: int, host: torch.Tensor, targets: Sequence[torch.Tensor], places: Places,
        after: Mark,
    ) -> Mark:  # fmt: skip
        def run() -> None:
            taken = 0
            for target in targets:
                shape = (len(places.row), *target.shape[2:])
                size = shape[0] * shape[1] * shape[2] * target.element_size()
                rows = host[taken : taken + size].clone().view(target.dtype).view(shape)
                target[places.block, places.row] = rows
                taken += size

        return FakeMark(self, self.enqueue(lane, run, self._waits(after)))

    def hold_compute(self, until: Mark) -> None:
        assert isinstance(until, FakeMark)
        self.num_held += 1
        self.enqueue(COMPUTE, nothing, (until.work,))

    def _waits(self, after: Mark) -> Sequence[Work]:
        assert isinstance(after, FakeMark)
        return () if self.careless else (after.work,)
