"""Runs work that may take too much time or memory in child processes, which can be killed.

A call in native code can take minutes or gigabytes, and a thread cannot be stopped inside it. Two
examples: building a grammar (`multipleOf: 9999991`), and printing a list that holds itself twice,
forty levels deep. A child (baton/runtime/child.py) ends when it has used its CPU seconds or its
bytes. Then its question has failed, and the next question gets a new child. Children are started
when needed, kept for further questions, and end with this process.

`Children` is for threads: a thread that asks has a child for itself until the answer comes.
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

START_S: Final = 30.0  # how long a child may take to start: it imports what it needs
MAX_USES: Final = 1000  # questions to one child; then it is ended, which frees its memory
# The largest pipe that every user may have: larger pipes mean fewer switches between processes.
PIPE_BYTES: Final = 1 << 20


class Excess(enum.Enum):
    """What a child ran out of.

    TIME is not the question's fault: the child used little CPU, so the machine was busy, or
    somebody killed the child.
    """

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
    """What one question may cost.

    `cpu_s`: seconds of CPU. `memory_bytes`: all memory of the process. `wall_s`: seconds without an
    answer after which the child is killed. It is longer than `cpu_s`, because the machine has other
    work.
    """

    cpu_s: float = 1.0
    memory_bytes: int = 1 << 30
    wall_s: float = 10.0


class Children:
    """A pool of child processes.

    `command` starts a child; seconds of CPU and bytes are added as its last two arguments. `close`
    may be called twice.
    """

    def __init__(self, command: Sequence[str], budget: ChildBudget) -> None:
        self.num_started = 0
        self.num_given_up = 0
        self.command = command
        self._budget = budget
        self._lock = threading.Lock()
        self._idle: list[_Child] = []
        self._closed = False
        # For owners that forget to close: the children end with this object.
        weakref.finalize(self, _end_all, self._idle)

    def ask(self, question: bytes) -> bytes:
        """Return the answer. Any thread. Raises GivenUp, and InternalError if no child can
        start.
        """
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
        """Start a child if none is idle, so that the first question need not wait for it."""
        child = self._child()
        with self._lock:
            self._idle.append(child)

    def close(self) -> None:
        """End the idle children. Those that are working end after their question."""
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
            child.end()  # it ended for another reason than this question

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
        """Start the child and wait until it is ready.

        Raises InternalError if it cannot start, GivenUp if the start takes too long.
        """
        self.uses = 0
        limits = (str(budget.cpu_s), str(budget.memory_bytes))
        self._process = subprocess.Popen(
            [*command, *limits],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # a ^C is for the owner, not for the child
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
        """Return the child's answer. Raises GivenUp; then the caller must end the child."""
        deadline = monotonic() + within_s
        self._send(len(question).to_bytes(HEAD_BYTES) + question, deadline)
        return self._answer(deadline)

    def end(self) -> None:
        """Kill the child; may be called twice."""
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
        """Read the child's whole answer and return it."""
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
        """Return an error that says why the child has closed its pipes."""
        try:
            status = self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            status = -signal.SIGKILL
        return GivenUp(_EXCESS_OF.get(status, Excess.MEMORY))


_EXCESS_OF: Final = {-signal.SIGPROF: Excess.CPU, -signal.SIGKILL: Excess.TIME}


def _length(found: bytearray) -> int:
    return int.from_bytes(found[:HEAD_BYTES])


def _await(pipe: int, event: int, deadline: float) -> None:
    poll = select.poll()  # select() cannot take descriptors from 1024 on
    poll.register(pipe, event)
    if not poll.poll(max(0.0, deadline - monotonic()) * 1000):
        raise GivenUp(Excess.TIME)


def _end_all(children: list[_Child]) -> None:
    while children:
        children.pop().end()


def _pipe(stream: IO[bytes] | None) -> IO[bytes]:
    assert stream is not None, "it was made with pipes"
    return stream
