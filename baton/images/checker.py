"""Decodes clients' image files in child processes, where no file can do harm.

A decoder is native code, which no limit within a process could stop. A child ends when its time or
its memory is used up; then that image is refused, and no other request is affected.
"""

from __future__ import annotations

import sys
from typing import Final

from baton.images.checker_child import HEAD, SIZE
from baton.images.decoding import DecodedSize
from baton.protocol.errors import InvalidRequest, Unavailable
from baton.runtime.children import ChildBudget, Children, Excess, GivenUp

CHILD: Final = (sys.executable, "-m", "baton.images.checker_child")
# 50 million pixels of a PNG take about a second and 200 MB.
BUDGET: Final = ChildBudget(cpu_s=5.0, memory_bytes=1 << 30, wall_s=30.0)
RETRY_S: Final = 2
_WORDS: Final = {Excess.CPU: "time", Excess.MEMORY: "memory"}


class ImageChecker:
    """Decodes files in child processes, started when one is needed. For threads. `close` may be
    called twice."""

    def __init__(self, budget: ChildBudget = BUDGET) -> None:
        self.children = Children(CHILD, budget)

    def check(self, data: bytes, max_pixels: int, max_edge: int = 0) -> DecodedSize:
        """Call decoded_size (decoding.py) within limits.

        Raises its InvalidRequest, also for a file that takes too much time or memory; Unavailable
        if this machine was too busy."""
        try:
            told = self.children.ask(HEAD.pack(max_pixels, max_edge) + data)
        except GivenUp as error:
            raise _given_up(error.excess) from error
        if told[:1] != b"=":
            raise InvalidRequest(told[1:].decode())
        width, height = SIZE.unpack_from(told, 1)
        return DecodedSize(width, height, told[1 + SIZE.size :])

    def close(self) -> None:
        self.children.close()


def _given_up(excess: Excess) -> InvalidRequest | Unavailable:
    if excess is Excess.TIME:
        message = "the server is too busy to look at this image now"
        return Unavailable(message, retry_after_s=RETRY_S)
    return InvalidRequest(f"the image is given up: decoding it takes too much {_WORDS[excess]}")
