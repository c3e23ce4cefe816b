"""One child process of the launcher: start it, wait until it is ready, stop it.

It never restarts a process; deploy/local.py decides that. The life:
    Child(spec)  the program runs in its own session; its stderr goes to the log file
    ready        `ready` has accepted a line on stdout; all of stdout goes to the log, too
    exited       the process has ended, by itself or by stop()
The child's own reader thread posts the last two as events, `Ready` and `Exited`.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Protocol

TAIL_BYTES = 16_384


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """What to run. `variables` are added to this process's environment."""

    name: str
    command: Sequence[str]
    log: Path
    ready: Callable[[str], bool]
    variables: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True)
class Ready:
    """The child printed its ready line."""

    child: Child
    line: str


@dataclass(frozen=True, slots=True)
class Exited:
    """The child ended; `status` as in subprocess (negative: killed by that signal)."""

    child: Child
    status: int


class RunningProgram(Protocol):
    """What `Child` needs of a process: a part of subprocess.Popen."""

    @property
    def pid(self) -> int: ...
    @property
    def stdout(self) -> IO[str] | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def send_signal(self, sig: int) -> None: ...


# Starts a program in a session of its own, with this environment and this file as its stderr.
Start = Callable[[Sequence[str], Mapping[str, str], IO[bytes]], RunningProgram]


class Child:
    """A running program. Every method is called by the launcher's thread."""

    def __init__(
        self,
        spec: ProcessSpec,
        post: Callable[[Ready | Exited], None],
        start: Start | None = None,
    ) -> None:
        """Start the program, by default with `anew`. The reader thread calls `post`, which may be
        `SimpleQueue.put`.
        """
        self.spec = spec
        self.stopping = False
        self._post = post
        self._process = self._spawn(start or anew)
        self._reader = threading.Thread(target=self._read, name=f"{spec.name} output", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def _spawn(self, start: Start) -> RunningProgram:
        spec = self.spec
        spec.log.parent.mkdir(parents=True, exist_ok=True)
        with spec.log.open("ab") as log:
            return start(spec.command, {**os.environ, **spec.variables}, log)

    def _read(self) -> None:
        stdout = self._process.stdout
        assert stdout is not None, "Popen was given a pipe"
        with stdout, self.spec.log.open("a") as log:
            self._forward(stdout, log)
        self._post(Exited(self, self._process.wait()))

    def _forward(self, stdout: IO[str], log: IO[str]) -> None:
        ready = False
        for line in stdout:
            log.write(line)
            log.flush()
            if not ready and self.spec.ready(line):
                ready = True
                self._post(Ready(self, line))

    def terminate(self) -> None:
        """Ask for a clean end (SIGTERM); twice is safe."""
        self.stopping = True
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)

    def stop(self, timeout_s: float) -> int:
        """Terminate the process, wait, and after `timeout_s` kill its session. Return its
        status.
        """
        self.terminate()
        try:
            status = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            status = self._process.wait()
        self._reader.join(timeout=1.0)
        return status

    def kill(self) -> None:
        """Send SIGKILL to the process and to those that it started."""
        self.stopping = True
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def last_lines(self, count: int) -> list[str]:
        """Return the end of the log, for the person who must find out why the process ended."""
        try:
            with self.spec.log.open("rb") as log:
                log.seek(0, os.SEEK_END)
                log.seek(max(0, log.tell() - TAIL_BYTES))
                return log.read().decode(errors="replace").splitlines()[-count:]
        except OSError:
            return []


def anew(command: Sequence[str], environ: Mapping[str, str], log: IO[bytes]) -> RunningProgram:
    """Start a program as a process of its own."""
    return subprocess.Popen(
        [*dies_with_parent(), *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=log,
        env=environ,
        text=True,
        errors="replace",
        # Ctrl-C in the terminal reaches only the launcher, which stops the others in order.
        start_new_session=True,
    )


def dies_with_parent() -> list[str]:
    """Return a command prefix by which the kernel stops the child when the launcher dies.

    Empty if this machine has no such command.
    """
    setpriv = shutil.which("setpriv")
    return [setpriv, "--pdeathsig", "TERM", "--"] if setpriv else []
