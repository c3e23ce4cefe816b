"""Ranks: the processes of the other tensor-parallel ranks, which the leader's process starts.

Life: start() -> each rank reads its share of the weights, the leader too -> await_loaded() ->
make_pool(): make the shared memory and connect all ranks -> send() for every step -> close().
If a rank dies or a collective fails, the group is lost: the reason is logged, every rank is killed,
`on_lost` is called, and every later send raises. Nothing is retried, as ranks may have stopped at
different places. If the leader dies, its sockets close, and that ends the other ranks.
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Protocol, TypeAlias

from torch._C._distributed_c10d import FileStore

from baton.engine.config import EngineConfig
from baton.engine.parallel.group import DEADLINE_S, RankGroup
from baton.engine.parallel.messages import Gone, Link, MessageKind
from baton.engine.parallel.pool import GroupArena, SharedMemory, make_memory
from baton.engine.state.interface import ModelInfo
from baton.engine.state.place import RankPlace
from baton.protocol.errors import ConfigError, InternalError
from baton.runtime import log as logs
from baton.runtime.socket_folder import SocketFolder

log = logging.getLogger(__name__)

LOAD_DEADLINE_S: Final = 1800.0  # until all ranks have read their weights
STOP_S: Final = 10.0  # until a rank that was asked to end is killed
DEATH_S: Final = 1.0  # how long a failed collective waits for the death of a rank that explains it
MODULE: Final = "baton.engine.running.worker"
MEETING_PREFIX: Final = "baton-ranks-"  # names of the ranks' folders in the temporary directory


class Process(Protocol):
    """The part of subprocess.Popen that Ranks uses."""

    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def kill(self) -> None: ...


@dataclass(frozen=True, slots=True)
class RankProcess:
    """One rank other than the leader."""

    rank: int
    process: Process
    link: Link


@dataclass(frozen=True, slots=True)
class RankStart:
    """What a rank is started with. `directory`: the folder where the ranks meet. `memory`: the
    descriptor of the memory of their pools."""

    config: EngineConfig
    place: RankPlace
    directory: str
    memory: int

    def setup(self) -> dict[str, object]:
        """Return the content of the SETUP message."""
        return {
            "config": asdict(self.config),
            "rank": self.place.rank,
            "directory": self.directory,
            "threads": threads_of(self.config),
            "cores": cores_of(self.place),
            "log_level": logging.getLevelName(log.getEffectiveLevel()).lower(),
            "log_format": logs.current_format(),
            "deadline_s": DEADLINE_S,
        }


StartRank: TypeAlias = Callable[[RankStart], RankProcess]


class Ranks:
    """The leader's view of its group. One thread calls `send` and `make_pool`; any thread may call
    the other methods."""

    def __init__(
        self,
        group: RankGroup,
        processes: Sequence[RankProcess],
        meeting: SocketFolder,
        memory: int,
    ) -> None:
        self._group = group
        self.processes = tuple(processes)
        self._meeting = meeting
        self._memory: int | None = memory
        # Reentrant: a garbage collection may call close() on a thread that holds the lock; see
        # load_leader.
        self._lock = threading.RLock()
        self._died = threading.Event()
        self._lost = ""
        self._closing = False
        self._on_lost: Callable[[], None] | None = None
        self._watchers = [
            threading.Thread(
                target=self._watch, args=(each,), name=f"rank-{each.rank}", daemon=True
            )
            for each in self.processes
        ]
        for watcher in self._watchers:
            watcher.start()

    @staticmethod
    def start(config: EngineConfig, group: RankGroup, start_rank: StartRank) -> Ranks:
        """Start the processes of all ranks except the leader. `group`: the leader's end.

        Raises ConfigError if a process cannot be started.
        """
        size, memory = config.tensor_parallel_size, make_memory()
        meeting = SocketFolder(MEETING_PREFIX)
        processes: list[RankProcess] = []
        try:
            while len(processes) + 1 < size:
                place = RankPlace(len(processes) + 1, size)
                processes.append(start_rank(RankStart(config, place, str(meeting.path), memory)))
        except (OSError, Gone) as error:
            Ranks(group, processes, meeting, memory).close()
            raise ConfigError(
                f"a tensor-parallel rank cannot be started: {error}", field="tensor_parallel_size"
            ) from error
        return Ranks(group, processes, meeting, memory)

    def on_lost(self, callback: Callable[[], None]) -> None:
        """Call `callback` once, on any thread, when the group is lost; call it now if the group is
        lost already."""
        with self._lock:
            self._on_lost = callback
            lost = bool(self._lost)
        if lost:
            callback()

    def await_loaded(self) -> None:
        """Wait until every rank has its weights. Raises ConfigError with the reason of a rank that
        cannot load, InternalError if a rank has died."""
        gone: InternalError | None = None
        for each in self.processes:
            try:
                kind, values = self._expect(each, MessageKind.LOADED, MessageKind.FAILED)
            except InternalError as error:
                gone = gone or error  # a later rank may have failed and know the reason
                continue
            if kind is MessageKind.FAILED:
                raise ConfigError(f"rank {each.rank}: {values['message']}", field=values["field"])
        if gone is not None:
            raise gone

    @property
    def size(self) -> int:
        """The number of ranks, the leader included."""
        return self._group.place.size

    def make_pool(
        self, info: ModelInfo, num_blocks: int, block_size: int, states: tuple[int, int] = (0, 0)
    ) -> GroupArena:
        """Make the KV pools of all ranks and connect the ranks. `states`: how many slots for
        recurrent states, and checkpoints of them, each rank gets. Raises InternalError."""
        if self._memory is None:
            raise InternalError("the ranks have their pools already")
        blocks, group = (num_blocks, block_size), self._group
        memory = SharedMemory(self._memory, group.place, blocks, info.layers, info.kv_dtype, states)
        pool = {"num_blocks": num_blocks, "block_size": block_size, "states": states}
        with self.fatal():
            for each in self.processes:
                each.link.send_json(MessageKind.POOL, pool)
            group.connect(store(str(self._meeting.path), group.place.size))
            for each in self.processes:
                self._expect(each, MessageKind.READY)
                each.link.limit(DEADLINE_S)
        os.close(self._memory)
        self._memory = None
        return GroupArena(memory, info.layers, info.kv_dtype)

    def send(self, kind: MessageKind, body: bytes = b"") -> None:
        """Send a message to every other rank. Raises InternalError if the group is lost, Gone if a
        rank does not read."""
        if self._lost or self._closing:
            raise InternalError(f"the tensor-parallel group has ended: {self._lost or 'closed'}")
        for each in self.processes:
            each.link.send(kind, body)

    @contextmanager
    def fatal(self) -> Iterator[None]:
        """Mark the group as lost if anything inside raises, and reraise; Gone becomes
        InternalError."""
        try:
            yield
        except Gone as error:
            self._died.wait(DEATH_S)
            self.lose("a rank does not listen")
            raise InternalError("a tensor-parallel rank does not listen") from error
        except Exception as error:
            self._died.wait(DEATH_S)
            self.lose(str(error))
            raise

    def lose(self, reason: str) -> None:
        """Mark the group as lost for `reason`: kill all ranks and call `on_lost`'s callback.
        Idempotent."""
        with self._lock:
            if self._lost or self._closing:
                return
            ended = [
                f"rank {each.rank} has ended with status {status}"
                for each in self.processes
                if (status := each.process.poll()) is not None
            ]
            self._lost = "; ".join(dict.fromkeys([*ended, reason]))
            callback = self._on_lost
        log.error("tensor-parallel group lost, all ranks end: %s", self._lost)
        for each in self.processes:
            each.process.kill()
        if callback is not None:
            callback()

    def close(self) -> None:
        """End all ranks and wait for them. Idempotent."""
        with self._lock:
            self._closing = True
        for each in self.processes:
            each.link.close()
        for each in self.processes:
            try:
                each.process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                each.process.kill()
        for watcher in self._watchers:
            if watcher is not threading.current_thread():
                watcher.join()
        if self._memory is not None:
            os.close(self._memory)
            self._memory = None
        self._meeting.remove()

    def _expect(self, each: RankProcess, *kinds: MessageKind) -> tuple[MessageKind, dict[str, str]]:
        try:
            return each.link.expect(*kinds)
        except Gone as error:
            raise InternalError(
                f"rank {each.rank} has ended while it was starting; its log says why"
            ) from error

    def _watch(self, each: RankProcess) -> None:
        status = each.process.wait()
        self._died.set()
        self.lose(f"rank {each.rank} has ended with status {status}")


def store(directory: str, size: int) -> FileStore:
    """Return the store through which the ranks connect: a file in a folder of this group alone. It
    needs no port."""
    return FileStore(str(Path(directory) / "store"), size)


def threads_of(config: EngineConfig) -> int:
    """Return how many threads each rank uses: its share of what the whole engine may use."""
    total = config.threads or len(os.sched_getaffinity(0))
    return max(1, total // config.tensor_parallel_size)


def cores_of(place: RankPlace) -> list[int]:
    """Return the cores that a rank uses alone. The list is empty if there are fewer cores than
    ranks. It is also empty if this process may use all cores of the host: other processes use them
    too then, and the kernel balances better."""
    allowed = sorted(os.sched_getaffinity(0))
    if len(allowed) == os.cpu_count():
        return []
    return [allowed[index] for index in place.share(len(allowed))]


def start_process(start: RankStart) -> RankProcess:
    """Start a rank as a process and send it SETUP. Raises OSError, Gone."""
    started = start_module(start.place.rank, (MODULE,), start.setup(), (start.memory,))
    started.link.limit(LOAD_DEADLINE_S)
    return started


def start_module(
    rank: int, command: Sequence[str], setup: dict[str, Any], descriptors: Sequence[int] = ()
) -> RankProcess:
    """Start `python -m` with `command`, the descriptor of a socket to this process, and further
    `descriptors` that the rank gets; send it SETUP with `setup`. Raises OSError, Gone."""
    ours, theirs = socket.socketpair()
    with theirs:
        passed = (theirs.fileno(), *descriptors)
        process = subprocess.Popen(
            [sys.executable, "-m", *command, *map(str, passed)],
            stdin=subprocess.DEVNULL,
            stdout=2,  # the first rank's own stdout carries its READY line
            pass_fds=passed,
        )
    link = Link(ours)
    link.send_json(MessageKind.SETUP, setup)
    return RankProcess(rank, process, link)
