"""Grammars tried out in a process that can be given up, before anybody depends on them.

Building a grammar and its first mask can take minutes or gigabytes (`multipleOf: 9999991`), in one
call that no thread can leave. So it is first done in a child (baton/grammar_trial.py) that ends
itself when it has used its seconds of CPU or its bytes: then that grammar is refused, and the next
one gets a new child. Children are started when needed, kept, and end with this process.

`GrammarTrials` is for threads; each thread that tries a grammar has a child of its own meanwhile.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from time import monotonic
from typing import IO, Any, Final

from baton.errors import InternalError, InvalidRequest, UnsupportedFeature
from baton.grammars import FIELD
from baton.sampling import GuidedDecoding

TRIAL: Final = (sys.executable, "-m", "baton.grammar_trial")
START_S: Final = 30.0  # of a child: to import what it needs
MAX_USES: Final = 1000  # of one child: whatever it hoards goes with it


@dataclass(frozen=True, slots=True)
class TrialBudget:
    """What one grammar may cost: seconds of CPU, bytes that its process may hold in all, and the
    seconds after which a child that does not answer, on a machine with other work, is given up."""

    cpu_s: float = 1.0
    memory_bytes: int = 1 << 30
    wall_s: float = 10.0


class GrammarTrials:
    """`run` from any thread; `close` twice is safe."""

    def __init__(self, command: Sequence[str] = TRIAL, budget: TrialBudget | None = None) -> None:
        self.num_started = 0
        self.num_given_up = 0
        self._budget = budget or TrialBudget()
        self.command = command
        self._lock = threading.Lock()
        self._idle: list[_Child] = []
        self._closed = False
        # For owners that forget to close: no child outlives its interest.
        weakref.finalize(self, _end_all, self._idle)

    def run(self, guided: GuidedDecoding) -> None:
        """Raise InvalidRequest (field `guided`) for what cannot be built within the budget or
        allows nothing, UnsupportedFeature for what only another backend may know."""
        child = self._child()
        try:
            child.ask(guided)
        except BaseException:
            child.end()
            raise
        try:
            answer = child.answer(self._budget.wall_s)
        except TimeoutError:
            answer = None
        if answer is None:
            self.num_given_up += 1
            why = child.end()
            raise InvalidRequest(f"guided: {why}", field=FIELD)
        self._give_back(child)
        if answer:
            kind = UnsupportedFeature if answer["unsupported"] else InvalidRequest
            raise kind(answer["message"], field=FIELD)

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
            child.end()  # whoever ended it, it was not the next grammar

    def _give_back(self, child: _Child) -> None:
        child.uses += 1
        with self._lock:
            if not self._closed and child.uses < MAX_USES:
                self._idle.append(child)
                return
        child.end()


class _Child:
    """One process, asked one grammar at a time."""

    def __init__(self, command: Sequence[str], budget: TrialBudget) -> None:
        """Starts it and waits until it is ready. Raises InternalError where it cannot start."""
        self.uses = 0
        limits = (str(budget.cpu_s), str(budget.memory_bytes))
        self._process = subprocess.Popen(
            [*command, *limits],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # a ^C is for whoever owns it
        )
        try:
            ready = self.answer(START_S)
        except TimeoutError:
            ready = None
        if ready is None:
            self.end()
            raise InternalError("grammars cannot be tried out: no process for it could start")

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, guided: GuidedDecoding) -> None:
        """Hand it a grammar. Raises InternalError if it has just gone."""
        try:
            line = json.dumps(asdict(guided)).encode() + b"\n"
            _pipe(self._process.stdin).write(line)
            _pipe(self._process.stdin).flush()
        except OSError as error:
            raise InternalError("the process that tries grammars is gone") from error

    def answer(self, within_s: float) -> dict[str, Any] | None:
        """What it says; None: it ended. Raises TimeoutError."""
        pipe = _pipe(self._process.stdout)
        deadline = monotonic() + within_s
        line = b""
        while not line.endswith(b"\n"):
            if not select.select([pipe], [], [], max(0.0, deadline - monotonic()))[0]:
                raise TimeoutError
            piece = os.read(pipe.fileno(), 1 << 16)
            if not piece:
                return None
            line += piece
        return json.loads(line)

    def end(self) -> str:
        """Kill it; why it had ended, as a client may read it."""
        self._process.poll()
        self._process.kill()
        status = self._process.wait()
        _pipe(self._process.stdin).close()
        _pipe(self._process.stdout).close()
        if status in (-signal.SIGPROF, -signal.SIGKILL):
            return "the grammar takes too long to build"
        return "the grammar needs too much memory to build"


def _end_all(children: list[_Child]) -> None:
    while children:
        children.pop().end()


def _pipe(stream: IO[bytes] | None) -> IO[bytes]:
    assert stream is not None, "it was made with pipes"
    return stream
