"""OffLoop: runs work on prompts in a few threads, so that the event loop can serve streams.

Each kind of work has its own threads and queue (WorkLane), so short work never waits behind long
work. Within a kind, tenants get fair shares (router/tenants/turns.py).

    SHORT      texts of up to SHORT_CHARS: ~20 ms
    LONG       longer texts: seconds
    TEMPLATE   chats that a child process renders (baton/text/rendering.py)
    GRAMMAR    grammars that a child process builds (router/prompts/grammar_checks.py)
    IMAGE      images that a child process decodes (router/prompts/images.py)
"""

from __future__ import annotations

import asyncio
import enum
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

from baton.protocol.clock import Clock, SystemClock
from router.tenants.keys import Grant
from router.tenants.turns import Turns

T = TypeVar("T")
SHORT_CHARS: Final = 64 << 10
# Expected speed of tokenizing. The tenant is charged the real time afterwards.
CHARS_PER_S: Final = 2_000_000


# Niceness of the threads: on a shared core, the event loop and the engines go first.
NICENESS: Final = 10


class WorkLane(enum.Enum):
    """A kind of work. Its value is (name, how many run at once)."""

    SHORT = ("short", 2)
    LONG = ("long", 2)
    TEMPLATE = ("template", 2)
    GRAMMAR = ("grammar", 2)
    IMAGE = ("image", 2)

    @property
    def places(self) -> int:
        return self.value[1]


class OffLoop:
    """Runs work in its own threads. `close` ends them; calling it twice is safe."""

    def __init__(self, clock: Clock | None = None) -> None:
        threads = sum(lane.places for lane in WorkLane)
        self._threads = ThreadPoolExecutor(
            threads, thread_name_prefix="off-loop", initializer=_give_way
        )
        clock = clock or SystemClock()
        self._turns = {lane: Turns(lane.places, clock) for lane in WorkLane}

    async def text(self, grant: Grant, num_chars: int, work: Callable[[], T]) -> T:
        """Run `work` on a text of `num_chars` characters in a thread; return its result.

        Raises what `work` raises; Overloaded if too much work of the tenant waits."""
        lane = WorkLane.SHORT if num_chars <= SHORT_CHARS else WorkLane.LONG
        return await self.run(lane, grant, num_chars / CHARS_PER_S, work)

    async def run(self, lane: WorkLane, grant: Grant, cost_s: float, work: Callable[[], T]) -> T:
        """Run `work`, which takes about `cost_s`, in a thread of `lane`; return its result.

        If the caller is cancelled, `work` runs to its end and only then frees its place.
        Raises what `work` raises; Overloaded if too much work of the tenant waits."""

        place = await self._turns[lane].take(grant, cost_s)
        try:
            working = asyncio.get_running_loop().run_in_executor(self._threads, work)
        except BaseException:
            place.give_back()
            raise

        def ended(done: asyncio.Future[T]) -> None:
            place.give_back()
            # Read the exception, so that asyncio does not log it when nobody waits any more.
            _ = done.cancelled() or done.exception()

        working.add_done_callback(ended)
        return await asyncio.shield(working)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def _give_way() -> None:
    """Lower the priority of the calling thread (Linux): the event loop's thread goes first."""
    thread = threading.get_native_id()
    # Do not lower the niceness that the process already has: only root may do that.
    niceness = max(NICENESS, os.getpriority(os.PRIO_PROCESS, thread))
    os.setpriority(os.PRIO_PROCESS, thread, niceness)
