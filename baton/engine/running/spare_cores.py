"""SpareCores: a step also runs on cores of other nodes of its host that wait for work.

On one host each node has its own cores. While a prefill node computes the only prompt, the decode
node has nothing to do, and the other way round. The owner of cores tells when it waits for work
(CoreBoard); whoever may use them looks before each step. So a step that is under way when the
owner begins keeps the core, shared with the owner, until it ends. Each core has one such user at
most (deploy/plan.py), so two never take the same.

A core whose owner is idle may still be another program's. All threads of a step wait for the
slowest, so such a core is worse than none. If the threads there wait for their core for more than
MOST_WAITING of the time in which they could run, no spare core is used for a while, which doubles
each time.

Nor is a core of use to a short step: its threads would have to be woken for each, and the router,
which works for each token, may have the core of a prefill node. So steps of a few milliseconds that
compute few tokens of prompts stay on the own cores.

Torch's operations may add up numbers in another order with more threads, so a step with an exact
request (baton/engine/core/replay.py) stays on the own cores. Baton's own kernels do not.

A decode node's event loop, and gRPC's thread beside it, work for each token. On the core of the
next step they make that step wait. So while short steps stay on the own cores, these threads may
also run on the spare ones. Linux chooses. They come back with the first step after the owner has
begun, and when this node waits for work.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import torch

from baton.engine.config import EngineConfig
from baton.engine.kernels.cpu.library import CpuKernels, kernels
from baton.protocol.clock import Clock, SystemClock
from baton.protocol.errors import ConfigError
from baton.runtime.cores import MOST_CORES, CoreBoard, parse_cores

logger = logging.getLogger(__name__)
MOST_WAITING: Final = 0.2
LEAST_STEP_S: Final = 0.005  # on one core; measured with models of 25 and 600 million parameters
LEAST_TOKENS: Final = 32
SHORTEST_PAUSE_S: Final = 0.5
LONGEST_PAUSE_S: Final = 16.0


class Team(threading.local):
    """The team of one thread: on which spare cores it is, and what its threads there have run
    and waited for their cores, in nanoseconds."""

    cores: tuple[int, ...] = ()
    schedstats: tuple[int, ...] = ()  # descriptors of /proc/.../schedstat
    ran: int = 0
    waited: int = 0

    def place(self, cores: tuple[int, ...], threads: Sequence[int]) -> None:
        """Note the cores, and Linux' ids of the threads there."""
        for old in self.schedstats:
            os.close(old)
        self.schedstats = ()  # also if one of the new ones cannot be opened
        self.cores = cores
        paths = [f"/proc/self/task/{thread}/schedstat" for thread in threads]
        self.schedstats = tuple([os.open(path, os.O_RDONLY | os.O_CLOEXEC) for path in paths])
        self.ran, self.waited = self.times()

    def share_of_waiting(self) -> float:
        """Return how long the threads have waited since the last call, over running and waiting."""
        before, (self.ran, self.waited) = (self.ran, self.waited), self.times()
        ran, waited = self.ran - before[0], self.waited - before[1]
        return waited / (ran + waited) if waited else 0.0

    def times(self) -> tuple[int, int]:
        told = [os.pread(each, 64, 0).split() for each in self.schedstats]
        return sum(int(each[0]) for each in told), sum(int(each[1]) for each in told)


