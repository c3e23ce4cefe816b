"""`baton up --demo`: hurts processes of the cluster on request, so that people see what follows.

A Unix socket in a folder of this user alone takes one line of JSON, {"node", "action"}, and answers
with {"done": text} or {"error": text}. The router's console asks there; the router knows the socket
by its option --break-socket. Only members of this cluster can be named, by the names of its nodes.

    kill       SIGKILL: the launcher starts the node again
    stop       SIGSTOP: it hangs, until `resume`
    slow       stopped for most of each 200 ms, for SLOW_S seconds
    slow-lane  each fetch of KV from this node takes LANE_MS longer, until it is asked for again.
               The nodes of a demo read their failpoints from files (baton/runtime/failpoints.py)
"""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

SLOW_S: Final = 20.0
REST_S: Final = 0.15  # stopped, of each period of a slow node
RUN_S: Final = 0.05
LANE_MS: Final = 1500
LANE_FAULT: Final = f"kv.last:*:delay={LANE_MS}"  # every fetch passes it, whatever its lane
MOST_BYTES: Final = 4096
CLIENT_S: Final = 5.0
BACKLOG: Final = 8


def faults_file(folder: Path, node: str) -> Path:
    """Return where a node of a demo looks for its failpoints."""
    return folder / f"{node}.faults"


class BreakServer:
    """Serves one socket from a thread of its own. Life: made (listens) -> stop().

    `pid_of`: returns the process (leader of its group) of a node, None if it does not run. The
    folder of `path` also holds the nodes' files of failpoints.
    """

    def __init__(self, path: Path, pid_of: Callable[[str], int | None]) -> None:
        self._pid_of = pid_of
        self._folder = path.parent
        self._held: set[int] = set()  # stopped; they must go on before they can end
        self._over = threading.Event()
        self._threads: list[threading.Thread] = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(str(path))
        path.chmod(0o600)
        self._socket.listen(BACKLOG)
        self._spawn(self._serve)

    def stop(self) -> None:
        """Serve no longer, and let all stopped processes go on. Calling it twice is safe."""
        self._over.set()
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(CLIENT_S)
        self._socket.close()
        for pid in list(self._held):
            self._send(pid, signal.SIGCONT)

    def act(self, node: str, action: str) -> str:
        """Do it, and return what was done. Raises ValueError for an unknown node or action."""
        pid = self._pid_of(node)
        if pid is None:
            raise ValueError(f"node {node!r} does not run here")
        match action:
            case "kill":
                self._send(pid, signal.SIGKILL)
                return f"{node} was killed (SIGKILL); it is started again"
            case "stop":
                self._held.add(pid)
                self._send(pid, signal.SIGSTOP)
                return f"{node} was stopped (SIGSTOP); resume lets it go on"
            case "resume":
                self._held.discard(pid)
                self._send(pid, signal.SIGCONT)
                return f"{node} goes on (SIGCONT)"
            case "slow":
                self._spawn(lambda: self._slow(pid))
                share = round((REST_S + RUN_S) / RUN_S)
                return f"{node} runs {share} times slower for {SLOW_S:g} s"
            case "slow-lane":
                return self._turn_lane(node)
            case _:
                raise ValueError(f"action {action!r}: kill, stop, resume, slow or slow-lane")

    # ---- inside ----

    def _turn_lane(self, node: str) -> str:
        file = faults_file(self._folder, node)
        if file.exists():
            file.unlink()
            return f"KV leaves {node} at its own speed again"
        written = file.with_suffix(".new")
        written.write_text(LANE_FAULT)
        written.rename(file)  # a node never reads half of it
        return f"each transfer of KV from {node} takes {LANE_MS / 1000:g} s longer"

    def _spawn(self, work: Callable[[], None]) -> None:
        self._threads = [each for each in self._threads if each.is_alive()]
        thread = threading.Thread(target=work, name="break", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _serve(self) -> None:
        while not self._over.is_set():
            try:
                client, _ = self._socket.accept()
            except OSError:
                return  # closed
            with client, suppress(OSError):
                client.settimeout(CLIENT_S)
                client.sendall(json.dumps(self._answer(client)).encode() + b"\n")

    def _answer(self, client: socket.socket) -> dict[str, str]:
        try:
            with client.makefile("rb") as lines:
                asked: Any = json.loads(lines.readline(MOST_BYTES))
            return {"done": self.act(str(asked["node"]), str(asked["action"]))}
        except (ValueError, KeyError, TypeError) as error:
            return {"error": str(error)}

    def _slow(self, pid: int) -> None:
        until = time.monotonic() + SLOW_S
        self._held.add(pid)
        while time.monotonic() < until and pid in self._held and self._send(pid, signal.SIGSTOP):
            self._over.wait(REST_S)
            self._send(pid, signal.SIGCONT)
            if self._over.wait(RUN_S):
                break
        self._held.discard(pid)

    def _send(self, pid: int, number: signal.Signals) -> bool:
        """Signal the process and those that it started; return False if they are gone."""
        try:
            os.killpg(pid, number)
        except ProcessLookupError:
            return False
        return True
