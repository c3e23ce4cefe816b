"""torch.distributed groups of two processes, made on demand, without a default group.

Life of a pair: both ends build it through a store that lives in their control connection (no second
port, no server). One conversation at a time uses it; between two it is idle. It is closed when
another pair needs its place, or killed at the first error. A wait that timed out has closed the
group's sockets (gloo) or left a kernel behind (NCCL), so a killed pair is never used again.

`gloo` sends from host memory; `nccl` is the same code with a staging tensor on the device.
"""

from __future__ import annotations

import logging
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroupGloo, Store

from baton.protocol.clock import SystemClock
from baton.protocol.errors import KVCorrupt, KVError, KVLost, KVTimeout
from kv_transfer.lanes.deadlines import Deadlines
from kv_transfer.lanes.records import MAX_RECORD, RecordSocket, Tag
from kv_transfer.protocol.frames import Buffer

log = logging.getLogger(__name__)

Backend: TypeAlias = Literal["gloo", "nccl"]

MAX_STORE_ENTRIES: Final = 64  # a rendezvous of two ranks needs a handful
DEPTH: Final = 2  # frames under way in one pair: one travels while the next is built
EXPORTER: Final = 0  # ranks of the two processes
FETCHER: Final = 1
_KEY: Final = struct.Struct("<H")


class ControlStore(Store):
    """A rendezvous store for two processes: what one end sets, the other can get.

    `get` and `wait` read the control connection, so only the thread that owns it may call them.
    """

    def __init__(self, control: RecordSocket, timeout_s: float) -> None:
        super().__init__()
        self._control = control
        self._timeout_s = timeout_s
        self._entries: dict[str, bytes] = {}

    def set(self, key: str, value: bytes | str) -> None:
        # some versions of torch pass bytes as a str of latin-1 characters
        data = value.encode("latin1") if isinstance(value, str) else bytes(value)
        self._entries[key] = data
        name = key.encode()
        self._control.send(Tag.STORE, _KEY.pack(len(name)) + name + data)

    def get(self, key: str) -> bytes:
        while key not in self._entries:
            self._receive()
        return self._entries[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self.get(key)

    def check(self, keys: list[str]) -> bool:
        return all(key in self._entries for key in keys)

    def _receive(self) -> None:
        record = self._control.receive(self._timeout_s)
        if record.tag is not Tag.STORE or len(record.body) < _KEY.size:
            raise KVCorrupt(f"{record.tag.name} in the middle of a rendezvous")
        (length,) = _KEY.unpack_from(record.body)
        if len(self._entries) >= MAX_STORE_ENTRIES:
            raise KVCorrupt("too many rendezvous entries")
        name = bytes(record.body[_KEY.size : _KEY.size + length])
        self._entries[name.decode(errors="replace")] = bytes(record.body[_KEY.size + length :])


@dataclass(frozen=True, slots=True)
class Group:
    """A process group and the Python half of its store, which must live as long as the group."""

    process_group: Any
    store: ControlStore


@dataclass(frozen=True, slots=True)
class Groups:
    """How this process builds groups. `host`: the local address that gloo binds."""

    backend: Backend
    host: str
    timeout_s: float
    deadlines: Deadlines = field(default_factory=lambda: Deadlines(SystemClock()))

    def build(self, control: RecordSocket, rank: int) -> Group:
        """Return a group of two; the other end builds the other rank at the same time.

        Raises KVLost, KVTimeout, KVCorrupt.
        """
        store = ControlStore(control, self.timeout_s)
        timeout = timedelta(seconds=self.timeout_s)
        try:
            with self.deadlines.guard(self.timeout_s, control.break_):
                if self.backend == "nccl":
                    return Group(_nccl(store, rank, timeout), store)
                return Group(_gloo(store, rank, timeout, self.host), store)
        except KVError:
            raise
        except (RuntimeError, ValueError) as error:
            raise KVLost(f"no {self.backend} pair: {error}") from error


def _gloo(store: Store, rank: int, timeout: timedelta, host: str) -> Any:
    options: Any = ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
    options._timeout = timeout
    options._threads = 1  # threads for collectives, which a pair does not use
    options._devices = [ProcessGroupGloo.create_device(hostname=host, lazy_init=False)]
    return ProcessGroupGloo(store, rank, 2, options)


def _nccl(store: Store, rank: int, timeout: timedelta) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, rank, 2, options)


