"""Failpoints: places in the code where a test can make this process die, stop, fail, wait or lie.

    BATON_FAILPOINT=name:nth:action[,name:nth:action...]   at the nth passage (from 1), once;
                                                           `*` for nth: at each passage
    BATON_FAILPOINT=@FILE                                  such a list; the file is looked at anew
                                                           at each passage
    BATON_FAILPOINT_LOG=FILE                               a line per fault, written before it acts

Actions: kill9 (SIGKILL to itself), stop (SIGSTOP to itself), raise (InternalError), delay=MS (the
passing thread sleeps), corrupt (the caller damages its data). docs/chaos.md says where each name
is.

A process's `main` arms FAILPOINTS once from its environment; the code passes through
`FAILPOINTS.hit(name)`. If nothing is armed, a passage costs one look at an attribute. FAILPOINTS is
the only global object of this kind, on purpose: a fault concerns the whole process, and passing the
object to every constructor would shape the code for the sake of its tests.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from baton.protocol.errors import ConfigError, InternalError

log = logging.getLogger(__name__)

VARIABLE: Final = "BATON_FAILPOINT"
LOG_VARIABLE: Final = "BATON_FAILPOINT_LOG"
STAGES: Final = (
    "accepted", "logged", "p.queued", "p.mid_chunk", "p.done",
    "kv.first", "kv.half", "kv.last", "kv.acked", "d.reserved", "d.step1", "d.step_n",
    "sampled_not_logged", "logged_not_sent", "shown_not_logged", "finishing",
)  # fmt: skip
IMAGE_STAGES: Final = ("e.encoding", "e.encoded")  # of encode nodes
STARTS: Final = ("loading",)  # stages of a node's start, before its model is there
DATA_STAGES: Final = ("kv.first", "kv.half")  # stages with data that can be damaged
ACTIONS: Final = ("kill9", "stop", "raise", "delay", "corrupt")


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens at the `nth` passage of `name`; `nth` None = at each passage."""

    name: str
    nth: int | None
    action: str
    delay_ms: int = 0

    @staticmethod
    def parse(text: str) -> Fault:
        """Parse `name:nth:action`. Raises ConfigError."""
        parts = text.strip().split(":")
        if len(parts) != 3:
            raise _refused(f"{text!r} is not name:nth:action")
        name, count, word = parts
        action, _, amount = word.partition("=")
        known = STAGES + IMAGE_STAGES + STARTS
        if name not in known:
            raise _refused(f"no failpoint {name!r}; there are {', '.join(known)}")
        if action not in ACTIONS or bool(amount) != (action == "delay"):
            raise _refused(f"no action {word!r}; there are kill9, stop, raise, delay=MS, corrupt")
        if action == "corrupt" and name not in DATA_STAGES:
            raise _refused(f"nothing to corrupt at {name}; only at {', '.join(DATA_STAGES)}")
        counted = count == "*" or (count.isdecimal() and int(count) > 0)
        if not (counted and (amount or "0").isdecimal()):
            raise _refused(f"{text!r}: nth counts from 1 or is *, delay is in milliseconds")
        return Fault(name, None if count == "*" else int(count), action, int(amount or 0))

    def is_due(self, name: str, passage: int) -> bool:
        return self.name == name and self.nth in (None, passage)


def parse(text: str) -> list[Fault]:
    """Return all faults of a list separated by commas. Raises ConfigError."""
    return [Fault.parse(part) for part in text.split(",") if part.strip()]


class FailurePlan:
    """The armed faults, and how often each name was passed. Any thread."""

    def __init__(self, text: str, proof: Path | None) -> None:
        """Raises ConfigError for a text that cannot be parsed."""
        self._file = Path(text[1:]) if text.startswith("@") else None
        self._proof = proof
        self._lock = threading.Lock()
        self._stamp: tuple[int, int] | None = None  # inode and time of the file that was read last
        self._faults: list[Fault] = []
        self._passed: Counter[str] = Counter()
        if self._file is None:
            self._arm(text)
        else:
            self._look(self._file, start=True)

    def hit(self, name: str) -> bool:
        """See Failpoints.hit."""
        with self._lock:
            if self._file is not None:
                self._look(self._file)
            self._passed[name] += 1
            count = self._passed[name]
            due = [fault for fault in self._faults if fault.is_due(name, count)]
        corrupt = False
        for fault in due:
            self._record(fault, count)
            corrupt |= self._act(fault)
        return corrupt

    def _arm(self, text: str) -> None:
        self._faults = parse(text)
        self._passed.clear()

    def _look(self, file: Path, *, start: bool = False) -> None:
        """Read the file again if it was replaced or written; then count passages from the start."""
        try:
            found = file.stat()
            stamp, text = (found.st_ino, found.st_mtime_ns), ""
            if stamp != self._stamp:
                text = file.read_text()
        except OSError:
            stamp, text = None, ""  # not written yet, so nothing is armed
        if stamp == self._stamp:
            return
        self._stamp, self._faults = stamp, []
        try:
            self._arm(text)
        except ConfigError as error:
            if start:
                raise
            # Only logged: while the process runs, nobody gets the error.
            log.error("failpoints are not armed: %s", error.message)

    def _record(self, fault: Fault, passage: int) -> None:
        log.warning("failpoint %s fires: %s", fault.name, fault.action)
        if self._proof is None:
            return
        line = f"{os.getpid()} {fault.name} {passage} {fault.action}\n"
        # One write to an append-only descriptor: the line is complete before the process is gone.
        proof = os.open(self._proof, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            os.write(proof, line.encode())
        finally:
            os.close(proof)

    def _act(self, fault: Fault) -> bool:
        match fault.action:
            case "kill9":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                # SIGSTOP goes to this thread, so it goes no step further, wherever the other
                # threads are.
                signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
            case "raise":
                raise InternalError(f"failpoint {fault.name}")
            case "delay":
                time.sleep(fault.delay_ms / 1000)
            case _:
                return True
        return False


class Failpoints:
    """The failpoints of this process; they do nothing until `arm` finds a fault."""

    def __init__(self) -> None:
        self._plan: FailurePlan | None = None

    def arm(self, environ: Mapping[str, str]) -> None:
        """Read the environment; call it at the start, before any thread. Raises ConfigError."""
        text, proof = environ.get(VARIABLE, ""), environ.get(LOG_VARIABLE)
        self._plan = FailurePlan(text, Path(proof) if proof else None) if text else None
        if self._plan is not None:
            log.warning("failpoints are armed: %s", text)

    @property
    def armed(self) -> bool:
        """Whether there are faults. Values that only a failpoint needs are computed only then."""
        return self._plan is not None

    def hit(self, name: str) -> bool:
        """Pass the stage `name`. Return True if the caller must damage its data.

        It may never return, or raise InternalError, if that is the fault.
        """
        return self._plan is not None and self._plan.hit(name)


def _refused(text: str) -> ConfigError:
    return ConfigError(f"{VARIABLE}: {text}", field="failpoint")


FAILPOINTS: Final = Failpoints()
