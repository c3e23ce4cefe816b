"""A fork server: it imports what nodes need once, and `baton up` forks its first nodes from it.

Imports are most of a node's start, and torch is most of them. The life of a server:
    ForkServer    `python -m deploy.process.fork_server` runs beside the launcher's own imports
    fork          a node begins where imports end. It is a child of the launcher and has the command
                  line, environment, session, output and end with the launcher that it would have if
                  it were started anew
    close         the server ends; its nodes live on
A node that is started again later is started anew, so nothing supervises the server. If the server
cannot fork (it was killed, say), a node is started anew, too.

A fork copies one thread, and whatever locks others hold. So the server has one thread when it
forks, for it has run nothing but imports: gRPC starts its threads, OpenMP its teams and CUDA its
contexts when they are first used, which is in the nodes. Libraries read their environment when they
are loaded, here: the server has the launcher's own, except for THREADS.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import IO, Final

from deploy.process.child import RunningProgram, anew

NVIDIA_DRIVER: Final = Path("/proc/driver/nvidia")
# Imported before anybody asks: what needs no torch while its library is loaded, then the nodes.
BEFORE_TORCH: Final = (
    "numpy",
    "grpc.aio",
    "redis.asyncio",
    "baton.node.config",
    "protos.node_pb2_grpc",
)
MODULES: Final = ("prefill_node", "decode_node")
# Of OpenMP and OpenBLAS, for threads that do not ask torch for its number (baton/engine/thread.py
# does). OpenBLAS would start its own when it is imported.
THREADS: Final = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
# An argument of the server's: room in its command line for those of nodes (see `_show`).
ROOM: Final = "-" * 8192
MOST_BYTES: Final = 1 << 20  # of one request
FORK_S: Final = 60.0  # the server imports before it forks
PR_SET_PDEATHSIG: Final = 1
PR_SET_CHILD_SUBREAPER: Final = 36
ARG_START, ARG_END = 45, 46  # of /proc/PID/stat, counted after the name


class CannotFork(Exception):
    """The server has ended, or does not answer."""


class ForkedProcess:
    """What the launcher uses of subprocess.Popen, of a child that was forked. Any thread."""

    def __init__(self, pid: int, stdout: IO[str]) -> None:
        """`stdout` is what it writes."""
        self.pid = pid
        self.stdout = stdout
        self._ended = os.pidfd_open(pid)
        self._status: int | None = None
        self._lock = threading.Lock()  # its status can be read only once
        weakref.finalize(self, os.close, self._ended)

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit status, -N after signal N. Raises subprocess.TimeoutExpired."""
        ended = select.poll()
        ended.register(self._ended, select.POLLIN)
        if not ended.poll(None if timeout is None else timeout * 1000):
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        with self._lock:
            if self._status is None:
                self._status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            return self._status

    def send_signal(self, sig: int) -> None:
        """Send a signal, unless the process has ended and was waited for."""
        with self._lock:
            if self._status is None:
                os.kill(self.pid, sig)


class ForkServer:
    """The launcher's side. Used by one thread; `close` may be called twice."""

    def __init__(self) -> None:
        """Start the server; return at once."""
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(FORK_S)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "deploy.process.fork_server", str(os.getpid()), ROOM],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={**os.environ, **THREADS},
                start_new_session=True,  # Ctrl-C reaches the launcher alone
            )

    @property
    def pid(self) -> int:
        """The server's own process."""
        return self._process.pid

    def fork(
        self, command: Sequence[str], environ: Mapping[str, str], log: IO[bytes]
    ) -> ForkedProcess:
        """Return a node that runs `command`: the interpreter, "-m", its package, and flags.

        Its messages go to `log`. Raises CannotFork.
        """
        request = json.dumps([list(command), dict(environ)]).encode()
        reader, writer = os.pipe()
        stdout = os.fdopen(reader, errors="replace")
        try:
            return ForkedProcess(self._ask(request, [writer, log.fileno()]), stdout)
        except OSError as error:
            stdout.close()
            self.close()  # an answer that came later would be taken for another one
            raise CannotFork(str(error)) from error
        finally:
            os.close(writer)

    def _ask(self, request: bytes, descriptors: Sequence[int]) -> int:
        """Return the process that the server forks, a child of this one. Raises OSError."""
        _adopt(orphans=True)  # its first parent has ended when the answer comes
        try:
            socket.send_fds(self._socket, [request], descriptors)
            answer = self._socket.recv(MOST_BYTES)
        finally:
            _adopt(orphans=False)
        if not answer:
            raise ConnectionError("the fork server has ended")
        return int(answer)

    def start(
        self, command: Sequence[str], environ: Mapping[str, str], log: IO[bytes]
    ) -> RunningProgram:
        """Return a node that runs `command`: forked, or else started anew."""
        try:
            return self.fork(command, environ, log)
        except CannotFork:
            return anew(command, environ, log)

    def close(self) -> None:
        """End the server. Its nodes live on."""
        self._socket.close()
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def helps(arguments: Sequence[str], driver: Path = NVIDIA_DRIVER) -> bool:
    """Return whether a fork server helps this command of `baton`: it starts nodes, on a CPU, and
    the kernel is not older than 5.3."""
    if arguments[:1] != ["up"] or driver.exists():
        return False
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError:
        return False
    return True