class Pair:
    """One group and its staging memory.

    One conversation uses it at a time, on one thread; any thread may call `kill`.
    """

    def __init__(self, pair_id: bytes, groups: Groups, group: Group) -> None:
        self.id = pair_id
        self._groups = groups
        self._group: Group | None = group
        self._killed = threading.Event()
        cuda = groups.backend == "nccl"
        shape = (DEPTH, MAX_RECORD)
        self._host = torch.empty(shape, dtype=torch.uint8, pin_memory=cuda)
        self._wire = torch.empty(shape, dtype=torch.uint8, device="cuda") if cuda else self._host
        self._views = [row.numpy().data for row in self._host]
        self._turn = 0
        self._sending: deque[Any] = deque()
        self._expected: deque[tuple[Any, int, int]] = deque()  # work, turn, size

    @property
    def usable(self) -> bool:
        """True if the pair has had no error and no frame is under way."""
        return not (self._killed.is_set() or self._sending or self._expected)

    @property
    def num_expected(self) -> int:
        """The number of tensors that `receive` will return."""
        return len(self._expected)

    def buffer(self) -> memoryview:
        """Return memory in which the next frame may be built, so that `send` copies nothing.

        Waits until the frame that was last sent from there has gone.
        """
        if len(self._sending) == DEPTH:
            self._finish(self._sending.popleft())
        return self._views[self._turn]

    def send(self, frame: Buffer) -> None:
        """Send a frame to rank 1; return while it travels. Raises KVLost, KVTimeout."""
        size = len(frame)
        buffer = self.buffer()
        if not _lies_in(frame, buffer):
            buffer[:size] = frame
        turn, self._turn = self._turn, (self._turn + 1) % DEPTH
        wire = self._wire[turn, :size]
        if self._wire is not self._host:
            wire.copy_(self._host[turn, :size])
        self._sending.append(self._run(lambda: self._process_group.send([wire], FETCHER, 0)))

    def flush(self) -> None:
        """Wait until the peer has taken every frame. Raises KVLost, KVTimeout."""
        while self._sending:
            self._finish(self._sending.popleft())

    def expect(self, size: int) -> None:
        """Begin to receive the next tensor, which has `size` bytes. Raises KVLost."""
        turn, self._turn = self._turn, (self._turn + 1) % DEPTH
        wire = self._wire[turn, :size]
        work = self._run(lambda: self._process_group.recv([wire], EXPORTER, 0))
        self._expected.append((work, turn, size))

    def receive(self) -> memoryview:
        """Return the oldest expected tensor, valid until the next call. Raises the errors of
        `send`.
        """
        work, turn, size = self._expected.popleft()
        self._finish(work)
        if self._wire is not self._host:
            self._host[turn, :size].copy_(self._wire[turn, :size])
        return self._views[turn][:size].toreadonly()

    def kill(self) -> None:
        """Let nothing more travel over this pair. Any thread.

        An NCCL wait ends at once; a gloo wait ends when the peer closes or its own timeout passes.
        """
        if not self._killed.is_set():
            self._killed.set()
            if self._groups.backend == "nccl" and self._group is not None:
                self._group.process_group.abort()

    def close(self) -> None:
        """Close the sockets; waits of the peer fail. Only the thread that uses the pair may call
        this.
        """
        self.kill()
        self._sending.clear()
        self._expected.clear()
        self._group = None

    @property
    def _process_group(self) -> Any:
        if self._group is None:
            raise KVLost("the pair is closed")
        return self._group.process_group

    def _finish(self, work: Any) -> None:
        def wait() -> None:
            work.wait(timedelta(seconds=self._groups.timeout_s))
            if self._groups.backend == "nccl":
                torch.cuda.current_stream().synchronize()

        self._run(wait)

    def _run(self, operation: Callable[[], Any]) -> Any:
        if self._killed.is_set():
            raise KVLost("the pair is closed")
        started = time.monotonic()
        try:
            with self._groups.deadlines.guard(self._groups.timeout_s, self.kill):
                return operation()
        except RuntimeError as error:
            self.kill()
            if time.monotonic() - started >= 0.9 * self._groups.timeout_s:
                raise KVTimeout("the peer of the pair does not move") from error
            raise KVLost(f"pair broken: {error}") from error


def _lies_in(frame: Buffer, buffer: memoryview) -> bool:
    return isinstance(frame, memoryview) and frame.obj is buffer.obj
