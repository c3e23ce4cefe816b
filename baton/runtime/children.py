"""Work that may run away, done in processes that can be given up.

A call in native code can take minutes or gigabytes, and no thread can leave it: building a grammar
(`multipleOf: 9999991`), spelling a list that holds itself twice, forty times over. So such work is
done in a child (baton/runtime/child.py), which ends when it has used its seconds of CPU or its
bytes: then that question has failed, and the next one gets a new child. Children are started when
needed, kept, and end with this process.

`Children` is for threads; each thread that asks has a child of its own meanwhile.
"""

from __future__ import annotations

import contextlib
import enum
import fcntl
import os
import select
import signal
import subprocess
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from time import monotonic
from typing import IO, Final

from baton.protocol.errors import InternalError
from baton.runtime.child import HEAD_BYTES

START_S: Final = 30.0  # of a child: to import what it needs
MAX_USES: Final = 1000  # of one child: whatever it hoards goes with it
PIPE_BYTES: Final = 1 << 20  # the most that everybody may have: fewer turns between processes


class Excess(enum.Enum):
    """What a child ran out of. TIME is not the question's fault: the child used little CPU, so
    that this machine was busy, or somebody killed it."""

    CPU = "cpu"
    MEMORY = "memory"
    TIME = "time"


class GivenUp(Exception):
    """The child did not answer; `excess` says why."""

    def __init__(self, excess: Excess) -> None:
        super().__init__(excess.value)
        self.excess = excess


@dataclass(frozen=True, slots=True)
class ChildBudget:
    """What one question may cost: seconds of CPU, bytes that its process may hold in all, and the
    seconds after which a child that does not answer, on a machine with other work, is given up."""

    cpu_s: float = 1.0
    memory_bytes: int = 1 << 30
    wall_s: float = 10.0


class Children:
    """`command` starts a child, which gets seconds of CPU and bytes as its last two arguments.
    `close` twice is safe."""

    def __init__(self, command: Sequence[str], budget: ChildBudget) -> None:
        self.num_started = 0
        self.num_given_up = 0
        self.command = command
        self._budget = budget
        self._lock = threading.Lock()
        self._idle: list[_Child] = []
        self._closed = False
        # For owners that forget to close: no child outlives its interest.
        weakref.finalize(self, _end_all, self._idle)

    def ask(self, question: bytes) -> bytes:
        """The answer, from any thread. Raises GivenUp, InternalError where no child can start."""
        child = self._child()
        try:
            answer = child.ask(question, self._budget.wall_s)
        except BaseException as error:
            child.end()
            if isinstance(error, GivenUp):
                self.num_given_up += 1
            raise
        self._give_back(child)
        return answer

    def prepare(self) -> None:
        """Start a child if none is idle: the first question need not wait for that."""
        child = self._child()
        with self._lock:
            self._idle.append(child)

    def close(self) -> None:
        """End the children; those at work end when they are given back."""
        with self._lock:
            self._closed = True
            _end_all(self._idle)

    def _child(self) -> _Child:
        while True:
            with self._lock:
                child = self._idle.pop() if self._idle else None
            if child is None:
                self.num_started += 1
                return _Child(self.command, self._budget)
            if child.alive:
                return child
            child.end()  # whoever ended it, it was not the next question

    def _give_back(self, child: _Child) -> None:
        child.uses += 1
        with self._lock:
            if not self._closed and child.uses < MAX_USES:
                self._idle.append(child)
                return
        child.end()


class _Child:
    """One process, asked one question at a time."""

    def __init__(self, command: Sequence[str], budget: ChildBudget) -> None:
        """Starts it and waits until it is ready. Raises InternalError where it cannot start,
        GivenUp where that takes too long."""
        self.uses = 0
        limits = (str(budget.cpu_s), str(budget.memory_bytes))
        self._process = subprocess.Popen(
            [*command, *limits],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # a ^C is for whoever owns it
        )
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                fcntl.fcntl(_pipe(pipe), fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        os.set_blocking(_pipe(self._process.stdin).fileno(), False)
        try:
            self._answer(monotonic() + START_S)
        except GivenUp as error:
            self.end()
            if error.excess is Excess.TIME:
                raise
            message = f"no process of {' '.join(command[1:3])} could start"
            raise InternalError(message) from error

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, question: bytes, within_s: float) -> bytes:
        """Its answer. Raises GivenUp; it is of no use then."""
        deadline = monotonic() + within_s
        self._send(len(question).to_bytes(HEAD_BYTES) + question, deadline)
        return self._answer(deadline)

    def end(self) -> None:
        """Kill it; twice is safe."""
        self._process.kill()
        self._process.wait()
        _pipe(self._process.stdin).close()
        _pipe(self._process.stdout).close()

    def _send(self, content: bytes, deadline: float) -> None:
        pipe = _pipe(self._process.stdin).fileno()
        rest = memoryview(content)
        while rest:
            _await(pipe, select.POLLOUT, deadline)
            try:
                rest = rest[os.write(pipe, rest) :]
            except BlockingIOError:
                continue
            except OSError as error:
                raise self._ended() from error

    def _answer(self, deadline: float) -> bytes:
        """What it says, whole."""
        found = bytearray()
        while len(found) < HEAD_BYTES or len(found) < HEAD_BYTES + _length(found):
            pipe = _pipe(self._process.stdout).fileno()
            _await(pipe, select.POLLIN, deadline)
            piece = os.read(pipe, PIPE_BYTES)
            if not piece:
                raise self._ended()
            found += piece
        return bytes(memoryview(found)[HEAD_BYTES:])

    def _ended(self) -> GivenUp:
        """Why it has closed its pipes."""
        try:
            status = self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            status = -signal.SIGKILL
        return GivenUp(_EXCESS_OF.get(status, Excess.MEMORY))


_EXCESS_OF: Final = {-signal.SIGPROF: Excess.CPU, -signal.SIGKILL: Excess.TIME}


def _length(found: bytearray) -> int:
    return int.from_bytes(found[:HEAD_BYTES])


def _await(pipe: int, event: int, deadline: float) -> None:
    poll = select.poll()  # select() knows no descriptors from 1024 on
    poll.register(pipe, event)
    if not poll.poll(max(0.0, deadline - monotonic()) * 1000):
        raise GivenUp(Excess.TIME)


def _end_all(children: list[_Child]) -> None:
    while children:
        children.pop().end()


def _pipe(stream: IO[bytes] | None) -> IO[bytes]:
    assert stream is not None, "it was made with pipes"
    return stream
