"""The program of a child of baton/runtime/children.py: it answers questions until its input ends.

When a question has used its CPU seconds, the kernel ends the process by SIGPROF. Nothing here
catches it, so even a call that never returns is ended. When the process has used its bytes, the
allocator ends it, or Python raises MemoryError and the process exits. Questions and answers are
frames: eight bytes of length, then that many bytes. The first answer is empty and says that the
child is ready.
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
    """Answer questions until the input ends.

    `cpu_s` is the CPU time of each question, `memory_bytes` the memory of the whole process. `nice`
    (0 to 19) lowers its priority below that of other processes.
    """
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
