"""The interpreter's profiler on every thread, and two recorders of what it sees of our code.

`Entries` takes down functions as they are entered, `Instances` objects as they are made. Neither
asks what they are for: tools/trace_counts.py and tools/trace_types.py sort them out.
"""

from __future__ import annotations

import dis
import gc
import inspect
import sys
import threading
import time
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Final, Protocol

from tools.trace_counts import FOLDERS, Entry
from tools.trace_types import Made, Marks, is_own

ROOT: Final = Path(__file__).resolve().parent.parent
PREFIX: Final = f"{ROOT}/"
OURS: Final = frozenset(folders[0] for folders in FOLDERS)
RESUME: Final = dis.opmap["RESUME"]
CAN_GO_ON: Final = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
# Part of the function that they stand in; some are inlined, depending on Python's version.
COMPREHENSIONS: Final = frozenset({"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"})


class Recorder(Protocol):
    """What is done with the profiler's events during a window; `last_s`: ours entered last."""

    last_s: float

    def event(self, frame: FrameType, event: str, value: object) -> None: ...


class Profiler:
    """The profiler's hook of every thread; it looks at nothing while it has no recorder."""

    def __init__(self) -> None:
        self.recorder: Recorder | None = None

    def __call__(self, frame: FrameType, event: str, value: object) -> None:
        if self.recorder is not None:
            self.recorder.event(frame, event, value)

    def install(self) -> None:
        """Here, and in every thread that is started from now on."""
        threading.setprofile(self)
        sys.setprofile(self)

    def remove(self) -> None:
        """Here, and from threads to come; those that run end with what they belong to."""
        self.recorder = None
        threading.setprofile(None)
        sys.setprofile(None)


class Entries:
    """Recorder: every function of ours as it is entered."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.last_s = time.monotonic()
        self._known: dict[CodeType, Entry | None] = {}

    def event(self, frame: FrameType, event: str, value: object) -> None:
        if event != "call":
            return
        code = frame.f_code
        if code not in self._known:
            file = own_file(code)
            named = file is not None and code.co_name not in COMPREHENSIONS
            self._known[code] = Entry(file, code.co_qualname) if file and named else None
        entry = self._known[code]
        if entry is not None:
            self.last_s = time.monotonic()
            if not goes_on(frame):
                self.entries.append(entry)


class Instances:
    """Recorder: every object of our classes as it is made, and what its methods leave in it.

    It keeps them all, so that no two have one id. Of a class without an `__init__` in Python
    (msgspec's) an object is seen when it is first given to a function of ours, or returned by one.
    """

    def __init__(self, marks: Marks) -> None:
        self.made: dict[int, Made] = {}
        self.last_s = time.monotonic()
        self._marks = marks
        self._before = {id(each) for each in gc.get_objects() if is_own(type(each), OURS)}

    def event(self, frame: FrameType, event: str, value: object) -> None:
        code = frame.f_code
        ours = own_file(code) is not None
        if event == "call":
            begins = code.co_name == "__init__" and not goes_on(frame)
            if not (ours or begins):
                return
            for number, given in enumerate(arguments(frame)):
                self._see(given, frame.f_back, is_new=begins and number == 0)
        elif event == "return" and (ours or code.co_name == "__init__"):
            self._see(value, frame, is_new=False)
            for given in arguments(frame)[:1]:
                made = self.made.get(id(given))
                if made is not None:
                    made.look(self._marks, OURS)
        if ours:
            self.last_s = time.monotonic()

    def end(self) -> list[Made]:
        """Look a last time; in the order in which they were made."""
        for made in self.made.values():
            made.look(self._marks, OURS)
        return list(self.made.values())

    def _see(self, given: object, maker: FrameType | None, is_new: bool) -> None:
        kind = type(given)
        if id(given) in self.made or not is_own(kind, OURS):
            return
        if not is_new and (has_init(kind) or id(given) in self._before):
            return
        while maker is not None and own_file(maker.f_code) is None:
            maker = maker.f_back
        file = None if maker is None else own_file(maker.f_code)
        function = "?" if maker is None else maker.f_code.co_qualname
        self.made[id(given)] = Made(given, file or "?", function)


def own_file(code: CodeType) -> str | None:
    """The file of a function of ours, relative to the repository."""
    path = code.co_filename
    if not path.startswith(PREFIX):
        return None
    file = path[len(PREFIX) :]
    return file if file.split("/")[0] in OURS else None


def goes_on(frame: FrameType) -> bool:
    """Whether a "call" is a coroutine or generator that goes on where it was."""
    code, at = frame.f_code, frame.f_lasti
    if not code.co_flags & CAN_GO_ON or at < 0:
        return False
    return code.co_code[at] == RESUME and code.co_code[at + 1] & 3 != 0


def arguments(frame: FrameType) -> list[object]:
    code = frame.f_code
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    local = frame.f_locals
    return [local[name] for name in names if name in local]


def has_init(kind: type) -> bool:
    """Whether the profiler sees its objects being made."""
    return isinstance(kind.__init__, FunctionType)