def _adopt(*, orphans: bool) -> None:
    """Say whether this process becomes the parent of its descendants that lose theirs. Raises
    OSError."""
    if ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, int(orphans), 0, 0, 0):
        raise OSError("the kernel does not let a process adopt others")


# ---- the server ----------------------------------------------------------------------------------


def serve(launcher: int) -> int:
    """Fork nodes until the launcher closes the socket, which is stdin. Return the exit status, of
    the server or, in a node, of the node."""
    from baton.runtime.collector import importing

    with importing():
        library = threading.Thread(target=_load_torch)
        library.start()
        for module in BEFORE_TORCH:
            import_module(module)
        library.join()
        for module in MODULES:
            import_module(f"{module}.__main__")
    if len(os.listdir("/proc/self/task")) > 1:
        return 1  # nodes are started anew
    asked = socket.socket(fileno=os.dup(0))
    while True:
        request, descriptors, _, _ = socket.recv_fds(asked, MOST_BYTES, 2)
        if not request:
            return 0
        status = _fork(asked, launcher, request, descriptors)
        if status is not None:
            return status
        for each in descriptors:
            os.close(each)


def _load_torch() -> None:
    """Load torch's library, which takes a quarter of its import but not the interpreter's lock."""
    found = find_spec("torch")
    if found is not None and found.origin is not None:
        with suppress(OSError):  # whatever is wrong, the import says so
            ctypes.CDLL(str(Path(found.origin).parent / "lib" / "libtorch_cpu.so"))


def _fork(
    asked: socket.socket, launcher: int, request: bytes, descriptors: Sequence[int]
) -> int | None:
    """Fork a node, and answer with its process. Return None here, the status in the node."""
    begins, go = os.pipe()
    numbers, number = os.pipe()
    between = os.fork()
    if between == 0:
        if os.fork():
            os._exit(0)
        os.setsid()
        os.write(number, str(os.getpid()).encode())
        asked.close()
        for each in (go, numbers, number):
            os.close(each)
        os.read(begins, 1)  # until the process between has ended: the launcher is the parent
        os.close(begins)
        return _run(launcher, request, descriptors)
    os.waitpid(between, 0)
    asked.send(os.read(numbers, MOST_BYTES))
    for each in (begins, go, numbers, number):
        os.close(each)
    return None


def _run(launcher: int, request: bytes, descriptors: Sequence[int]) -> int:
    """Be a node; return its exit status."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != launcher:  # it has just died
        return 1
    command, environ = json.loads(request)
    for target, each in zip((1, 2), descriptors, strict=True):
        os.dup2(each, target)
        os.close(each)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.environ.clear()
    os.environ.update(environ)
    sys.argv = [command[2], *command[3:]]
    _show(command)
    program = import_module(f"{command[2]}.__main__").PROGRAM
    return import_module("baton.node.main").main(program, command[3:], os.environ)


def _show(command: Sequence[str]) -> None:
    """Make `command` this process's command line, for `ps` and all who read /proc."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[ARG_START]), int(fields[ARG_END])
    shown = b"".join(os.fsencode(word) + b"\0" for word in command)[: end - start - 1]
    with suppress(OSError):
        ctypes.memmove(start, shown.ljust(end - start, b"\0"), end - start)


if __name__ == "__main__":
    raise SystemExit(serve(int(sys.argv[1])))
