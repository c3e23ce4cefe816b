"""Random names and seeds as `secrets` draws them, from bytes that the system gave all at once.

Each of a request's names would be a system call, and one that lets go of the GIL: beside threads
that tokenize, the event loop would wait to get it back.
"""

from __future__ import annotations

import os
from typing import Final

_AT_ONCE: Final = 4096  # bytes


class Draws:
    """Unguessable, each byte used once. Event loop only; a forked process draws its own."""

    def __init__(self) -> None:
        self._drawn = b""
        self._used = 0
        os.register_at_fork(after_in_child=self.forget)

    def hex(self, num_bytes: int) -> str:
        """So many random bytes in hexadecimal, as secrets.token_hex."""
        return self._take(num_bytes).hex()

    def seed(self) -> int:
        """64 random bits."""
        return int.from_bytes(self._take(8), "big")

    def forget(self) -> None:
        """The next bytes come from the system."""
        self._drawn, self._used = b"", 0

    def _take(self, num_bytes: int) -> bytes:
        start, end = self._used, self._used + num_bytes
        if end > len(self._drawn):
            self._drawn, start, end = os.urandom(max(_AT_ONCE, num_bytes)), 0, num_bytes
        self._used = end
        return self._drawn[start:end]


DRAWS: Final = Draws()
