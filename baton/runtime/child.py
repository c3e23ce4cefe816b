"""The inside of a child of baton/runtime/children.py: answers questions until its input ends.

Where a question uses up its seconds of CPU, the kernel ends the process (SIGPROF, which nothing
here catches: no call has to come back for that); with its bytes, the allocator does, or Python says
MemoryError and the process ends. Questions and answers are frames: eight bytes of length, then so
many bytes. The first answer, empty, says that the child is ready.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from collections.abc import Callable
from typing import IO, Final

from baton.runtime.heap import give_back

HEAD_BYTES: Final = 8


def serve(answer: Callable[[bytes], bytes], cpu_s: float, memory_bytes: int, *, nice: int) -> None:
    """Answer until the input ends; each question has `cpu_s`, all of them `memory_bytes`. `nice`:
    how much it leaves to other processes, 0 to 19."""
    os.nice(nice)
    resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    questions, answers = sys.stdin.buffer, sys.stdout.buffer
    _write(answers, b"")
    while head := questions.read(HEAD_BYTES):
        question = questions.read(int.from_bytes(head))
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        try:
            answered = answer(question)
        except MemoryError:
            os._exit(1)
        signal.setitimer(signal.ITIMER_PROF, 0)
        _write(answers, answered)
        num_bytes = len(question) + len(answered)
        del question, answered
        give_back(num_bytes)


def _write(pipe: IO[bytes], content: bytes) -> None:
    pipe.write(len(content).to_bytes(HEAD_BYTES))
    pipe.write(content)
    pipe.flush()