class SpareCores:
    """`own`: the cores of this process. `others`: those that it alone may use while they are spare.

    `num_steps`: steps that ran on spare cores. `share`: all cores of the newest step over the
    own ones. `step_s`: how long steps last of late, times `share`; whoever runs them writes it.
    rest() is for the engine's thread, take() for the thread that runs a step.
    """

    def __init__(
        self,
        board: CoreBoard,
        own: Sequence[int],
        others: Sequence[int],
        kernels: CpuKernels,
        clock: Clock | None = None,
    ) -> None:
        self._board = board
        self._own = tuple(own)
        self._others = tuple(others)
        self._kernels = kernels
        self._clock = clock or SystemClock()
        self._team = Team()
        self._roamers: frozenset[int] = frozenset()  # Linux' ids of threads
        self._roam_on: tuple[int, ...] = ()  # which spare cores
        self._pause_s = SHORTEST_PAUSE_S
        self._not_before = 0.0  # monotonic seconds
        self.num_steps = 0
        self.share = 1.0
        self.step_s = 0.0

    @classmethod
    def of(cls, config: EngineConfig, device: torch.device) -> SpareCores | None:
        """Return those that the config names, for a model on `device`; None if it names none, or
        without the compiled kernels.

        Raises ConfigError.
        """
        if config.core_board is None or config.spare_cores is None:
            return None
        own = sorted(os.sched_getaffinity(0))
        others = parse_cores(config.spare_cores, "spare_cores")
        refused = ""
        if device.type != "cpu":
            refused = "the model is not on the CPU"
        elif torch.get_num_threads() != len(own):
            refused = f"a process of {len(own)} cores needs as many threads"
        elif shared := set(own) & set(others):
            refused = f"this process has {sorted(shared)} itself"
        elif max(*own, *others) >= MOST_CORES:
            refused = f"a board has places for cores below {MOST_CORES}"
        if refused:
            raise ConfigError(f"spare_cores: {refused}", field="spare_cores")
        board, found = CoreBoard(Path(config.core_board), own), kernels()
        if found is None:
            logger.warning("no spare cores are used: that takes the compiled kernels")
            return None
        return cls(board, own, others, found)

    def let_roam(self, threads: Iterable[int]) -> None:
        """Let `threads` (Linux' ids), which compute nothing, also run on spare cores that are idle
        as a step begins. Before the first step."""
        self._roamers = frozenset(threads)

    def rest(self, *, resting: bool) -> None:
        """Tell whether this node waits for work."""
        if resting:
            self._roam(())
        self._board.tell(idle=resting)

    def give_back(self) -> None:
        """Let the calling thread compute on the own cores alone."""
        self._use(())

    def take(self, num_prefill_tokens: int = 0, *, exact: bool = False) -> None:
        """Let the calling thread run a step on the own cores, and on the others that are idle now.

        The step computes `num_prefill_tokens` tokens of prompts. `exact`: it has a row of an exact
        request, which is computed on as many cores each time.
        """
        idle = self._board.idle(self._others)
        lasts = num_prefill_tokens >= LEAST_TOKENS or self.step_s >= LEAST_STEP_S
        cores = self._use(idle if lasts and not exact and self._are_free(idle) else ())
        self._roam(() if cores else idle)
        self.num_steps += bool(cores)
        self.share = 1 + len(cores) / len(self._own)

    def _roam(self, spare: tuple[int, ...]) -> None:
        """Let the roaming threads run on the own cores and on `spare`."""
        if not self._roamers or spare == self._roam_on:
            return
        before, now = {*self._own, *self._roam_on}, {*self._own, *spare}
        for thread in map(int, os.listdir("/proc/self/task")):
            with suppress(OSError):  # it has ended, or may not use these cores
                # Whoever was started by a roaming thread has its cores.
                started = self._roam_on and os.sched_getaffinity(thread) == before
                if started or thread in self._roamers:
                    os.sched_setaffinity(thread, now)
        self._roam_on = spare

    def _are_free(self, idle: Collection[int]) -> bool:
        """Whether other programs leave the `idle` cores alone, as far as is known."""
        now = self._clock.monotonic()
        if self._team.cores and self._team.cores == idle:  # else their owner may have been in it
            crowded = self._team.share_of_waiting() > MOST_WAITING
            self._not_before = now + self._pause_s if crowded else now
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S) if crowded else SHORTEST_PAUSE_S
        return now >= self._not_before

    def _use(self, cores: tuple[int, ...]) -> tuple[int, ...]:
        if cores == self._team.cores:
            return cores
        try:
            self._team.place(cores, self._kernels.place_team(self._own, cores) if cores else ())
        except OSError as error:
            logger.warning("the cores %s cannot be used: %s", cores, error)
            cores = self._others = ()
            self._team.place((), ())
        torch.set_num_threads(len(self._own) + len(cores))
        return cores
